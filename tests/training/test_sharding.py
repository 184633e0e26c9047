"""A run whose weights are sharded over ranks is the run of one process, with the checkpoints of one process."""

import json
import os
import shutil
import signal

import pytest
import torch
from in_ranks import in_ranks, results_of

from emrun import AbstractHook, create_training, read_steps, resume_training
from emrun.config.config import read_config
from emrun.diagnosis.tryout import try_out
from emrun.ranks.group import join, ranks
from emrun.ranks.pieces import piece
from emrun.runs.comparison import compare
from emrun.runs.finding import find_run
from emrun.storage.checkpoints import shards
from emrun.storage.checkpoints.manifest import Contents, verify
from emrun.storage.checkpoints.saved_weights import read_saved
from emrun.training.create import train
from emrun.training.evaluate import evaluate
from emrun.training.predict import predict

PARTS = '''
import numpy as np
import torch


class Data:
    """37 examples in batches of 5, of which a rank without rows has none: the last batch of an epoch has two."""

    def __init__(self):
        self.x = np.random.default_rng(0).normal(size=(37, 5))

    def batch(self, rows):
        return {"x": self.x[rows], "y": (self.x[rows].sum(axis=1) > 0).astype(np.int64)}

    def train_stream(self, ctx):
        for rows in ctx.batches(37, 5, shuffle=True):
            yield self.batch(rows)

    def valid_stream(self, ctx):
        for rows in ctx.batches(11, 5):
            yield self.batch(rows)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(7, 3)
        self.outer = torch.nn.Linear(3, 7)

    def forward(self, x):
        return x + self.outer(self.inner(x).tanh())


class Net(torch.nn.Module):
    """Has weights of 7, 3 and 2 rows: some ranks of three have more rows than others, and one has none of the head."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(5, 7)
        self.blocks = torch.nn.Sequential(Block(), Block())
        self.head = torch.nn.Linear(7, 2)
        self.double()

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)))
'''


def config_of(*hooks, updates=8, **model):
    return {
        "seed": 3,
        "dataset": {"class": "parts.Data"},
        "model": {
            "module": {"class": "parts.Net"},
            "inputs": ["x"],
            "outputs": ["logits"],
            "loss": {"class": "torch.nn.CrossEntropyLoss", "inputs": ["logits", "y"], "reduction": "none"},
            "optimizer": {"class": "AdamW", "lr": 0.01},
            "strategy": {"shard": r"^blocks\.\d+$"},
            **model,
        },
        "main_loop": {"extra_streams": ["valid"], "report": False, "skip_zeroth_epoch": True},
        "hooks": ["ComputeStats", *hooks, {"StopAfter": {"updates": updates}}],
    }


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def size(tensor):
    return piece(tensor).numel() * tensor.element_size()


class Rows(AbstractHook):
    """Notes what this rank has of the weights, and the bytes it needs, and ends the run after some batches."""

    every_rank = True
    reads = ()

    def __init__(self, at=None):
        super().__init__()
        self.at, self.held = at, {}
        self.bytes = {"weights": 0, "gradients": 0, "optimizer": 0}

    def after_batch(self):
        model = self.main_loop.model
        self.held = {n: piece(each).numel() for n, each in model.module.named_parameters()}
        if self.main_loop.iterations_done == 4:
            weights, states = list(model.module.parameters()), model.optimizer.state.values()
            self.bytes["weights"] = sum(map(size, weights))
            self.bytes["gradients"] = sum(size(each.grad) for each in weights if each.grad is not None)
            self.bytes["optimizer"] = sum(size(each) for state in states for each in state.values())
        if self.main_loop.iterations_done == self.at and ranks().is_first:
            os.kill(os.getpid(), signal.SIGINT)


def trained(config, directory, hook=None, resumes=False, changes=()):
    """Train on this rank; return how many values it has of each weight, and the status."""
    training = resume_training(directory, changes) if resumes else create_training(config, output_dir=directory)
    if ranks().several:
        training.main_loop.change_hooks([hook or (hook := Rows()), *training.hooks])
    outcome = train(training)
    return (hook and (hook.held, hook.bytes)), outcome.status


def weights_in(directory):
    return {name: shards.whole_of(each) for name, each in read_saved(directory / "checkpoints/latest").tensors.items()}


def result_of(directory):
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = read_steps(directory)
    values = {name: steps[name].tolist() for name in steps if name.startswith(("loss", "gradient_norm", "weight"))}
    return [line["streams"] for line in lines], values, weights_in(directory)


