"""What is compared between runs, where the runs are interrupted, and the likely cause of a difference.

The recordings here are written by hand; tests/cli/test_verify_resume.py has real runs.
"""

import copy
import json

import pytest

from emrun.base.errors import UsageError
from emrun.diagnosis.differences import Causes, Difference, find_difference, find_rounded, varying
from emrun.diagnosis.recorded_trainings import Job, Point, Recording
from emrun.diagnosis.verification import _chosen, _usual, verify

GENERATORS = {"python": "a", "numpy": "b", "torch": "c"}


def batch(iteration, stream="train", number=None, **changes):
    training = number is None
    event = {
        "kind": "batch",
        "training": training,
        "iteration": iteration,
        "stream": stream,
        "number": number,
        "batch": f"batch {iteration} {number}",
        "random_before": dict(GENERATORS),
        "outputs": {"loss": f"loss {iteration}", "accuracy": "1"},
        "shown": {"loss": f"0.{iteration}", "accuracy": "1"},
        "rates": ["0.1"],
        "random": dict(GENERATORS),
        "pass": (iteration - 1) // 6 + 1,
    }
    return {**event, **changes}


def final(**changes):
    parts = ("weights", "model", "loop", "streams", "generators", "hooks", "metrics", "steps")
    return {"kind": "final", **{part: {"x": "1"} for part in parts}, **changes}


def straight(epoch=4, end=10, evaluated=("valid",), **private):
    """Return the recording of a run of two and a half epochs, with three batches in every evaluation."""
    events = [{"kind": "begin", "iteration": 0, "epochs": 0}]
    for iteration in range(1, end + 1):
        events.append(batch(iteration))
        if iteration % epoch == 0:
            events += [batch(iteration, stream, number) for stream in evaluated for number in (1, 2, 3)]
            events.append({"kind": "epoch", "epoch": iteration // epoch, "iteration": iteration})
    return Recording([*events, {"kind": "private", **private}, final()], 0)


def changed(recording, change):
    events = copy.deepcopy(recording.events)
    change({(event["iteration"], event["number"]): event for event in events if event["kind"] == "batch"}, events)
    return Recording(events, 0)


def compare(change):
    return find_difference(straight(), [changed(straight(), change)], {})


def test_equal_runs_have_no_difference():
    assert find_difference(straight(), [straight()], {}) is None


def test_batches_that_are_run_again_are_compared_again():
    first = Recording(straight().events[:8], -9)
    again = Recording([{"kind": "begin", "iteration": 4}, *straight().events[8:]], 0)
    assert find_difference(straight(), [first, again], {}) is None
    again.of("batch")[0]["outputs"]["loss"] = "another"
    assert find_difference(straight(), [first, again], {}).part == "outputs"


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("batch", "another", "iteration 5: the batch differs"),
        ("random_before", {**GENERATORS, "numpy": "x"}, "iteration 5: random state of numpy before the batch"),
        ("outputs", {"loss": "x", "accuracy": "1"}, "iteration 5: output loss"),
        ("outputs", {"loss": "loss 5", "accuracy": "2"}, "iteration 5: output accuracy"),
        ("rates", ["0.2"], "iteration 5: learning rate (0.1 uninterrupted, 0.2 in the other run)"),
        ("random", {**GENERATORS, "torch": "x"}, "iteration 5: random state of torch after the batch"),
    ],
)
def test_the_first_difference_in_a_batch_is_reported_with_its_iteration(key, value, what):
    def change(batches, events):
        batches[5, None][key] = value
        batches[6, None]["batch"] = "another too"

    assert compare(change).what == what


def test_a_difference_in_an_evaluation_is_reported_with_its_batch():
    def change(batches, events):
        batches[4, 2]["batch"] = "another"

    assert compare(change).what == "evaluation of valid at iteration 4, batch 2: the batch differs"


def test_a_batch_too_many_or_too_few_is_a_difference():
    assert "no such batch" in compare(lambda batches, events: events.insert(3, batch(77))).what
    assert compare(lambda batches, events: events.pop(2)).what == "iteration 2: missing in the other run"


@pytest.mark.parametrize(
    ("part", "title"),
    [
        ("weights", "parameter or buffer x"),
        ("model", "model state x"),
        ("loop", "counter x"),
        ("streams", "position of stream x"),
        ("generators", "random state of x"),
        ("hooks", "state of hook x"),
        ("metrics", "metrics.jsonl, x"),
        ("steps", "steps.jsonl, x"),
    ],
)
@pytest.mark.parametrize("value", [{"x": "2"}, {}, {"x": "1", "y": "1"}])
def test_every_part_of_the_end_is_compared(part, title, value):
    def change(batches, events):
        events[-1] = final(**{part: value})

    assert compare(change).what.startswith(f"at the end: {title if 'y' not in value else title.replace('x', 'y')}")


