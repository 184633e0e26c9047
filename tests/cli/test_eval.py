"""`emrun eval` as an installed command in a process of its own."""

import json
import shutil
import signal

import pytest
from click.testing import CliRunner
from projects import LINEAR, linear_on_majority, linear_with
from ruamel.yaml import YAML
from training.tiny import CONFIG, metrics, trained

from emrun.base.errors import StorageError
from emrun.cli import emrun as commands

INTERRUPT = """
import os
from emrun import AbstractHook


class Interrupt(AbstractHook):
    def after_batch(self):
        if self.main_loop.evaluating:
            os.kill(os.getpid(), 15)
"""


def test_an_evaluation_prints_a_table_of_each_stream_and_what_the_training_wrote(emrun_here, tmp_path):
    config = {
        "seed": 1,
        "dataset": {"class": "Majority", "n": 50},
        "model": {
            "module": {"class": "torch.nn.Linear", "in_features": 11, "out_features": 2},
            "inputs": ["x"],
            "outputs": ["logits"],
            "loss": {"class": "torch.nn.MSELoss", "inputs": ["logits", "logits"]},
            "metrics": {"size": {"import": "torch.norm", "inputs": ["logits"]}},
            "optimizer": {"class": "SGD", "lr": 0.1},
        },
        "main_loop": {"extra_streams": ["valid"], "on_unused_sources": "ignore", "report": False},
        "hooks": [{"ComputeStats": {"variables": ["size"]}}, {"StopAfter": {"epochs": 1}}],
    }
    (tmp_path / "config.json.yaml").write_text(json.dumps(config))  # JSON is YAML
    assert emrun_here("train", "-q", "config.json.yaml", "--output-dir", "run").returncode == 0
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    done = emrun_here("eval", "-q", "run", "valid", "train")
    assert done.returncode == 0
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0] == ["stream", "variable", "value"]
    assert rows[2] == ["valid", "size", f"{last['streams']['valid']['size']['mean']:.6g}"]
    assert [row[0] for row in rows[2:]] == ["valid", "train"]
    assert sorted(path.name for path in (tmp_path / "run" / "eval").iterdir()) == ["train-1", "valid-1"]
    done = emrun_here("eval", "-q", "run", "valid", "--json")
    assert json.loads(done.stdout) == {
        "status": "finished",
        "exit_status": 0,
        "streams": {"valid": last["streams"]["valid"]},
    }
    done = emrun_here("eval", "-q", "run", "valid", "hooks.LogVariables.variables=[sise]")
    assert (done.returncode, done.stdout) == (2, "")
    assert "hooks[2].LogVariables: LogVariables monitors sise, but no hook writes 'sise'; did you mean 'size'?" in (
        done.stderr
    )


