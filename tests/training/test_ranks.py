"""A run on several ranks is the run of one process: the same batches, losses, statistics, checkpoints."""

import itertools
import json
import os
import signal
import sys

import numpy as np
import pytest
import torch
from campaign import thinned
from in_ranks import in_ranks, results_of

from emrun import AbstractHook, create_training, resume_training
from emrun.base.errors import RankFailed
from emrun.hooks import SaveEvery
from emrun.ranks.group import ranks
from emrun.ranks.shares import rows_in
from emrun.training.create import train
from emrun.training.evaluate import evaluate
from emrun.training.predict import predict

PARTS = '''
import os
import time

import numpy as np
import torch

from emrun import AbstractHook, AbstractModel, TorchModel


class Data:
    """37 examples, in a shuffled order or as a stream without `ctx`, which each rank reads whole."""

    def __init__(self, kind="context", batch_size=8, worker_draws=False):
        self.x = np.random.default_rng(0).normal(size=(37, 5))
        self.batch_size = batch_size
        self.train_stream = getattr(self, kind)

    def batch(self, rows):
        return {"row": rows, "x": self.x[rows], "y": (self.x[rows].sum(axis=1) > 0).astype(np.int64)}

    def context(self, ctx):
        for rows in ctx.batches(37, self.batch_size, shuffle=True):
            yield self.batch(rows)

    train_stream = context

    def plain(self):
        for first in range(0, 37, self.batch_size):
            yield self.batch(np.arange(first, min(first + self.batch_size, 37)))

    def filtered(self, ctx):
        order = ctx.rng.permutation(37)
        for first in range(0, 30, self.batch_size):
            yield self.batch(order[first : first + self.batch_size])

    def drawn(self):
        for _ in range(4):
            yield self.batch(np.random.permutation(37)[: self.batch_size])

    def valid_stream(self, ctx):
        for rows in ctx.batches(11, self.batch_size):
            yield self.batch(rows)


def net(dropout=0.0):
    layers = [torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(6, 2)]
    return torch.nn.Sequential(*layers).double()


def normed():
    # the gradient of a bias before BatchNorm is nothing but rounding, which Adam would magnify
    layers = [torch.nn.Linear(5, 6, bias=False), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2)]
    return torch.nn.Sequential(*layers).double()


class OnFirst(AbstractHook):
    """Changes a parameter on rank 0 only."""

    def after_epoch(self, epoch_id):
        if epoch_id == 1:
            with torch.no_grad():
                self.main_loop.model.module[0].weight[0, 0] += 1


class Hangs(AbstractHook):
    """Waits on rank 1 until rank 0 has failed."""

    every_rank = True
    reads = ()

    def after_batch(self):
        while self.main_loop.ranks.rank == 1 and not os.path.exists("woken"):
            time.sleep(0.01)


class Hits:
    """A metric of a whole stream."""

    def __init__(self):
        self.reset()

    def update(self, y):
        self.count += len(y)

    def compute(self):
        return self.count

    def reset(self):
        self.count = 0


class OwnModel(AbstractModel):
    """A model without torch."""

    input_names, output_names = ["x"], ["loss"]

    def run(self, batch, train, stream):
        return {"loss": batch["x"].sum(axis=1)}

    def save(self, directory):
        (directory / "weights").touch()

    def load(self, directory):
        pass


class OwnStep(TorchModel):
    """Makes its updates itself."""

    def train_step(self, inputs):
        outputs = self.forward(inputs)
        self.optimizer.zero_grad()
        outputs["loss"].mean().backward()
        self.optimizer.step()
        return outputs
'''