def test_what_differs_without_interruption_is_left_out():
    other = Recording([*straight().events[:-1], final(hooks={"x": "1", "Clock.time": "5"})], 0)
    assert find_difference(straight(), [other], {}) is not None
    assert find_difference(straight(), [other], {"hooks": varying({"x": "1"}, other.final["hooks"])}) is None


# where


def test_the_usual_points_are_the_middle_the_end_of_a_pass_the_boundary_and_an_evaluation():
    assert list(_usual(straight())) == [
        Point("the middle of an epoch", 5, "train"),
        Point("the end of a pass", 6, "train"),
        Point("the last batch of an epoch", 4, "train"),
        Point("an evaluation (valid)", 4, "valid", 2),
    ]


def test_without_evaluations_and_with_whole_passes_two_points_are_left():
    points = list(_usual(straight(epoch=6, end=14, evaluated=())))
    assert [(point.name, point.iteration) for point in points] == [
        ("the middle of an epoch", 9),
        ("the last batch of an epoch", 6),
    ]


def test_an_update_of_several_batches_is_interrupted_in_its_middle():
    found = straight(epoch=6, end=14, evaluated=())
    windows = Recording([{"kind": "begin", "window": 2}, *found.events], 0)
    assert [(point.name, point.iteration) for point in _usual(windows)] == [
        ("the middle of an epoch", 8),
        ("the middle of an update", 9),
        ("the last batch of an epoch", 6),
    ]


def test_a_run_that_ends_in_its_first_epoch_is_interrupted_there():
    assert list(_usual(straight(epoch=8, end=5))) == [Point("the middle of an epoch", 2, "train")]
    assert list(_usual(straight(epoch=8, end=1))) == []


def test_iterations_beyond_the_end_are_refused():
    assert _chosen(straight(), [3, 9, 3], 9) == [
        Point("the given iteration", 3, "train"),
        Point("the given iteration", 9, "train"),
    ]
    with pytest.raises(UsageError, match="--at must be from 1 to 9, not 10; the run has 10 iterations"):
        _chosen(straight(), [3, 10], 9)


# why


def explain(part, change, buffer=0, repeated=False, now=None, **private):
    one = straight(**private)
    other = changed(straight(attributes=now or {}), change)
    again = other if repeated else straight(**private)
    found = find_difference(one, [other], {})
    assert found.part == part
    return Causes(one, again, buffer).explain(found, other).cause


def another(key, value="another"):
    def change(batches, events):
        batches[5, None][key] = value

    return change


def test_a_draw_in_a_read_ahead_thread_explains_batches_and_random_states():
    draws = {"valid": [], "train": ["numpy", "python"]}
    cause = "stream 'train' draws from the global random state of numpy and python in a read-ahead thread"
    assert explain("batch", another("batch"), buffer=2, draws=draws).startswith(cause)
    changes = another("random", {**GENERATORS, "numpy": "x"})
    assert explain("random", changes, buffer=2, draws=draws, repeated=True).startswith(cause)
    assert not explain("batch", another("batch"), draws=draws).startswith(cause)


def test_a_run_that_does_not_repeat_itself_is_explained_by_the_time_or_by_kernels():
    assert "yields other batches each time it is read" in explain("batch", another("batch"), repeated=True)
    changes = another("outputs", {"loss": "x"})
    assert "`deterministic: true`" in explain("outputs", changes, repeated=True)
    changes = another("random", {**GENERATORS, "torch": "x"})
    assert "more than the seed" in explain("random", changes, repeated=True)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("module Net, attribute 'steps'", "the module has state outside its parameters and buffers"),
        ("model Mine, attribute 'steps'", "the model has state that its state_dict() does not return"),
        ("hook Warmup, attribute 'steps'", "a hook has state that its state_dict() does not return"),
        ("dataset Data, attribute 'steps'", "the dataset has state that does not come from ctx"),
        ("parameters that no optimizer trains", "your code replaces parameters in the training"),
        ("loss.second Center, attribute 'steps'", "a loss has state, and checkpoints do not save losses"),
    ],
)
def test_an_attribute_that_is_in_no_checkpoint_is_named_with_its_values(name, hint):
    changes = another("outputs", {"loss": "x"})
    cause = explain("outputs", changes, attributes={name: "9", "hook Other, attribute 'a'": "1"}, now={
        name: "4", "hook Other, attribute 'a'": "1"})  # fmt: skip
    assert cause.startswith(hint)
    assert cause.endswith(f"{name} (9 uninterrupted, 4 in the other run)")


