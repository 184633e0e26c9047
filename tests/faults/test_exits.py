"""`sys.exit` in the code of a user is a failure of that code: status 1, a traceback, a trace that says so.

Taken out once by hand, each made this fail: the group of commands that catches what is no `Exception` (what is built,
`eval`, `dataset`), the same in `train` and in `check`, the capsule of a step that ends this way, its replay, and the
commands' EOFError, which click takes for Ctrl-C, and the exceptions of click itself.
"""

import json

import pytest
from ruamel.yaml import YAML

MODULE = """
import asyncio, sys

import click
import torch
from emrun import AbstractHook
from emrun.datasets.majority import Majority

WHERE, HOW = "no", "0"


class Stop(BaseException):
    pass


def leave(place):
    if place != WHERE:
        return
    match HOW:
        case "0": sys.exit(0)
        case "3": sys.exit(3)
        case "none": raise SystemExit
        case "text": sys.exit("enough")
        case "generator": raise GeneratorExit
        case "cancelled": raise asyncio.CancelledError
        case "own": raise Stop("enough")
        case "eof": raise EOFError("enough")
        case "click": raise click.exceptions.Exit(0)
        case "abort": raise click.Abort
        case "usage": raise click.UsageError("enough")
        case "pipe": raise BrokenPipeError("enough")


leave("import")


class Data(Majority):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        leave("dataset")

    def train_stream(self, ctx):
        leave("stream function")
        return self.batches(ctx)

    def batches(self, ctx):
        for index, batch in enumerate(super().train_stream(ctx)):
            if index == 2:
                leave("stream")
            yield batch

    def valid_stream(self, ctx):
        leave("valid")
        return super().valid_stream(ctx)

    def method(self):
        leave("method")


class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(11, 1), torch.nn.Flatten(start_dim=0))
        leave("module")

    def forward(self, x):
        if torch.is_grad_enabled():
            leave("model")
        return super().forward(x)


def loss(logit, y):
    leave("loss")
    return torch.nn.functional.binary_cross_entropy_with_logits(logit, y)


class Hook(AbstractHook):
    def __init__(self):
        super().__init__()
        leave("hook")

    def register_mainloop(self, main_loop):
        super().register_mainloop(main_loop=main_loop)
        leave("register_mainloop")

    def state_dict(self):
        if self.main_loop.iterations_done:
            leave("state_dict")
        return {}

    def load_state_dict(self, state):
        leave("load_state_dict")


def event(name):
    return lambda self: leave(name)


for name in EVENTS[1:]:
    setattr(Hook, name, event(name))


class Witness(AbstractHook):
    def __init__(self, output_dir):
        super().__init__(output_dir=output_dir)

    def on_error(self, error):
        (self.output_dir / "witness").write_text(type(error).__name__)

    def after_training(self, success):
        with (self.output_dir / "witness").open("a") as file:
            file.write(f" {success}")
"""
EVENTS = (
    "register_mainloop", "before_training", "before_epoch", "before_batch", "after_batch",
    "after_stream", "after_epoch", "after_epoch_profile", "after_training",
)  # fmt: skip
BEFORE = ("import", "dataset", "module", "hook", "register_mainloop")  # the training
KINDS = {
    "0": "SystemExit: 0",
    "3": "SystemExit: 3",
    "none": "SystemExit: ",
    "text": "SystemExit: enough",
    "generator": "GeneratorExit: ",
    "cancelled": "CancelledError: ",
    "own": "Stop: enough",
    "eof": "EOFError: enough",
}
CLICK = {
    "click": "Exit: 0", "abort": "Abort: ", "usage": "UsageError: enough", "pipe": "BrokenPipeError: enough",
}  # fmt: skip
PLACES = (*BEFORE, *EVENTS[1:], "stream function", "stream", "valid", "model", "loss", "state_dict")
CASES = [
    *((place, how, "train", {}) for place in PLACES for how in ("0", "3")),
    *((place, how, "train", {}) for place, how in zip(PLACES, [*KINDS][2:] * 4, strict=False)),
    *(("stream", how, "train", {"buffer": 0}) for how in ("0", "generator")),
    *(("dataset", how, command, {}) for how in CLICK for command in ("train", "resume", "eval", "dataset method")),
    *((place, how, "train", {}) for place, how in zip(("import", "hook", "model", "stream"), CLICK, strict=True)),
    *((place, "eof", "train", {}) for place in ("import", "dataset", "hook")),
    *(("stream", how, "train", {"workers": 1, "start_method": "fork"}) for how in ("0", "text")),
    *(("stream", how, "train", {"workers": 1, "start_method": "spawn"}) for how in ("0", "text")),
    *((place, "0", "check", {}) for place in ("import", "dataset", "hook", "stream function", "valid", "model")),
    *((place, "3", "check --json", {}) for place in ("import", "dataset", "stream function", "model")),
    *((place, "0", "dataset method", {}) for place in ("import", "dataset", "method")),
    *((place, "0", "dataset stream_info", {}) for place in ("stream", "valid")),
    *((place, "0", "eval", {}) for place in ("import", "dataset", "module", "valid", "after_epoch")),
    *((place, "0", "resume", {}) for place in ("import", "dataset", "load_state_dict", "stream", "model")),
    *((place, how, "replay", {}) for place in ("model", "after_batch") for how in ("0", "own")),
]  # fmt: skip