def flat(tree, path=""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{path}{name}/")
        else:
            yield f"{path}{name}", value


def assert_close(one, other, within=1e-9):
    for line, other_line in zip(one[0], other[0], strict=True):
        assert dict(flat(other_line)) == pytest.approx(dict(flat(line)), abs=within)
    assert one[1].keys() == other[1].keys()
    for name, values in one[1].items():
        assert other[1][name] == pytest.approx(values, abs=within, nan_ok=True)
    torch.testing.assert_close(other[2], one[2], rtol=0, atol=within)


def with_everything(updates):
    hooks = [{"SkipSpike": {"factor": 1.05, "window": 2}}, {"ClipGradients": {"norm": 0.5}}]
    hooks += [{"AverageWeights": {"decay": 0.9}}, {"LogNorms": {"every": "4 updates"}}]
    hooks += [{"StopOnNaN": {"after_batch": True}}, {"Freeze": {"match": "embed", "until": "3 updates"}}]
    return config_of(*hooks, updates=updates, accumulate=2, recompute="blocks")


@pytest.mark.campaign
@pytest.mark.parametrize(("updates", "sizes"), [(6, (3,)), (100, (2, 3))], ids=["few", "hundred"])
def test_updates_with_everything_are_those_of_one_process(project, updates, sizes):
    config = with_everything(updates)
    trained(config, project / "one")
    expected = result_of(project / "one")
    assert len(expected[1]["loss"]) >= updates
    assert sum(line["train"].get("skipped_updates", 0) for line in expected[0] if "train" in line) >= 1
    for size in sizes:
        found = in_ranks(size, trained, config, project / f"run{size}")
        assert_close(expected, result_of(project / f"run{size}"))
        rows = [held["embed.weight"] // 5 for (held, _), _ in found]
        assert rows == {2: [4, 3], 3: [3, 3, 1]}[size]
        assert [held["head.bias"] for (held, _), _ in found] == {2: [1, 1], 3: [1, 1, 0]}[size]


class RunsModel(AbstractHook):
    """Runs the model, on rank 0 only."""

    reads = ()

    def after_epoch(self, epoch_id):
        self.main_loop.model.module(torch.zeros(2, 5, dtype=torch.float64))


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.campaign), 2])
def test_a_hook_of_rank_0_that_runs_the_model_is_found_before_the_training_by_its_name(project, ranks):
    config = read_config(config_of(f"{__name__}.RunsModel"))
    if ranks == 1:
        try_out(config)
        return
    with pytest.raises(RuntimeError, match="a hook of rank 0 runs the model, whose weights are sharded") as found:
        try_out(config, ranks)
    assert any("hook RunsModel" in each for each in found.value.__notes__)


def evaluated(directory):
    """Return the evaluation of a run, and the number of its predictions, which this rank helps to make."""
    made = predict(directory, "valid", f"{directory}-{join().size}.csv", variables=["logits"])
    return evaluate(directory, "valid"), made.rows


def trained_and_evaluated(config, directory, hook):
    """Train, then evaluate on the same ranks, which costs less than new ones."""
    return *trained(config, directory, hook), evaluated(directory)


