"""SaveEvery: checkpoints by epochs, iterations and minutes, and how many of them are kept."""

import itertools
import json
import threading
import time
from functools import partial

import pytest
from campaign import thinned

from emrun import MainLoop, create_training
from emrun.base.errors import ArgumentError, HookError, StorageError
from emrun.hooks import SaveBest, SaveEvery, SaveLatest, StopAfter, StopOnNaN
from emrun.loop.checkpointer import check_saved_names
from emrun.storage.checkpoints.commits import commit


def named(run):
    """Return name -> (epoch, iteration) of a run's checkpoints, `latest` left out."""
    manifests = {
        path.name: json.loads((path / "manifest.json").read_text())
        for path in run.checkpoints.iterdir()
        if path.is_symlink() and path.name != "latest"
    }
    return {name: (manifest["epoch"], manifest["iteration"]) for name, manifest in sorted(manifests.items())}


def test_the_yaml_in_its_docstring_trains(train_digits, in_docstring):
    training = train_digits(in_docstring(SaveEvery), batch_size=500)
    assert named(training.main_loop.run) == {"epoch-0": (0, 0)}


SAVED = [
    ({}, {f"epoch-{n}": (n, 3 * n) for n in range(6)}),
    ({"n_epochs": 2}, {f"epoch-{n}": (n, 3 * n) for n in (0, 2, 4)}),
    ({"every": "2 epochs", "keep": 1}, {"epoch-4": (4, 12)}),
    ({"keep": 2}, {"epoch-4": (4, 12), "epoch-5": (5, 15)}),
    ({"every": "4 iterations"}, {"iteration-12": (3, 12), "iteration-4": (1, 4), "iteration-8": (2, 8)}),
    ({"every": "4 updates", "keep": 2}, {"iteration-12": (3, 12), "iteration-8": (2, 8)}),
    ({"keep": 1, "model_name": "my model"}, {"my_model-5": (5, 15)}),
    ({"n_epochs": 5, "model_name": "milestone"}, {"milestone-0": (0, 0), "milestone-5": (5, 15)}),
]


@pytest.mark.parametrize(("arguments", "expected"), thinned(SAVED, [SAVED[0], SAVED[2], *SAVED[4:]]))
def test_it_saves_when_it_is_due_and_keeps_what_it_should(scripted, numbers, run, arguments, expected):
    MainLoop(scripted(), numbers, [SaveEvery(**arguments), SaveLatest(), StopAfter(epochs=5)], run=run).run_training()
    assert named(run) == expected
    directories = [path for path in run.checkpoints.iterdir() if not path.is_symlink()]
    assert len(directories) == len(set(expected.values()) | {(5, 15)})


@pytest.mark.parametrize(
    ("accumulate", "every"),
    thinned(
        itertools.product((2, 4), ("1 iterations", "3 iterations", "5 iterations", "2 updates")),
        [(2, "3 iterations"), (4, "2 updates")],
    ),
)
def test_a_checkpoint_of_a_window_has_the_name_of_the_iteration_at_its_end(digits_config, tmp_path, accumulate, every):
    config = digits_config([{"SaveEvery": {"every": every}}, {"StopAfter": {"epochs": 2}}])
    config["model"]["accumulate"] = accumulate  # an epoch has 15 batches, so its last window is shorter
    training = create_training(config, output_dir=tmp_path / "run")
    training.main_loop.run_training()
    found = named(training.main_loop.run)
    assert found
    assert [int(name.removeprefix("iteration-")) for name in found] == [iteration for _, iteration in found.values()]
    ends = {*range(accumulate, 16, accumulate), 15, *range(15 + accumulate, 31, accumulate), 30}
    assert {iteration for _, iteration in found.values()} <= ends


def test_it_saves_by_minutes(scripted, numbers, run, monkeypatch):
    now = iter(range(0, 6000, 60))
    monkeypatch.setattr("emrun.record.intervals.monotonic", lambda: next(now))
    assert time.monotonic() > 0
    hooks = [SaveEvery(every="2 minutes"), StopAfter(epochs=2)]
    MainLoop(scripted(), numbers, hooks, run=run).run_training()
    assert list(named(run)) == ["iteration-2", "iteration-4", "iteration-6"]


def test_ten_comes_after_nine(scripted, numbers, run):
    MainLoop(scripted(), numbers, [SaveEvery(keep=2), StopAfter(epochs=11)], run=run).run_training()
    assert list(named(run)) == ["epoch-10", "epoch-11"]


def test_two_of_them_do_not_delete_each_others(scripted, numbers, run):
    hooks = [SaveEvery(keep=1, model_name="recent"), SaveEvery(2), StopAfter(epochs=5)]
    MainLoop(scripted(), numbers, hooks, run=run).run_training()
    assert list(named(run)) == ["epoch-0", "epoch-2", "epoch-4", "recent-5"]


def test_a_name_with_a_dot_is_no_pattern(scripted, numbers, run):
    hooks = [SaveEvery(4, model_name="v1x2"), SaveEvery(keep=1, model_name="v1.2"), StopAfter(epochs=5)]
    MainLoop(scripted(), numbers, hooks, run=run).run_training()
    assert list(named(run)) == ["v1.2-5", "v1x2-0", "v1x2-4"]


def test_a_hook_derived_from_it_gets_the_batches_that_it_listens_to(scripted, numbers, run):
    class Counts(SaveEvery):
        count = 0

        def after_batch(self, stream_name, batch_data):
            super().after_batch(stream_name, batch_data)
            self.count += 1

    every = Counts()
    MainLoop(scripted(), numbers, [every, StopAfter(epochs=2)], run=run).run_training()
    assert every.count > 0
    assert SaveEvery().after_batch is None