FEW = [
    ("dataset", "click", "resume", {}), ("import", "0", "train", {}), ("module", "generator", "train", {}),
    ("after_epoch", "0", "train", {}), ("dataset", "eof", "train", {}), ("valid", "0", "dataset stream_info", {}),
]  # fmt: skip


def module(where="no", how="0"):
    text = MODULE.replace('WHERE, HOW = "no", "0"', f"WHERE, HOW = {where!r}, {how!r}")
    return text.replace("EVENTS", repr(EVENTS))


@pytest.mark.timeout(7200)
@pytest.mark.fault("sys.exit, or what is no Exception, in a dataset, a stream, a model, a hook")
def test_an_exit_in_the_code_of_a_user_is_its_failure(project, small, trials):
    config = json.loads((project / "config.yaml").read_text())
    config["dataset"]["class"] = "mine.Data"
    config["model"]["module"] = {"class": "mine.Net"}
    config["model"]["loss"] = {"import": "mine.loss", "inputs": ["logit", "y"]}
    config["hooks"] += ["mine.Hook", "mine.Witness"]
    for number, trial in enumerate(trials(CASES, small=FEW)):
        place, how, command, reading = trial.case
        said = {**KINDS, **CLICK}[how]
        run = project / f"run{number}"
        train = ("train", "-q", "config.yaml", "--output-dir", run)
        word, *rest = command.split()
        main_loop = {**config["main_loop"], **reading}
        (project / "config.yaml").write_text(json.dumps({**config, "main_loop": main_loop}))
        (project / "mine.py").write_text(module())
        with trial:
            if word in ("eval", "resume"):
                assert small.command(*train, cwd=project).returncode == 0
            (project / "mine.py").write_text(module(place, how))
            if word == "train":
                done = small.command(*train, cwd=project)
            elif word == "replay":
                assert small.command(*train, cwd=project).returncode == 1
                done = small.command("replay", run, cwd=project)
                assert "\nreproduced" in done.stdout, done
            elif word in ("eval", "resume"):
                done = small.command(word, run, "valid" if word == "eval" else "hooks.StopAfter.epochs=4", cwd=project)
            elif word == "dataset":
                done = small.command("dataset", *rest, "config.yaml", cwd=project)
            else:
                done = small.command(word, "config.yaml", *rest, cwd=project)
            assert done.returncode == (0 if word == "replay" else 1), done
            with trial.telling():
                name = said.partition(": ")[0]
                assert name in done.stderr, done.stderr
                assert rest == ["stream_info"] or "mine.py" in done.stderr, done.stderr  # the traceback
                if rest == ["--json"]:
                    assert json.loads(done.stdout)["problems"]
            if word == "train" and place != "import":
                trace = YAML(typ="safe", pure=True).load(run / "trace.yaml")
                assert (trace["status"], trace["exit_status"]) == ("failed", 1)
                if not reading.get("workers"):
                    assert trace["reason"] == said
                log = (run / "train.log").read_text()
                assert "leave(" in log
                assert name in log
                if place not in BEFORE:
                    success = place == "after_training"
                    witness = (run / "witness").read_text()
                    assert witness == (" True" if success else f"{name} False")
            if word == "train" and place in ("model", "loss", "before_batch", "after_batch"):
                assert (run / "failures" / "1" / "failure.json").exists()
                assert "emrun replay" in done.stderr