def test_a_training_evaluates_its_best_checkpoint_at_the_end_into_json_and_page_and_part_of_a_config_is_laid_over_it(
    emrun_here, tmp_path
):
    config = linear_with(["ComputeStats", "SaveBest", {"StopAfter": {"epochs": 2}}])
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    done = emrun_here("train", "-q", "c.yaml", "--output-dir", "run", "--then-eval", "test")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the dataset has no stream 'test' (it has train, valid" in done.stderr.replace("\n", " ")
    assert not (tmp_path / "run").exists()
    done = emrun_here(
        "train", "-q", "c.yaml", "--output-dir", "run", "--then-eval", "valid", "--then-eval", "train", "--json"
    )
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert found["evaluated"] == {"valid": {"loss": {"mean": 0.0}}, "train": {"loss": {"mean": 0.0}}}
    assert sorted(path.name for path in (tmp_path / "run" / "eval").iterdir()) == ["train-1", "valid-1"]
    (tmp_path / "over.yaml").write_text("hooks: {LogVariables: {variables: [loss]}}\ndataset: {n: 30}\n")
    assert emrun_here("eval", "-q", "run", "valid", "-c", "over.yaml").returncode == 0
    written = YAML().load(tmp_path / "run" / "eval" / "valid-2" / "config.yaml")
    assert (written["dataset"]["n"], written["hooks"][-1]) == (30, {"LogVariables": {"variables": ["loss"]}})
    for command in (
        ("eval", "run", "vaild"),
        ("predict", "run", "vaild", "-o", "a.csv"),
        ("export", "run", "vaild", "--to", "onnx"),
    ):
        done = emrun_here(*command)
        assert (done.returncode, "importing" in done.stderr) == (2, False)
        assert "the dataset has no stream 'vaild'; did you mean 'valid'?" in done.stderr


def test_an_evaluation_at_the_end_that_fails_leaves_the_finished_run_and_the_same_command_evaluates_again(
    emrun_here, tmp_path
):
    config = linear_with(["ComputeStats", {"StopAfter": {"epochs": 1}}])  # no SaveBest: `latest` is evaluated
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    words = ("train", "-q", "c.yaml", "--then-eval", "valid", "--json", "--output-dir")
    failed = emrun_here(*words, "bad", "eval.valid.dataset.n=-1")
    assert failed.returncode == 2
    told = json.loads(failed.stdout)
    assert (told["epochs"], told["directory"], told["problems"][0]["key"]) == (1, str(tmp_path / "bad"), "dataset.n")
    assert "the run has finished; evaluate it with: emrun eval bad valid\n" in failed.stderr
    assert emrun_here("eval", "-q", "bad", "valid", "~eval").returncode == 0
    expected = {"valid": {"loss": {"mean": 0.0}}}
    for _ in range(2):  # the second time, the run has finished
        done = emrun_here(*words, "run", "--auto-resume")
        assert (done.returncode, json.loads(done.stdout)["evaluated"]) == (0, expected)


DATASET = """\
dataset: &data
  class: Majority
  n: &n 50
"""
REST = """\
main_loop: {on_unused_sources: ignore, buffer: *n, report: false}
hooks:
  - StopAfter: {epochs: 1}
eval:
  valid:
    dataset:
      <<: *data
"""
COPIES = DATASET + LINEAR + REST


@pytest.mark.campaign
def test_an_override_that_an_anchor_keeps_from_a_copy_is_warned_of_once(emrun_here, tmp_path):
    (tmp_path / "c.yaml").write_text(COPIES)
    train = emrun_here("train", "-q", "c.yaml", "dataset.n=60", "main_loop.buffer=0", "--output-dir", "run")
    warning = (
        "warning: dataset.n (c.yaml:3:6) is overridden, but not eval.valid.dataset.n (c.yaml:16:11), which a "
        "YAML anchor gives the same value; to change that value too, add eval.valid.dataset.n=60\n"
    )
    assert train.returncode == 0, train.stderr
    assert train.stderr.count(warning) == 1
    assert "is overridden, but not" in (tmp_path / "run" / "train.log").read_text()
    for command in ("config", "check"):
        done = emrun_here(command, "c.yaml", "dataset.n=60", "main_loop.buffer=0")
        assert done.stderr.count("dataset.n (c.yaml:3:6) is overridden") == 1
        assert warning in done.stderr
    assert "is overridden" not in emrun_here("config", "c.yaml", "dataset.n=60", "~eval", "~main_loop").stderr
    evaluated = emrun_here("eval", "-q", "run", "valid", "train", "-c", "c.yaml", "dataset.n=60")
    assert evaluated.returncode == 0, evaluated.stderr
    for place in ("c.yaml:16:11", "c.yaml:3:6"):  # of eval.valid, which is laid over the dataset, and of the dataset
        warning = f"dataset.n ({place}) is overridden, but not main_loop.buffer (c.yaml:10:48), which"
        assert evaluated.stderr.count(warning) == 1
    assert evaluated.stderr.count("is overridden") == 2
    assert emrun_here("eval", "-q", "run", "valid", "eval.valid.dataset.n=70").returncode == 0
    config = YAML().load(tmp_path / "run" / "eval" / "valid-2" / "config.yaml")
    assert (config["dataset"]["n"], config["eval"]["valid"]["dataset"]["n"]) == (70, 70)
    for command in (("eval", "-q", "run", "valid"), ("predict", "-q", "run", "valid", "-o", "p.csv")):
        other = emrun_here(*command, "eval.train.dataset.n=70")
        assert other.returncode == 2
        assert "eval.train.dataset.n=70 has no effect: the stream train is not evaluated, only valid" in other.stderr


def test_a_resume_warns_of_it_too(emrun_here, tmp_path):
    (tmp_path / "c.yaml").write_text(COPIES)
    assert emrun_here("train", "-q", "c.yaml", "--output-dir", "run").returncode == 0
    done = emrun_here("resume", "-q", "run", "main_loop.buffer=0", "hooks.StopAfter.epochs=2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("main_loop.buffer (") == 1


VARS = """\
vars: {size: 50, bias: true, buffer: 0, left: 1}
dataset: {class: Majority, n: "${vars.size}"}
model:
  module: {class: torch.nn.Linear, in_features: 11, out_features: 1, bias: "${vars.bias}"}
  inputs: [x]
  outputs: [logit]
  loss: {class: torch.nn.MSELoss, inputs: [logit, logit]}
  optimizer: {class: SGD, lr: 0.1}
main_loop: {on_unused_sources: ignore, buffer: "${vars.buffer}", report: false}
hooks:
  - StopAfter: {epochs: 1}
"""


def test_free_values_are_read_by_interpolations_and_nothing_else(emrun_here, tmp_path):
    (tmp_path / "c.yaml").write_text(VARS)
    origins = emrun_here("config", "c.yaml", "--origins", "vars.size=20").stdout.splitlines()
    assert origins[0].split() == ["vars.size", "20", "override", "'vars.size=20'"]
    assert origins[1].split() == ["vars.bias", "True", "c.yaml:1:24"]
    assert emrun_here("check", "c.yaml").stderr == "warning: ${vars.left} is never used (c.yaml:1:41)\n"
    typo = emrun_here("train", "-q", "c.yaml", "vars.sise=20")
    assert (typo.returncode, typo.stderr) == (
        2,
        "override 'vars.sise=20': vars: ${vars.sise} is never used; did you mean 'size'?\n",
    )
    assert emrun_here("train", "-q", "c.yaml", "vars.size=20", "--output-dir", "run").returncode == 0
    done = emrun_here("resume", "run", "vars.buffer=2", "hooks.StopAfter.epochs=2")
    assert done.returncode == 0, done.stderr
    assert "changed: vars.buffer: 0 -> 2, hooks.StopAfter.epochs: 1 -> 2" in done.stderr


def test_a_signal_ends_an_evaluation_and_the_process_by_it(emrun, emrun_here, tmp_path):
    (tmp_path / "my_hooks.py").write_text(INTERRUPT)
    config = linear_on_majority(
        main_loop={"on_unused_sources": "ignore", "on_interrupt": "epoch", "preempt_exit_code": 75, "report": False},
        hooks=["my_hooks.Interrupt", {"StopAfter": {"epochs": 1}}],
    )
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    assert emrun_here("train", "-q", "config.yaml", "--output-dir", "run").returncode == 0
    done = emrun("eval", "-q", "run", "train")
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")
    assert done.stderr == "interrupted by SIGTERM; the evaluation is not complete\n"


def test_an_evaluation_names_its_checkpoint_and_where_its_results_are(emrun_here, tmp_path):
    best = {"SaveBest": {"stream": "train", "condition": "max"}}
    config = linear_on_majority(
        main_loop={"on_unused_sources": "ignore", "report": False},
        hooks=[{"ComputeStats": {"variables": ["loss"]}}, best, {"StopAfter": {"epochs": 2}}],
    )
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    assert emrun_here("train", "-q", "config.yaml", "--output-dir", "run").returncode == 0
    manifests = {
        name: json.loads((tmp_path / "run" / "checkpoints" / name / "manifest.json").read_text())
        for name in ("best", "latest")
    }
    for number, (options, name) in enumerate([((), "best"), (("--checkpoint", "latest/"), "latest")], 1):
        done = emrun_here("eval", "run", "valid", *options)
        directory = (tmp_path / "run" / "checkpoints" / name).resolve().name
        epoch, iteration = manifests[name]["epoch"], manifests[name]["iteration"]
        assert done.stderr.splitlines()[0] == (
            f"checkpoint {name} ({directory}): {epoch} epochs, {iteration} iterations done; "
            f"results in run/eval/valid-{number}"
        )
        trace = YAML(typ="safe").load(tmp_path / "run" / "eval" / f"valid-{number}" / "trace.yaml")
        expected = {"name": name, "directory": directory, "epoch": epoch, "iteration": iteration}
        assert trace["checkpoint"] == expected
    assert manifests["best"]["iteration"] == 0 < manifests["latest"]["iteration"]


@pytest.fixture(scope="module")
def every_epoch(tmp_path_factory):
    """A run with the average of its weights, of which each epoch and the best are kept."""
    averages = {"AverageWeights": {"decay": 0.5}}
    hooks = ["ComputeStats", {"SaveBest": {"variable": "loss", "condition": "max"}}, {"SaveEvery": {"n_epochs": 1}}]
    hooks = [*hooks, averages, {"StopAfter": {"epochs": 2}}]
    return trained(tmp_path_factory.mktemp("kept"), config={**CONFIG, "hooks": hooks})


def evaluated(*arguments):
    done = CliRunner().invoke(commands, ["eval", "-q", *map(str, arguments)], standalone_mode=False)
    return done, [line.split() for line in done.stdout.splitlines()]


def test_all_checkpoints_are_evaluated_as_the_training_did_and_the_best_is_marked(every_epoch):
    run = every_epoch.output_dir
    losses = [line["streams"]["valid"]["loss"]["mean"] for line in metrics(every_epoch)]
    done, rows = evaluated(run, "valid", "train", "--all-checkpoints")
    assert done.return_value == 0, done.exception
    assert rows[0][:3] == ["checkpoint", "on", "valid"]
    assert [float(row[-1]) for row in rows[2:5]] == [float(f"{loss:.6g}") for loss in losses]
    assert losses[1] == max(losses)
    labels = [["epoch-0"], ["best", "epoch-1", "*"], ["epoch-2", "latest"]]
    assert [row[1:-2] for row in rows[2:5]] == labels
    assert "* highest valid/loss\n" in done.stdout
    assert "checkpoint on train" in done.stdout
    assert sorted(path.name for path in (run / "eval").glob("valid-*")) == [f"valid-{n}" for n in (1, 2, 3)]
    traces = [YAML(typ="safe").load(run / "eval" / f"valid-{n}" / "trace.yaml") for n in (1, 2, 3)]
    assert [trace["checkpoint"]["epoch"] for trace in traces] == [0, 1, 2]


def test_all_checkpoints_as_json_with_overrides_count_as_looks_at_a_stream_that_is_not_trained_with(
    tmp_path, monkeypatch
):
    run = trained(tmp_path, "~main_loop", "~hooks.SaveBest", "hooks.ComputeStats.variables=[loss]").output_dir
    monkeypatch.chdir(tmp_path)
    done, _ = evaluated(run, "valid", "--all-checkpoints", "--json", "dataset.n=60")
    found = json.loads(done.stdout)
    (only,) = found["checkpoints"]
    assert (only["names"], only["epoch"]) == (["latest"], 2)
    assert list(only["streams"]) == ["valid"]
    assert found["best"] == {"valid": only["directory"]}
    done, _ = evaluated(run, "valid", "--all-checkpoints", "hooks=[]")
    assert "none is the best: there is no valid/loss; the run was evaluated on valid 2 times" in done.stdout
    done, _ = evaluated(run, "valid", "--all-checkpoints", "--checkpoint", "latest")
    assert "--all-checkpoints evaluates each checkpoint; leave out --checkpoint" in str(done.exception)


def test_a_damaged_checkpoint_is_named_and_the_others_are_evaluated(every_epoch, tmp_path):
    without = shutil.ignore_patterns("eval")
    run = shutil.copytree(every_epoch.output_dir, tmp_path / "run", symlinks=True, ignore=without)
    (run / "checkpoints" / "epoch-0" / "model.safetensors").write_bytes(b"")
    done, rows = evaluated(run, "valid", "--all-checkpoints")
    assert rows[2][1:] == ["epoch-0", "damaged"]
    assert [row[1] for row in rows[3:5]] == ["best", "epoch-2"]
    assert done.return_value == StorageError.exit_status
    assert len(list((run / "eval").iterdir())) == 2