def test_it_keeps_no_more_while_the_previous_checkpoint_is_still_written(scripted, numbers, run, monkeypatch):
    """What was in flight was not counted: four of `keep: 3` were left, in one run of ten."""
    asked, before = threading.Event(), SaveEvery._request

    def slow(*args, **more):
        if more["iteration"] == 12:
            assert asked.wait(60)  # until the next one is asked for
        return commit(*args, **more)

    def request(hook, number):
        before(hook, number)
        if number == 5:
            asked.set()

    monkeypatch.setattr("emrun.loop.checkpointer.commit", slow)
    monkeypatch.setattr(SaveEvery, "_request", request)
    model = scripted()
    model.stage = lambda: model.save
    MainLoop(model, numbers, [SaveEvery(keep=3), StopAfter(epochs=5)], run=run).run_training()
    assert list(named(run)) == ["epoch-3", "epoch-4", "epoch-5"]


@pytest.mark.parametrize("order", thinned([1, -1], [1]))
@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        (SaveBest, partial(SaveBest, variable="accuracy"), "name: 'best'; give SaveBest .* another model_name"),
        (partial(SaveBest, "epoch-1"), SaveEvery, "name: 'epoch', 'epoch-1'; give"),
        (SaveEvery, partial(SaveEvery, 2), "name: 'epoch'; give"),
        (partial(SaveBest, "a/b"), partial(SaveBest, "a_b"), "name: 'a_b'; give"),
        (partial(SaveBest, "latest"), StopOnNaN, "and the end of every training may save .* name: 'latest'"),
        (partial(SaveBest, "before-cooldown"), StopOnNaN, "and schedules with a cool-down may .* 'before-cooldown'"),
        (partial(SaveBest, "it-00000005"), StopOnNaN, "and emrun, for the directories, may .* 'it', 'it-00000005'"),
        (partial(SaveEvery, model_name="it"), StopOnNaN, "and emrun, for the directories, may .* 'it'"),
        (partial(SaveBest, keep=2), partial(SaveBest, "best-7", "accuracy"), "name: 'best', 'best-7'; give"),
    ],
    ids=str,
)
def test_two_hooks_that_save_under_one_name_are_refused(scripted, numbers, run, one, other, named, order):
    with pytest.raises(HookError, match=named):
        MainLoop(scripted(), numbers, [one(), other()][::order], run=run).check_hooks()
    loop = MainLoop(scripted(), numbers, [quiet := StopAfter(epochs=1)], run=run)
    loop.change_hooks([quiet, one(), other()])
    with pytest.raises(HookError, match=named):
        loop.run_training()
    assert not run.checkpoints.exists()


def test_names_that_only_look_alike_are_not_refused(scripted, numbers, run):
    check_saved_names(
        [SaveEvery(), SaveBest("epoch-best"), SaveBest("epoch-best-1-2"), SaveBest("top-1"), SaveBest("top-5")]
    )


def test_hooks_of_the_same_name_are_told_by_class_and_number(scripted, numbers, run):
    both = r"SaveBest \(hooks\[1\]\) and SaveEvery \(hooks\[0\]\) may save checkpoints"
    with pytest.raises(HookError, match=both):
        MainLoop(scripted(), numbers, [SaveEvery(), SaveBest("epoch")], run=run).check_hooks()


def test_when_one_cannot_be_saved_the_older_ones_stay(scripted, numbers, run, caplog):
    model = scripted()
    hook = SaveEvery(keep=1, on_failure="warn")
    real, fails = model.save, {1, 2}
    model.save = lambda directory: (
        real(directory) if hook.main_loop.training_epochs_done not in fails else (_ for _ in ()).throw(OSError("full"))
    )
    seen = []
    hook.before_epoch = lambda epoch_id: seen.append(list(named(run)) if run.checkpoints.exists() else [])
    MainLoop(model, numbers, [hook, StopAfter(epochs=4)], run=run).run_training()
    assert seen == [[], ["epoch-0"], ["epoch-0"], ["epoch-0"], ["epoch-3"]]
    assert caplog.text.count("no checkpoint was saved") == 2
    assert list(named(run)) == ["epoch-4"]


def test_when_one_cannot_be_saved_the_training_fails(scripted, numbers, run):
    model = scripted()
    model.save = lambda directory: (_ for _ in ()).throw(OSError("full"))
    with pytest.raises(StorageError, match="full"):
        MainLoop(model, numbers, [SaveEvery(), StopAfter(epochs=2)], run=run).run_training()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_epochs": 0}, "n_epochs: 0 is not a whole number of at least 1"),
        ({"n_epochs": "5 updates"}, "n_epochs: '5 updates' is not a number of epochs; write every: 5 updates"),
        ({"n_epochs": 5, "every": "5 updates"}, "n_epochs: n_epochs and every are both given; remove one of them"),
        (
            {"every": "5 hours"},
            "every: '5 hours' is not an interval; write for example '5 epochs'; the units here are epochs, updates, "
            "iterations, minutes",
        ),
        ({"keep": 0}, "keep: "),
        ({"on_failure": "stop"}, "stop"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(arguments, message):
    with pytest.raises(ArgumentError) as caught:
        SaveEvery(**arguments)
    assert message in str(caught.value)


def test_it_needs_a_run_directory(scripted, numbers):
    with pytest.raises(HookError, match="SaveEvery saves checkpoints, but the main loop has no run directory"):
        MainLoop(scripted(), numbers, [SaveEvery()])
