"""What errors say to write works: the advice is taken out of the message, written, and tried."""

import inspect
import re
import shlex
import sys
import tomllib
from pathlib import Path

import click
import numpy as np
import pytest
from campaign import thinned

from emrun import create_training
from emrun.cli import emrun
from emrun.config.config import load_config
from emrun.config.names import short_names
from emrun.config.plan import Plan
from emrun.config.source_finder import Unimported
from emrun.launch.settings import Sweep
from emrun.loop.main_loop import MainLoop
from emrun.models.torch_model import TorchModel

ROOT = Path(__file__).parent.parent
SOURCES = Unimported()  # which reads the files of torch once
OTHERS = tomllib.loads((ROOT / "emrun" / "config" / "other_names.toml").read_text(encoding="utf-8"))["advice"]
HOOKS = set(short_names("hook", installed=False))
KNOWN = {
    name: set(inspect.signature(each).parameters)
    for name, each in {"model": TorchModel, "main_loop": MainLoop, "sweep": Sweep}.items()
}
NEED_MORE = {
    "ClassificationMetrics",
    "WriteMLflow",
    "WriteWandb",
    "WriteTrackio",
}  # arguments that the advice leaves open
STATS = "{ComputeStats: {variables: [loss]}}"
END = "{StopAfter: {epochs: 1}}"
NESTED = "class: SequentialLR, milestones: [1], schedulers: [{class: LinearLR}, "


class Data:
    """A dataset of two batches."""

    def __init__(self, x: str = "float32", strings: bool = False, tag: str | None = None):
        self.x, self.strings, self.tag = x, strings, tag

    def train_stream(self):
        for _ in range(2):
            more = {"s": ["a"] * 10} if self.strings else {}
            yield {"x": np.ones((10, 4), self.x), "y": (np.arange(10) % 2).astype("float32"), **more}

    valid_stream = train_stream
    num_batches = {"train": 2, "valid": 2}  # noqa: RUF012 - as a dataset may have it