def test_a_run_with_everything_that_is_interrupted_is_that_of_one_process_and_evaluated_on_ranks(project):
    config = init_from_file(with_everything(updates=4), project)
    config["model"]["optimizer"] |= {"foreach": True}  # torch plans each operation once for all weights
    trained(config, project / "one")
    expected = result_of(project / "one")
    assert sum(line["train"].get("skipped_updates", 0) for line in expected[0] if "train" in line) >= 1
    found = in_ranks(2, trained_and_evaluated, config, project / "run", Rows(at=5))
    assert [status for _, status, _ in found] == ["interrupted"] * 2
    rows = [held["embed.weight"] // 5 for (held, _), *_ in found]
    assert rows == [4, 3]
    shutil.copytree(project / "run", project / "on-one", symlinks=True)
    trained(None, project / "on-one", resumes=True)
    assert_close(expected, result_of(project / "on-one"))
    of_one, rows = evaluated(project / "run")
    for _, _, (metrics, count) in found:
        assert dict(flat(metrics)) == pytest.approx(dict(flat(of_one)), abs=1e-9)
        assert count == rows == 11


@pytest.mark.campaign
@pytest.mark.parametrize("size", [2, 3])
def test_a_run_is_resumed_exactly_and_on_any_number_of_ranks_with_any_shards(project, size):
    config = config_of({"AverageWeights": {"decay": 0.9}})
    [((_, needed), status), _] = in_ranks(2, trained, config, project / "whole")
    assert status == "finished"
    forecast = try_out(read_config(config), 2)["forecast"]
    assert needed == {what: forecast[f"rank: {what}"]["bytes"] for what in needed}
    whole = 8 * (7 * 5 + 7 + 2 * 7 + 2) + 8 * (7 * 3 + 3 + 3 * 7 + 7)  # the first, the head and a block, in float64
    assert forecast["rank: weights of a part and of the rest, whole"] == {"bytes": whole, "how": "exact"}
    of_rows = forecast["rank: forward pass"]
    assert of_rows["how"] == "measured, for its share of the rows"
    assert 0 < of_rows["bytes"] < forecast["tensors of a step"]["bytes"]
    expected = result_of(project / "whole")
    [(_, status), _] = in_ranks(2, trained, config, project / "run", Rows(at=3))
    assert status == "interrupted"
    names = ("one", "three") if size == 3 else ("one",)
    copies = {name: shutil.copytree(project / "run", project / name, symlinks=True) for name in names}
    in_ranks(2, trained, None, project / "run", None, True)
    found = result_of(project / "run")
    assert found[:2] == expected[:2]
    assert all(torch.equal(value, found[2][name]) for name, value in expected[2].items())
    differences = compare(*(find_run(project / each) for each in ("run", "whole")))
    assert not any(differences[part] for part in ("config", "modules", "data", "epochs"))
    assert differences["steps"]["equal"]
    assert differences["steps"]["compared"] == 8
    trained(None, copies["one"], resumes=True)
    if size == 3:
        in_ranks(3, trained, None, copies["three"], None, True, ["model.strategy.shard=inner"])
    for each in copies.values():
        assert_close(expected, result_of(each))
    of_one, rows = evaluated(project / "run")
    for metrics, count in in_ranks(size, evaluated, project / "run"):
        assert dict(flat(metrics)) == pytest.approx(dict(flat(of_one)), abs=1e-9)
        assert count == rows == 11


class Fails(AbstractHook):
    """Fails on rank 0: in an evaluation, or before an update."""

    every_rank = True
    reads = ()

    def __init__(self, event):
        super().__init__()
        self.event = event

    def fail(self, event):
        if event == self.event and self.main_loop.iterations_done == 10 and ranks().is_first:
            raise ValueError("as asked")

    def before_update(self):
        self.fail("before_update")

    def after_stream(self, stream_name):
        if stream_name == "valid":
            self.fail("after_stream")

    def before_epoch(self, epoch_id):
        if epoch_id == 2:
            self.main_loop.request_checkpoint("kept")


class DiesInCommit(AbstractHook):
    """Saves when an epoch begins, and kills rank 1 while it writes its part of the third checkpoint."""

    every_rank = True
    reads = ()

    def before_epoch(self, epoch_id):
        if epoch_id == 3 and not ranks().is_first:
            shards.describe = lambda *path, **how: os.kill(os.getpid(), signal.SIGKILL)
        self.main_loop.request_checkpoint("latest")


@pytest.mark.campaign
def test_a_rank_that_dies_while_it_writes_costs_that_checkpoint_only(project):
    failed, status = results_of(2, trained, config_of(updates=40), project / "run", DiesInCommit())
    assert (failed.kind, status) == ("RankFailed", -signal.SIGKILL)
    contents = Contents.of(project / "run/checkpoints")
    assert (contents.checkpoints, contents.asides) == (["it-00000009"], [])
    assert verify((project / "run/checkpoints/latest").resolve()).epoch == 1
    log = (project / "run/train.log").read_text()
    assert "checkpoint of shards: rank 0 wrote " in log
    assert log.count("the last checkpoint was not saved: another rank has ended") == 1
    trained(None, project / "run", resumes=True, changes=["hooks.StopAfter.updates=17"])
    assert verify((project / "run/checkpoints/latest").resolve()).iteration == 17


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("event", "size"), [("after_stream", 10), ("before_update", None)], ids=["an evaluation", "a step"]
)
def test_what_one_rank_cannot_save_alone_is_not_waited_for(project, event, size):
    config = config_of("SaveLatest", updates=20)
    config["main_loop"]["fixed_epoch_size"] = size or 8
    failed, other = results_of(2, trained, config, project / "run", Fails(event))
    assert (failed.kind, failed.message) == ("ValueError", "as asked")
    assert other.kind == "RankFailed"
    log = (project / "run/train.log").read_text()
    if event == "after_stream":
        assert "the epoch is not saved before its evaluation: the weights lie on several ranks" in log
    else:
        assert "cannot save the weights: the weights lie on several ranks (model.strategy)" in log
        [capsule] = (project / "run/failures").iterdir()
        assert json.loads((capsule / "failure.json").read_text())["weights"] == "lost"
    trained(None, project / "run", resumes=True)
    trained(config, project / "one")
    assert_close(result_of(project / "one"), result_of(project / "run"))


def init_from_file(config, project):
    """Return the config of a run that begins with the weights of another one, from a file with other names."""
    trained(config_of(updates=1), project / "first")
    weights = weights_in(project / "first")
    torch.save({name.replace("blocks", "parts"): each.float() for name, each in weights.items()}, "weights.pt")
    config["model"]["init_from"] = {"path": "weights.pt", "rename": {"parts": "blocks"}}
    return config


@pytest.mark.campaign
@pytest.mark.parametrize("size", [2, 3])
def test_weights_to_begin_with_are_those_of_one_process(project, size):
    config = init_from_file(config_of(updates=1), project)
    config["main_loop"]["skip_zeroth_epoch"] = False
    trained(config, project / "one")
    in_ranks(size, trained, config, project / "ranks")
    assert_close(result_of(project / "one"), result_of(project / "ranks"))