def test_a_buffer_that_is_not_persistent_is_named_before_the_state_of_hooks():
    name = "module Net, buffer 'mean' (persistent=False)"
    causes = Causes(
        straight(attributes={name: "digest a", "hook Warmup, attribute 'steps'": "1"}),
        straight(attributes={name: "digest a", "hook Warmup, attribute 'steps'": "1"}),
        0,
    )
    other = straight(attributes={name: "digest b", "hook Warmup, attribute 'steps'": "2"})
    cause = causes.explain(Difference("x", "weights"), other).cause
    assert cause.startswith("a buffer with persistent=False changes in training")
    assert cause.partition(": ")[2].startswith(name)


def test_the_likeliest_cause_of_the_difference_is_named_first():
    before = {"dataset D, attribute 'n'": "1", "hook H, attribute 'n'": "1", "module M, attribute 'n'": "1"}
    after = dict.fromkeys(before, "2")
    cases = {
        "batch": another("batch"),
        "rates": another("rates", ["0.3"]),
        "outputs": another("outputs", {"loss": "x"}),
    }
    causes = {part: explain(part, change, attributes=before, now=after) for part, change in cases.items()}
    assert [cause.split(": ")[1].split()[0] for cause in causes.values()] == ["dataset", "hook", "module"]


def test_without_a_trace_the_hooks_without_a_state_are_suspected():
    change = another("rates", ["0.3"])
    assert explain("rates", change, forgetful=["Warmup", "Freeze"]).endswith("hooks without state_dict: Warmup, Freeze")
    assert explain("rates", change) is None


def resumed(wrong=(), **parts):
    return Recording([final(**parts)], 0, [[{"kind": "restored", "wrong": []}], [{"kind": "restored", "wrong": wrong}]])


@pytest.mark.parametrize(
    ("other", "what", "largest"),
    [
        (resumed(), None, 0.0),
        (resumed(steps={"x": "1.00001"}, metrics={"x": "0.99"}), None, 0.01),
        (resumed(weights={"x": "2"}, generators={"x": "2"}, hooks={}), None, 0.0),  # these are not compared
        (resumed(["['embed.weight']"]), "when it was resumed: ['embed.weight'] is not that of the checkpoint", 0.0),
        (resumed(loop={"x": "1.00001"}), "at the end: counter x (1 uninterrupted, 1.00001 in the other run)", 0.0),
        (resumed(steps={"x": "1.2"}), "at the end: steps.jsonl, x (1 uninterrupted, 1.2 in the other run)", 0.0),
        (resumed(steps={"x": "nan"}), "at the end: steps.jsonl, x (1 uninterrupted, nan in the other run)", 0.0),
        (resumed(metrics={"x": "present"}), "at the end: metrics.jsonl, x (1 uninterrupted, present in the", 0.0),
        (resumed(metrics={}), "at the end: metrics.jsonl, x (only in the uninterrupted run)", 0.0),
        (resumed(metrics={"x": "1", "y": "1"}), None, 0.0),  # y is left out
    ],
)
def test_on_another_number_of_ranks_weights_are_equal_and_metrics_rounded(other, what, largest):
    found, share = find_rounded(straight(), other, {"metrics": ["y"]}, 0.02)
    assert share == pytest.approx(largest)
    if what is None:
        assert found is None
    else:
        assert found.what.startswith(what)


def test_a_recording_is_plain_json():
    assert json.loads(json.dumps(straight().events)) == straight().events


@pytest.mark.parametrize(
    ("arguments", "most", "more"), [({}, 13, 9), ({"full_epochs": True}, 12, 9), ({"at": [3, 7]}, 7, 5)], ids=str
)
def test_the_number_of_runs_is_told_before_the_first_and_the_time_after_it(
    arguments, most, more, tmp_path, monkeypatch, caplog
):
    runs, told = [], []
    clock = iter((100.0, 130.0))
    monkeypatch.setattr("emrun.diagnosis.verification.time.monotonic", lambda: next(clock))
    monkeypatch.setattr(Job, "run", lambda job, forks: runs.append(len(caplog.messages)) or straight())
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    with caplog.at_level("INFO"):
        verify(tmp_path / "config.yaml", ranks=2, tell=lambda done, most: told.append((done, most)), **arguments)
    assert caplog.messages[:3] == [
        f"making up to {most} short runs, each in a process of its own",
        "running without interruption",
        f"{more} more runs will take about {more // 2} minutes",
    ]
    assert runs[:2] == [2, 4]
    assert told == [(0, most), *((done, 1 + more) for done in range(1, len(runs)))]