BASE = {
    "seed": 1,
    "dataset": {"class": "advised.Data"},
    "model": {
        "module": {
            "class": "torch.nn.Sequential",
            "args": [
                {"class": "torch.nn.Linear", "in_features": 4, "out_features": 1},
                {"class": "torch.nn.Flatten", "start_dim": 0},
            ],
        },
        "inputs": ["x"],
        "outputs": ["z"],
        "loss": {"class": "torch.nn.MSELoss", "inputs": ["z", "y"]},
        "optimizer": {"class": "SGD", "lr": 0.1},
    },
    "main_loop": {"extra_streams": ["valid"], "skip_zeroth_epoch": True, "on_unused_sources": "error", "report": False},
    "hooks": [{"ComputeStats": {"variables": ["loss"]}}, {"StopAfter": {"epochs": 1}}],
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Train with overrides, or only build or plan what they describe."""
    (tmp_path / "advised.py").write_text(
        "import sys\nData = next(each for name, each in sys.modules.items() if name.endswith('test_advices')).Data\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "advised", raising=False)

    def run(overrides, how="trained"):
        config = load_config(BASE, overrides)
        Plan.with_evaluations(config, SOURCES)
        if how != "planned":
            training = create_training(config, tmp_path / "log")
            if how == "trained":
                assert training.main_loop.run_training().status == "finished"
            training.main_loop.run.release()

    yield run
    sys.modules.pop("advised", None)


def hooks(*entries):
    return f"hooks=[{', '.join((STATS, *entries, END))}]"


def scheduler(text):
    return f"model.scheduler={{{text}}}"


CASES = [
    # an override, what its error says to write, and how that is written: {0} is the first group of the expression
    ("epochs=3", r"use the hook (\w+): \{(\w+): \d\}", "hooks.{0}.{1}=1"),
    ("model.compile=no", r"write (\w+)", "model.compile={0}"),
    ("model.precision=half", r"or (bf16)", "model.precision={0}"),
    ('hooks.StopAfter.epochs="1"', "write the number without quotes", "hooks.StopAfter.epochs=1"),
    ('model.optimizer.lr="1e-3"', "write the number without quotes", "model.optimizer.lr=1e-3"),
    (scheduler(NESTED + "{class: StepLR, step_size: 1, step_on: update}]"), r"outermost class: .*(step_on: update)",
     "model.scheduler={{class: SequentialLR, milestones: [1], schedulers: [{{class: LinearLR}}, "
     "{{class: StepLR, step_size: 1}}], {0}}}"),
    (scheduler(NESTED + "{class: ReduceLROnPlateau, metric: valid/loss/mean}]"), r"such as (\{.*?\})",
     "model.scheduler={0}"),
    (scheduler(NESTED + "{class: ReduceLROnPlateau}]"), r"write (\{.*?\}) as the whole", "model.scheduler={0}"),
    (scheduler("class: Cosine, warmup: 5"), "such as '(5%)'", "model.scheduler={{class: Cosine, warmup: {0}}}"),
    (scheduler("class: ReduceLROnPlateau"), r"needs `(\w+)`, e\.g\. (\S+)",
     "model.scheduler={{class: ReduceLROnPlateau, {0}: {1}}}"),
    (scheduler("class: ReduceLROnPlateau, metric: valid/loss/mean, step_on: update"), "remove `(step_on): update`",
     "+~model.scheduler.{0}"),
    (scheduler("class: StepLR, step_size: 1, metric: valid/loss/mean"), r"remove `(\w+)`", "+~model.scheduler.{0}"),
    ("model.scheduler=Cosine", r"write \{class: (\w+),", "model.scheduler={{class: {0}}}"),
    ("model.class=torch.nn.Linear", r"under (model\.module): \{class: ([\w.]+)", "{0}.args.0.class={1}"),
    ("model.loss.class=MSELos", r"did you mean '(\w+)'", "model.loss.class={0}"),
    ("model.loss=torch.nn.MSELoss", r"write \{class: NAME, (\w+): \[NAME",
     "model.loss={{class: torch.nn.MSELoss, {0}: [z, y]}}"),
    ("model.optimizer=SGD", r"write \{class: (\w+), argument: value\}", "model.optimizer={{class: {0}, lr: 0.1}}"),
    ("model.optimizer.learning_rate=0.1", r"did you mean '(\w+)'", "model.optimizer.{0}=0.1"),
    ("model.device=gpu", "write auto, (cpu)", "model.device={0}"),
    ("model.metrics={a: emrun.metrics.accuracy}", r"write \{NAME: \{(import: .*?, inputs)",
     "=model.metrics={{a: {{{0}: [z, y]}}}}"),
    ("model.metrics={a: {import: emrun.metrics.accuracy}}", r"set '(\w+)'",
     "=model.metrics={{a: {{import: emrun.metrics.accuracy, {0}: [z, y]}}}}"),
    ("main_loop.extra_streams=[test]", r"it has (\w+), (\w+)", "main_loop.extra_streams=[{1}]"),
    ("main_loop.extra_streams=[{valid:5}]", r"after the colon: (.*?);", "main_loop.extra_streams=[{{{0}}}]"),
    ("main_loop.extra_streams=[{valid:5}]", r"for a text, write (.*)", "!{0}"),
    ("dataset.tag=a #b", r"for a text, write (.*)", "{0}"),
    ("dataset.tag=#tag", r"for a text, write (.*)", "{0}"),
    ("dataset.strings=true", r"set (main_loop\.\w+): (\w+)", "+{0}={1}"),
    ("dataset.x=int64", r"write \{PARAMETER: (\{.*?\})\} in (model\.inputs)", "+{1}={{input: {0}}}"),
    ("model.module.args.0.in_features=5", r"set (in_features): (\d)", "model.module.args.0.{0}={1}"),
    ("model.optimizer.lr=1.0e38", r"\((main_loop\.on_nan_loss)\)", "+{0}=warn"),
    ("name=${env:EMRUN_NOT_THERE}", r"write (\$\{.*?\})", "name={0}"),
    ("name=${x", r"write '(\$\$\{)'", "name={0}x"),
    ("name=${seeed}", r"did you mean '?(\w+)", "name=run-${{{0}}}"),
    ("code_directory=nowhere", "set (code_directory)", "{0}=."),
    ("hooks.StopAfter=3", r"(hooks\.StopAfter): .*write \{ARGUMENT: VALUE\}", "{0}={{epochs: 1}}"),
    ("hooks.9.x=1", r"write (hooks)=", "{0}=[{{StopAfter: {{epochs: 1}}}}]"),
    ("hooks=[{EarlyStopping: {patience: 1}}]", r"(ComputeStats) \((variables: \[loss\])\)",
     "hooks=[{{{0}: {{{1}}}}}, {{EarlyStopping: {{patience: 1}}}}]"),
    (hooks("SaveBest", "SaveBest"), r"give \S+ \(.*?\) another (\w+)",
     "hooks=[{{ComputeStats: {{variables: [loss]}}}}, SaveBest, {{SaveBest: {{{0}: other}}}}, "
     "{{StopAfter: {{epochs: 1}}}}]"),
    ("hooks.ComputeStats.variables=[lsos]", r"did you mean '(\w+)'", "hooks.ComputeStats.variables=[{0}]"),
    (hooks("{StopAfter: {}}"), r"at least one of (\w+)", "hooks=[{{StopAfter: {{{0}: 1}}}}]"),
    (hooks("{ClipGradients: {}}"), r"e\.g\. (norm: [\d.]+)", "+hooks.ClipGradients={{{0}}}"),
    (hooks("{AverageWeights: {}}"), r"e\.g\. (half_life: .*?):", "+hooks.AverageWeights={{{0}}}"),
    (hooks("{StopOnNaN: {after_batch: false, after_epoch: false}}"), r"set one to (\w+)",
     "+hooks.StopOnNaN.after_epoch={0}"),
    (hooks("{StopOnNaN: {variables: [valid/loss]}}"), r"name variables only, (\[\w+\])",
     "+hooks.StopOnNaN.variables={0}"),
    (hooks("{SaveEvery: {n_epochs: 1, every: 1 epochs}}"), r"(n_epochs) and every are both given",
     "+~hooks.SaveEvery.{0}"),
    (hooks("{EarlyStopping: {patience: null}}"), r"give (\w+), or", "+hooks.EarlyStopping.{0}=1"),
    (hooks("{EarlyStopping: {patience: null, threshold: 0.1}}"), r"add (\w+), .*: (\d+ epochs)",
     "+hooks.EarlyStopping.{0}={1}"),
    (hooks("{LogVariables: {variables: [loss/mean]}}"), r"did you mean '(.+?)'",
     "+hooks.LogVariables.variables=[{0}]"),
    ("eval.valid.model.precison=bf16", r"did you mean '(\w+)'", "eval.valid.model.{0}=bf16"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "says", "right"), thinned(CASES, CASES[::6]), ids=[each[0][:60] for each in CASES])
def test_what_an_error_says_to_write_works(run, wrong, says, right):
    with pytest.raises(Exception, match=says) as caught:
        run([wrong])
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())]).split("\n    ")[0]
    found = re.search(says, message)
    written = right.lstrip("+!=").format(*found.groups())
    if right.endswith("{0}") and written.startswith("'"):
        (written,) = shlex.split(written)  # as the shell does
    if right.startswith("!"):
        load_config(BASE, [written])  # a text, as was asked for, although the key takes none
    else:
        run([*[wrong] * right.startswith("+"), written], "built" if right.startswith("=") else "trained")


@pytest.mark.parametrize("advice", OTHERS, ids=[each["text"][:60] for each in OTHERS])
def test_what_is_said_of_a_name_of_another_library_works(run, advice):
    text = advice["text"]
    hooks_ = re.findall(r"\b([A-Z][a-z]+[A-Za-z]+): (\{(?:[^{}]|\{[^{}]*\})*\})", text)
    plain = re.findall(
        r"\b((?:Compute|Write|Save|Log|Stop|Early|Show|Classification|Profile)[A-Za-z]*)\b(?!: \{)", text
    )
    schedules = re.findall(r"(\{class: [A-Z].*?\})(?!\})", text)
    keys = re.findall(r"\b((?:model|main_loop|sweep)\.[a-z_]+)", text)
    values = re.findall(r"\b(main_loop\.[a-z_]+|model\.(?!scheduler)[a-z_]+): ([a-z0-9]+\b|\[.*?\]+)", text)

    for name, arguments in hooks_:
        arguments = arguments.replace("REGEX", "'0'")
        run(
            [hooks(f"{{{name}: {arguments}}}") if name != "StopAfter" else f"hooks=[{{{name}: {arguments}}}]"],
            "planned",
        )
    for name in set(plain) & HOOKS - NEED_MORE:
        run([f"hooks=[{STATS}, {name}]"] if name not in ("ComputeStats", "StopAfter") else [], "planned")
    for schedule in schedules if not hooks_ else ():
        run(
            [f"model.scheduler={schedule.rstrip('}')}}}", f"hooks=[{STATS}, {{StopAfter: {{updates: 2000}}}}]"], "built"
        )
    for key, value in values:
        run([f"{key}={value}"], "planned")
    for key in keys:
        section, _, name = key.partition(".")
        assert name in KNOWN[section] | {"show"}, key
    for command, option in re.findall(r"`emrun ([a-z-]+)[^`]*?(--?[a-z]+)?(?: N| FILE)?`", text):
        found = emrun.commands[command]
        assert not option or any(option in each.opts for each in found.params if isinstance(each, click.Option))
    for path in re.findall(r"\b((?:docs|sample_configs)/[\w./]+\w)", text):
        assert (ROOT / path).exists()