def config_of(**changes):
    config = {
        "seed": 3,
        "dataset": {"class": "parts.Data"},
        "model": {
            "module": {"class": "parts.net"},
            "inputs": ["x"],
            "outputs": ["logits"],
            "loss": {"class": "torch.nn.CrossEntropyLoss", "inputs": ["logits", "y"], "reduction": "none"},
            "metrics": {"accuracy": {"import": "emrun.metrics.accuracy", "inputs": ["logits", "y"]}},
            "optimizer": {"class": "Adam", "lr": 0.01},
        },
        "main_loop": {"extra_streams": ["valid"], "report": False, "skip_zeroth_epoch": True},
        "hooks": [
            {"ComputeStats": {"variables": [{"loss": ["mean", "std", "min", "max", "median"]}, "accuracy"]}},
            {"StopAfter": {"epochs": 2}},
        ],
    }
    for path, value in changes.items():
        section, _, key = path.partition("__")
        if key:
            config[section][key] = value
        else:
            config[section] = value
    return config


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


class Rows(AbstractHook):
    """Notes the rows of the batches that this rank trains on, and ends the run as asked."""

    every_rank = True
    reads = ()

    def __init__(self, at=None, how=None, rank=None):
        super().__init__()
        self.rows, self.at, self.how, self.rank = [], at, how, rank

    def before_batch(self, stream_name, batch):
        if self.main_loop.training:
            self.rows.append((batch["row"].tolist(), rows_in(batch)))
            if len(self.rows) == self.at and self.rank in (None, ranks().rank):
                os.kill(os.getpid(), self.how)


def trained(config, directory, hook=None, resumes=False, changes=()):
    """Train on this rank; return the rows it trained on, the status and the reason."""
    training = resume_training(directory, changes) if resumes else create_training(config, output_dir=directory)
    hook = hook or Rows()
    training.main_loop.change_hooks([hook, *training.hooks])
    outcome = train(training)
    return hook.rows, outcome.status, outcome.reason


def result_of(directory):
    """Return the metrics without times, the losses of all steps and the weights of a run."""
    from safetensors.torch import load_file

    from emrun import read_steps

    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    losses = read_steps(directory)["loss"].tolist()
    return [line["streams"] for line in lines], losses, load_file(directory / "checkpoints/latest/model.safetensors")


def flat(tree, path=""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{path}{name}/")
        else:
            yield f"{path}{name}", value


def assert_close(one, other, within=1e-9):
    (metrics, losses, weights), (others, other_losses, other_weights) = one, other
    assert len(metrics) == len(others)
    for line, other_line in zip(metrics, others, strict=True):
        assert dict(flat(other_line)) == pytest.approx(dict(flat(line)), abs=within)
    assert other_losses == pytest.approx(losses, abs=within)
    assert weights.keys() == other_weights.keys()
    for name, value in weights.items():
        assert torch.allclose(value, other_weights[name], rtol=0, atol=within)


def assert_same(one, other):
    assert one[:2] == other[:2]
    assert all(torch.equal(value, other[2][name]) for name, value in one[2].items())


VARIANTS = {
    "context": {},
    "plain": {"dataset__kind": "plain"},
    "filtered": {"dataset__kind": "filtered"},
    "workers": {"main_loop__workers": 2},
    "accumulate": {"model__accumulate": 3, "dataset__batch_size": 5},
    "micro batches": {"model__micro_batch_size": 2},
    "batches smaller than ranks": {"dataset__batch_size": 2, "main_loop__skip_zeroth_epoch": False},
    "mixed": {
        "dataset": {
            "class": "Mixed",
            "datasets": {"one": {"class": "parts.Data", "kind": "plain"}, "other": {"class": "parts.Data"}},
            "weights": {"one": 1, "other": 2},
            "batches_per_epoch": 6,
        },
        "main_loop": {"extra_streams": ["valid", "other_valid"]},
    },
    "synchronised BatchNorm": {
        "model__module": {"class": "parts.normed"},
        "model__sync_batch_norm": True,
        "dataset__batch_size": 5,  # the last batch has two rows
    },
    "accumulate with synchronised BatchNorm": {
        "model__module": {"class": "parts.normed"},
        "model__sync_batch_norm": True,
        "model__accumulate": 3,
        "dataset__batch_size": 5,
    },
    "fixed epochs": {"main_loop__fixed_epoch_size": 7},
    "clip and averages": {
        "hooks": [
            "ComputeStats",
            {"ClipGradients": {"norm": 0.5}},
            {"AverageWeights": {"decay": 0.9}},
            {"StopAfter": {"epochs": 3}},
        ],
        "model__scheduler": {"class": "Cosine", "warmup": "2 updates"},
    },
    "a plateau": {
        "model__scheduler": {
            "class": "ReduceLROnPlateau",
            "metric": "valid/loss/mean",
            "patience": 0,
            "factor": 0.3,
            "warmup": "2 passes",
        },
        "model__optimizer": {"class": "Adam", "lr": 1.0},
        "hooks": ["ComputeStats", {"StopOnPlateau": {"short_term": 1, "long_term": 3}}, {"StopAfter": {"epochs": 20}}],
    },
    "whole-stream metrics": {
        "model__metrics": {
            "f1": {"class": "torchmetrics.F1Score", "task": "multiclass", "num_classes": 2, "inputs": ["logits", "y"]}
        },
        "hooks": [{"ComputeStats": {"variables": ["loss"]}}, {"StopAfter": {"epochs": 3}}],
    },
}


FEW = [("accumulate with synchronised BatchNorm", 2)]


@pytest.mark.parametrize(("name", "size"), thinned([*FEW, *((name, 3) for name in VARIANTS)], FEW))
def test_every_number_of_ranks_trains_on_the_same_batches_with_the_same_results(project, name, size):
    if "metrics" in name:
        pytest.importorskip("torchmetrics")
    config = config_of(**VARIANTS[name])
    rows, *_ = trained(config, project / "one")
    expected = result_of(project / "one")
    found = in_ranks(size, trained, config, project / "run")
    for number, (whole, count) in enumerate(rows):
        shares = [each[0][number] for each in found]
        assert [row for share, own in shares for row in share[:own]] == whole
        assert sum(own for _, own in shares) == count
    assert_close(expected, result_of(project / "run"))


def test_a_rank_that_writes_no_plan_finds_the_length_of_the_run_before_it_reads_the_stream(project):
    """Only rank 0 plans the schedule when the objects are built; here, no rank does."""
    training = create_training(config_of(**VARIANTS["clip and averages"]), output_dir="run", checks_schedule=False)
    assert train(training).status == "finished"
    assert training.main_loop.horizon.updates == 3 * 5


@pytest.mark.campaign
@pytest.mark.parametrize(("size", "iterations"), [(2, 200), (4, 200)])
def test_in_float32_over_many_iterations_the_losses_stay_within_1e_4(project, size, iterations):
    (project / "parts.py").write_text(
        PARTS.replace(".double()", "").replace("size=(37, 5))", "size=(37, 5)).astype('f')")
    )
    config = config_of(hooks=["ComputeStats", {"StopAfter": {"iterations": iterations}}])
    trained(config, project / "one")
    in_ranks(size, trained, config, project / "several")
    assert_close(result_of(project / "one"), result_of(project / "several"), within=1e-4)


@pytest.mark.campaign
@pytest.mark.parametrize(("size", "iterations"), [(2, 200), (3, 200), (4, 200)])
def test_in_float64_with_synchronised_batch_norm_all_values_stay_within_1e_9(project, size, iterations):
    config = config_of(
        model__module={"class": "parts.normed"},
        model__sync_batch_norm=True,
        model__accumulate=2,
        hooks=["ComputeStats", {"StopAfter": {"iterations": iterations}}],
    )
    trained(config, project / "one")
    in_ranks(size, trained, config, project / "several")
    assert_close(result_of(project / "one"), result_of(project / "several"))


@pytest.mark.campaign  # test_mechanics.py has a killed run on two ranks in `make test`
@pytest.mark.parametrize(("at", "how"), list(itertools.product((2, 7), (signal.SIGKILL, signal.SIGTERM))))
def test_an_interrupted_run_of_two_ranks_with_dropout_equals_the_uninterrupted_one(project, at, how):
    metrics = {
        "f1": {"class": "torchmetrics.F1Score", "task": "multiclass", "num_classes": 2, "inputs": ["logits", "y"]}
    }
    pytest.importorskip("torchmetrics")
    config = config_of(model__metrics=metrics)
    config["model"]["module"]["dropout"] = 0.3
    config["hooks"] = [
        {"ComputeStats": {"variables": ["loss"]}},
        {"SaveEvery": {"every": "3 updates"}},
        *config["hooks"][1:],
    ]
    in_ranks(2, trained, config, project / "straight")
    found = results_of(2, trained, config, project / "run", Rows(at, how, rank=1))
    if how == signal.SIGTERM:
        assert [each[1:] for each in found] == [("interrupted", "interrupted by SIGTERM")] * 2
    else:
        assert found[1] == -signal.SIGKILL
        assert (found[0].kind, found[0].message) == ("RankFailed", "another rank has ended")
    in_ranks(2, trained, None, project / "run", None, True)
    assert_same(result_of(project / "straight"), result_of(project / "run"))


SIZES = [(1, 2), (2, 3), (3, 2), (4, 1), (2, 1)]


@pytest.mark.parametrize(
    ("before", "after", "metrics"),
    thinned([(1, 2, {}), *((*sizes, VARIANTS["whole-stream metrics"]) for sizes in SIZES)], [(1, 2, {})]),
)
def test_a_checkpoint_of_any_number_of_ranks_is_resumed_on_any_other(project, before, after, metrics):
    if metrics:
        pytest.importorskip("torchmetrics")  # whose import is dearer than the ranks
    config = config_of(model__metrics=metrics.get("model__metrics", {}))
    config["hooks"][0] = {"ComputeStats": {"variables": [{"loss": ["mean", "std", "median"]}]}}
    trained(config, project / "straight")
    in_ranks(before, trained, config, project / "run", Rows(7, signal.SIGTERM))
    in_ranks(after, trained, None, project / "run", None, True)
    assert_close(result_of(project / "straight"), result_of(project / "run"))
    told = (project / "run" / "train.log").read_text()
    assert f"the run was trained on {before} rank" in told
    assert f"is resumed on {after} rank" in told


@pytest.mark.campaign  # tests/loop/ranks has what ranks agree upon
def test_checkpoints_by_minutes_are_saved_by_all_ranks_after_the_same_batch(project, monkeypatch):
    def run():
        looks = itertools.count()  # no two clocks are equal
        monkeypatch.setattr("emrun.record.intervals.monotonic", lambda: next(looks) * (130 if ranks().rank else 50))
        training = create_training(config_of(), output_dir=project / "run")
        loop, asked = training.main_loop, []
        loop.change_hooks([SaveEvery(every="2 minutes"), *training.hooks])
        requests = loop.parts.requests.checkpoints
        add = requests.add
        requests.add = lambda *args: (asked.append((loop.iterations_done, args[0])), add(*args))
        train(training)
        return [each for each in asked if each[1].startswith("iteration")]

    one, other = in_ranks(2, run)
    assert one == other != []


@pytest.mark.campaign
def test_a_hook_on_rank_0_ends_all_ranks_after_the_same_batch(project):
    class Ends(AbstractHook):
        def after_batch(self):
            if self.main_loop.iterations_done == 4 and self.main_loop.training:
                from emrun import TrainingTerminated

                raise TrainingTerminated("enough")

    def run():
        training = create_training(config_of(), output_dir=project / "run")
        training.main_loop.change_hooks([Ends(), *training.hooks])
        outcome = train(training)
        return outcome.reason, training.main_loop.iterations_done

    first, second = in_ranks(2, run)
    assert first == second
    assert first[0] == "enough"
    assert 4 <= first[1] <= 15


def test_sigusr1_to_one_rank_saves_a_checkpoint_of_all_and_each_has_a_log(project):
    in_ranks(2, trained, config_of(), project / "run", Rows(4, signal.SIGUSR1, rank=1))
    assert "checkpoint" in (project / "run" / "train.log").read_text()
    assert any((project / "run" / "checkpoints").glob("it-*"))
    assert "batch 8 = 2 ranks x 4" in (project / "run" / "train.log").read_text()
    assert "batch 8 = 2 ranks x 4" in (project / "run" / "train-1.log").read_text()
    assert "ranks: 2\n" in (project / "run" / "trace.yaml").read_text()


def test_streams_that_draw_other_batches_on_each_rank_are_an_error(project):
    for each in results_of(2, trained, config_of(dataset__kind="drawn"), project / "run"):
        assert each.kind == "DifferentRanks"
        assert each.message.startswith(
            "rank 1 reads another batch of stream 'train' than rank 0: the stream depends on"
        )


@pytest.mark.campaign
def test_a_hook_that_changes_the_model_on_one_rank_is_found_at_the_end_of_the_next_epoch(project):
    config = config_of()
    config["hooks"].append("parts.OnFirst")
    for each in results_of(2, trained, config, project / "run"):
        assert each.kind == "DifferentRanks"
        assert each.message.startswith("parameter '0.weight' differs between rank 0 and rank 1")


IMPOSSIBLE = {
    "fp16": ({"model__precision": "fp16"}, "model.precision: fp16 does not work with several ranks yet; use bf16"),
    "a metric of one's own": (
        {"model__metrics": {"own": {"class": "parts.Hits", "inputs": ["y"]}}},
        "need a metric of torchmetrics",
    ),
    "a model of one's own": ({"model": {"class": "parts.OwnModel"}}, "OwnModel does not train on several ranks"),
    "synchronised micro batches": (
        {"model__sync_batch_norm": True, "model__module": {"class": "parts.normed"}, "model__micro_batch_size": 2},
        "sync_batch_norm: cannot be used with micro_batch_size",
    ),
    "a step of one's own": ({"model__class": "parts.OwnStep"}, "OwnStep.train_step has made no update in its first"),
}


@pytest.mark.parametrize("name", thinned(IMPOSSIBLE, ["fp16"]))
def test_what_several_ranks_cannot_do_is_an_error_at_its_line_that_leaves_nothing(project, name):
    (project / "parts.py").write_text(
        PARTS.replace(".double()", "").replace("size=(37, 5))", "size=(37, 5)).astype('f')")
    )
    changes, message = IMPOSSIBLE[name]
    for each in results_of(2, trained, config_of(**changes), project / "run"):
        assert each.kind in ("ConfigError", "ArgumentError", "UsageError", "RankFailed")
        assert message in each.message
    assert "OwnStep" in message or not (project / "run").exists()  # that is found at the first update


def other_config():
    return trained(config_of(seed=ranks().rank + int(os.environ["RANK"])), "run")


@pytest.mark.campaign  # tests/loop/ranks/test_hangs.py
def test_a_rank_that_hangs_is_an_error_of_those_that_wait(project, monkeypatch):
    config = config_of(main_loop__rank_timeout=5.0)
    config["hooks"].append("parts.Hangs")

    def run():
        found = ranks().rank or int(os.environ["RANK"])
        training = create_training(config, output_dir=project / "run")
        try:
            train(training)
        except RankFailed as error:
            return found, str(error), error.is_cause
        finally:
            (project / "woken").touch()

    first, second = results_of(2, run)
    assert first[0] == 0
    assert first[1].startswith("another rank does not answer: it hangs, or does something that takes long")
    assert first[2]
    assert second[1:] == ("another rank has ended", False)
    assert (project / "run" / "train.log").read_text().count("rank 0 of 2 has waited for the others for 1 seconds") == 1
    assert "has waited" not in (project / "run" / "train-1.log").read_text()


def test_ranks_with_different_code_are_an_error(project):
    def run():
        if os.environ["RANK"] == "1":
            os.chdir("other")
            sys.path.remove(str(project))
        return trained({**config_of(), "code_directory": "."}, project / "run")

    (project / "other").mkdir()
    (project / "other" / "parts.py").write_text(PARTS + "# changed\n")
    first, second = results_of(2, run)
    assert (second.kind, second.message) == (
        "UsageError",
        "this rank has other code than rank 0: module parts (rank 0 -> this rank); start all ranks with the same files "
        "and versions",
    )
    assert first.kind == "RankFailed"
    assert not (project / "run").exists()


def evaluated(directory, file):
    made = predict(directory, "valid", file, variables=["row", "logits"])
    return evaluate(directory, "valid"), made.rows, made.columns


@pytest.mark.parametrize("size", thinned([2, 3], [2]))
def test_an_evaluation_and_predictions_of_several_ranks_are_those_of_one(project, size):
    trained(config_of(main_loop__rank_timeout=20.0), project / "run")
    expected = evaluated(project / "run", project / "one.csv")
    assert expected[1:] == (11, ("position", "row", "logits.0", "logits.1"))
    files = [project / f"{rank}-of-{size}.csv" for rank in range(size)]
    found = in_ranks(size, lambda: evaluated(project / "run", files[ranks().rank]))
    assert found == [found[0]] * size
    assert dict(flat(found[0][0])) == pytest.approx(dict(flat(expected[0])), abs=1e-9)
    assert found[0][1:] == expected[1:]
    one, several = (path.read_text().splitlines() for path in (project / "one.csv", files[0]))
    assert several[0] == one[0]
    numbers = [np.loadtxt(rows[1:], delimiter=",") for rows in (one, several)]
    np.testing.assert_allclose(*numbers, rtol=0, atol=1e-9)
    assert not any(each.exists() for each in files[1:])
    assert len(list((project / "run" / "eval").iterdir())) == 2


@pytest.mark.campaign
def test_a_stream_that_an_evaluation_on_several_ranks_does_not_find_is_an_error_of_rank_0(project):
    trained(config_of(), project / "run")
    first, second = results_of(2, evaluate, project / "run", "test")
    assert "has no method 'test_stream'" in first.message
    assert second.kind == "RankFailed"
    assert not any((project / "run" / "eval").iterdir())


def test_ranks_with_different_configs_are_an_error(project):
    first, second = results_of(2, other_config)
    assert (second.kind, second.message) == (
        "UsageError",
        "rank 0 has another config (seed); start all ranks with the same one",
    )
    assert first.kind == "RankFailed"
    assert not (project / "run").exists()


@pytest.mark.campaign
def test_batch_norm_never_gets_one_row_and_its_buffers_are_those_of_rank_0_after_an_epoch(project):
    config = config_of(model__module={"class": "parts.normed"}, dataset__batch_size=34)  # and a batch of 3 rows

    def run():
        training = create_training(config, output_dir=project / "run")
        train(training)
        return {name: value.tolist() for name, value in training.model.module.named_buffers()}

    first, second = in_ranks(2, run)
    assert first == second
    warning = (
        "1 (BatchNorm) normalises the rows of each rank by themselves, and fails where a rank has a single row; "
        "with `model.sync_batch_norm: true`"
    )
    assert warning in (project / "run" / "train.log").read_text()


@pytest.mark.campaign
def test_an_evaluation_on_ranks_does_not_warn_of_batch_norm_whose_statistics_it_only_reads(project, caplog):
    config = config_of(model__module={"class": "parts.normed"}, main_loop={"extra_streams": ["valid"]})
    trained(config, project / "run")
    caplog.set_level("WARNING", "emrun")

    def messages():
        evaluate(project / "run", "valid")
        return caplog.messages

    assert not any("BatchNorm" in each for found in in_ranks(2, messages) for each in found)
