"""Runs with one or several optimizers and schedules: what is saved, recorded and refused; resumes from their states."""

import inspect

import pytest
import torch
from campaign import thinned
from safetensors.torch import load_file
from torch.optim import lr_scheduler
from training.resuming import FEW_HOOKS, config_of, interrupted, plain, resumed, stopped, train_with

from emrun import AbstractHook, create_training, load_run, read_steps
from emrun.base.errors import ArgumentError, EmrunError, StateError
from emrun.training.create import train
from emrun.training.resume import resume_training

PARTS = '''

import torch
from torch import nn

from emrun import AbstractHook


class Parts(nn.Module):
    """A part for each optimizer, with two matrices, or an embedding with sparse gradients."""

    def __init__(self, names, dtype):
        super().__init__()
        self.dtype = getattr(torch, dtype)
        for name in names:
            part = nn.ModuleDict({"a": nn.Linear(3, 2, bias=False), "b": nn.Linear(2, 1, bias=False)})
            self.add_module(name, nn.Embedding(2, 1, sparse=True) if name == "sparse" else part.to(self.dtype))

    def forward(self, x, y):
        x = x.to(self.dtype)
        parts = self.named_children()
        found = [part(y) if name == "sparse" else part["b"](part["a"](x).tanh()) for name, part in parts]
        return {"loss": sum((each.float()[:, 0] - y) ** 2 for each in found)}


class Kill(AbstractHook):
    """Fails after an iteration of a run that has not been resumed."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def after_batch(self, stream_name):
        if stream_name == "train" and self.main_loop.iterations_done == self.at:
            raise RuntimeError("killed")


class Keeps(torch.optim.SGD):
    """Keeps values of many kinds that torch's optimizers do not keep."""

    def __init__(self, parameters, lr, kind=""):
        super().__init__(parameters, lr=lr)
        self.kind = kind

    def step(self, closure=None):
        super().step()
        for parameter in (each for group in self.param_groups for each in group["params"]):
            own = self.state[parameter]
            mean = own["history"][0]["mean"] if own else torch.zeros(7)
            own["history"] = [{"mean": mean + parameter.detach().float().mean() / 3, "pair": (1, None)}]
            own.setdefault("name", "text")
            own["exact"] = own.get("exact", torch.zeros(parameter.shape)) + parameter.detach().float() / 3
            parameter.data.add_(own["exact"].to(parameter.dtype), alpha=1e-3)
            if self.kind:
                own["last"] = bytearray(b"1")


class LookAhead(torch.optim.Optimizer):
    """Wraps another optimizer, and loads its state in its own way."""

    def __init__(self, parameters, lr):
        self.inner = torch.optim.Adam(parameters, lr=lr)
        super().__init__([each for group in self.inner.param_groups for each in group["params"]], {"lr": lr})
        self.slow = [each.detach().clone() for each in self.param_groups[0]["params"]]

    def step(self, closure=None):
        self.inner.step()
        for slow, parameter in zip(self.slow, self.param_groups[0]["params"]):
            parameter.data.copy_(slow.lerp_(parameter.data, 0.5))

    def state_dict(self):
        return {**super().state_dict(), "inner": self.inner.state_dict(), "slow": self.slow}

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])
        self.slow = [each.clone() for each in state["slow"]]
        super().load_state_dict({"state": {}, "param_groups": state["param_groups"]})


class Table(torch.optim.lr_scheduler.LRScheduler):
    """Keeps tensors of several numbers."""

    def __init__(self, optimizer):
        self.table, self.seen = torch.tensor([0.1, 0.2, 0.05]), torch.zeros(2)
        super().__init__(optimizer)

    def get_lr(self):
        self.seen += 1
        return [float(self.table[self.last_epoch % 3])] * len(self.base_lrs)


class Power:
    def __init__(self, base):
        self.base = base

    def __call__(self, number):
        return self.base**number
'''


def groups(**options):
    return {"groups": [{"match": r"\.a\.", **options}]}


SGD = {"class": "SGD", "lr": 0.1, "momentum": 0.9}
OPTIMIZERS = {
    "adadelta": {"class": "Adadelta", **groups(rho=0.5)},
    "adafactor": {"class": "Adafactor", **groups(d=2.0)},
    "adagrad": {"class": "Adagrad", "lr_decay": 0.1, **groups(initial_accumulator_value=0.5)},
    "adam": {"class": "Adam", "amsgrad": True, **groups(amsgrad=False, betas=[0.5, 0.9])},
    "adam_fused": {"class": "Adam", "fused": True},
    "adamw": {"class": "AdamW", **groups(amsgrad=True, foreach=True)},
    "adamax": {"class": "Adamax", **groups(weight_decay=0.1)},
    "asgd": {"class": "ASGD", "t0": 2, **groups(lambd=0.1)},
    "muon": {"class": "Muon", **groups(nesterov=False)},
    "nadam": {"class": "NAdam", "weight_decay": 0.1, **groups(decoupled_weight_decay=True)},
    "radam": {"class": "RAdam", "weight_decay": 0.1, **groups(decoupled_weight_decay=True)},
    "rmsprop_momentum": {"class": "RMSprop", "momentum": 0.9, **groups(momentum=0)},
    "rmsprop_centered": {"class": "RMSprop", **groups(centered=True)},
    "rprop": {"class": "Rprop", **groups(step_sizes=[0.001, 1.0])},
    "sgd": {**SGD, **groups(momentum=0)},
    "sgd_nesterov": {**SGD, **groups(nesterov=True, maximize=True)},
    "sparse": {"class": "SparseAdam"},
    "schedulefree_adamw": {"class": "schedulefree.AdamWScheduleFree", **groups(weight_decay=0.1)},
    "schedulefree_sgd": {"class": "schedulefree.SGDScheduleFree", **groups(momentum=0.5)},
    "keeps": {"class": "optimizer_parts.Keeps", "lr": 0.1, **groups(lr=0.2)},
    "lookahead": {"class": "optimizer_parts.LookAhead", "lr": 0.1},
}
MULTI_STEP = {"class": "torch.optim.lr_scheduler.MultiStepLR", "milestones": [1, 1]}
SCHEDULERS = {
    "chained": {"class": "ChainedScheduler", "schedulers": [{**MULTI_STEP, "milestones": [2, 5, 7]}]},
    "constant": {"class": "ConstantLR", "total_iters": 6},
    "cosine": {"class": "CosineAnnealingLR", "T_max": 9},
    "cyclic": {"class": "CyclicLR", "base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2, "mode": "triangular2"},
    "exponential": {"class": "ExponentialLR", "gamma": 0.9},
    "function": {"class": "LambdaLR", "lr_lambda": {"class": "optimizer_parts.Power", "base": 0.9}},
    "linear": {"class": "LinearLR", "total_iters": 8},
    "multi": {**MULTI_STEP, "milestones": [2, 2, 6]},
    "one_cycle": {"class": "OneCycleLR", "max_lr": 0.1, "total_steps": 9},
    "polynomial": {"class": "PolynomialLR", "total_iters": 9},
    "product": {"class": "MultiplicativeLR", "lr_lambda": {"class": "optimizer_parts.Power", "base": 0.99}},
    "restarts": {"class": "CosineAnnealingWarmRestarts", "T_0": 3, "T_mult": 2},
    "sequence": {"class": "SequentialLR", "schedulers": [{"class": "LinearLR", "total_iters": 2}, MULTI_STEP]},
    "step": {"class": "StepLR", "step_size": 2},
    "swa": {"class": "torch.optim.swa_utils.SWALR", "swa_lr": 0.01, "anneal_epochs": 4},
    "table": {"class": "optimizer_parts.Table"},
}
for each in SCHEDULERS.values():
    each["step_on"] = "update"
SCHEDULERS["sequence"]["milestones"] = [7]
SCHEDULERS["plateau"] = {"class": "ReduceLROnPlateau", "metric": "valid/loss/mean", "patience": 0}
SCHEDULERS["in a warm-up"] = {**SCHEDULERS["plateau"], "warmup": "8 updates"}
SCHEDULERS["at the end of a warm-up"] = {**SCHEDULERS["step"], "warmup": "6 updates"}
SCHEDULERS["after a warm-up"] = {**SCHEDULERS["linear"], "warmup": "5 updates"}
SCHEDULERS = {name.replace(" ", "_").replace("-", "_"): each for name, each in SCHEDULERS.items()}


@pytest.fixture
def parts(project):
    (project / "optimizer_parts.py").write_text(PARTS)
    return project


def config_of_parts(optimizers, schedulers=None, dtype="float32"):
    config = config_of("plain", skip_zeroth_epoch=True)
    config["model"] = {
        "module": {"class": "optimizer_parts.Parts", "names": list(optimizers), "dtype": dtype},
        "optimizer": {name: {**each, "match": rf"^{name}\."} for name, each in optimizers.items()},
        "device": "cpu",
    }
    if schedulers is not None:
        config["model"]["scheduler"] = schedulers
    kill = {"optimizer_parts.Kill": {"at": 7}}
    stats = {"ComputeStats": {"variables": ["loss"]}}
    config["hooks"] = [kill, {"SaveEvery": {"every": "2 iterations"}}, stats, {"StopAfter": {"iterations": 9}}]
    return config


def final(training):
    """Train; return name of an optimizer -> its weights, its state and that of its schedule."""
    train(training)
    states, weights = training.model.state_dict()["optimizers"], training.model.module.state_dict()
    return {
        name: plain([each, [weights[key] for key in weights if key.startswith(f"{name}.")]])
        for name, each in states.items()
    }


FEW = {
    *("adafactor", "adam", "keeps", "lookahead", "schedulefree_adamw", "sparse"),
    *("in_a_warm_up", "one_cycle", "sequence", "table"),
}
"""Of those with states of one kind, one for `make test`."""


def of_few(cases):
    return {name: each for name, each in cases.items() if name in FEW}


@pytest.mark.filterwarnings("ignore")  # of torch, about the order of schedules in a sequence
@pytest.mark.parametrize("dtype", thinned(["few", "float32", "float64", "bfloat16"], ["few"]))
def test_a_killed_run_goes_on_exactly_with_every_optimizer_and_scheduler(parts, dtype):
    chosen, schedulers = (of_few(OPTIMIZERS), of_few(SCHEDULERS)) if dtype == "few" else (OPTIMIZERS, SCHEDULERS)
    dtype = "float32" if dtype == "few" else dtype
    optimizers = {name: each for name, each in chosen.items() if dtype == "float32" or name != "sparse"}
    optimizers |= dict.fromkeys(schedulers, SGD)
    config = config_of_parts(optimizers, schedulers, dtype)
    straight = final(create_training(config, output_dir=parts / "straight", overrides=["hooks.Kill.at=99"]))
    with pytest.raises(RuntimeError, match="killed"):
        train(create_training(config, output_dir=parts / "run"))
    again = resume_training(parts / "run", ["hooks.Kill.at=99"])
    assert again.main_loop.iterations_done == 6
    found = final(again)
    assert [name for name in straight if found[name] != straight[name]] == []


def test_every_optimizer_and_scheduler_of_torch_is_tried():
    def tried(cases):
        return {each["class"].rpartition(".")[2] for each in cases.values()}

    own = {name for name in dir(torch.optim) if inspect.isclass(getattr(torch.optim, name))}
    assert own - tried(OPTIMIZERS) == {"Optimizer", "LBFGS"}  # LBFGS needs a closure, and is refused
    classes = vars(lr_scheduler).items()
    own = {name for name, each in classes if inspect.isclass(each) and issubclass(each, lr_scheduler.LRScheduler)}
    assert own - tried(SCHEDULERS) == {"LRScheduler", "_LRScheduler"}


def test_a_state_that_no_checkpoint_could_hold_is_refused_after_the_first_update(parts):
    config = config_of_parts({"keeps": {"class": "optimizer_parts.Keeps", "lr": 0.1, "kind": "bytearray"}})
    training = create_training(config, output_dir=parts / "run")
    message = r"optimizer\.keeps: a resume could not load a checkpoint: its state\.state\.0\.last is bytearray"
    with pytest.raises(ArgumentError, match=message):
        train(training)
    assert training.main_loop.iterations_done == 0


class AddsGroupLate(AbstractHook):
    def before_training(self):
        self.main_loop.model.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})


def test_groups_that_a_resume_would_not_have_are_refused_before_the_first_batch(project):
    training = create_training(config_with({"class": "SGD", "lr": 0.1}), output_dir=project / "run")
    with pytest.raises(
        ArgumentError, match=r"a resume could not load .*: an optimizer trains parameters that the module"
    ):
        train_with(training, AddsGroupLate())
    assert not (project / "run" / "metrics.jsonl").exists()


def test_changed_milestones_of_a_schedule_replace_the_saved_ones(project):
    schedule = {"class": "MultiStepLR", "milestones": [4, 8], "step_on": "update"}
    directory = stopped(project, config_with({"class": "SGD", "lr": 0.1}, schedule))
    more = ["hooks.StopAfter.epochs=2", "model.scheduler.milestones=[4, 7]"]
    scheduler = resume_training(directory, more).model.scheduler.scheduler
    assert (scheduler.milestones, scheduler.last_epoch) == ({4: 1, 7: 1}, 5)
    assert scheduler.get_last_lr() == [pytest.approx(0.01)]


WARMUPS = [
    ("5 updates", "5 updates", [1] * 5),
    ("5 updates", "8 updates", [6 / 8, 7 / 8, 1, 1, 1]),
    ("5 updates", "2 updates", [1] * 5),
    ("4 updates", "8 updates", [1] * 5),  # it is over
    ("100%", "100%", [each / 10 for each in range(6, 11)]),
]


@pytest.mark.parametrize(("before", "after", "rates"), thinned(WARMUPS, WARMUPS[1:2]))
def test_a_changed_warmup_counts_from_the_resume_unless_it_is_over(project, before, after, rates):
    schedule = {"class": "ReduceLROnPlateau", "metric": "valid/loss/mean", "patience": 9, "warmup": before}
    directory = stopped(project, config_with({"class": "SGD", "lr": 0.5}, schedule))
    train(resume_training(directory, ["hooks.StopAfter.epochs=2", f"model.scheduler.warmup={after}"]))
    found = list(read_steps(directory)["learning_rate"])
    assert found[5:] == pytest.approx([0.5 * each for each in rates])


@pytest.mark.parametrize("change", [("3 updates", None), pytest.param((None, "3 updates"), marks=pytest.mark.campaign)])
def test_a_resume_neither_adds_nor_removes_a_warmup(project, change):
    before, after = ({"class": "StepLR", "step_size": 9, **({"warmup": each} if each else {})} for each in change)
    directory = stopped(project, config_with({"class": "SGD", "lr": 0.5}, before))
    override = f"model.scheduler.warmup={after['warmup']}" if "warmup" in after else "~model.scheduler.warmup"
    with pytest.raises(EmrunError, match=r"scheduler\.warmup was added or removed; a resume cannot change that"):
        resume_training(directory, ["hooks.StopAfter.epochs=2", override])


def config_with(optimizer, scheduler=None):
    config = config_of(hooks=FEW_HOOKS, extra_streams=["valid"])
    config["model"] |= {"optimizer": optimizer, "scheduler": scheduler}
    return config


SEVERAL = {
    "first": {"class": "AdamW", "lr": 0.05, "match": r"layers\.[01]", "no_decay": "biases_and_norms"},
    "last": {"class": "SGD", "lr": 0.1, "momentum": 0.9, "match": r"layers\.3"},
}
SCHEDULES = {
    "first": {"class": "Cosine", "warmup": "2 updates"},
    "last": {"class": "StepLR", "step_size": 1, "gamma": 0.5},
}
OF_TWO_MODES = {"class": "schedulefree.AdamWScheduleFree", "lr": 0.05, "warmup_steps": 2}


def test_an_evaluation_and_a_checkpoint_have_the_weights_for_evaluations(project):
    interrupted(config_with(OF_TWO_MODES), project / "run", None)
    place = project / "run" / "checkpoints" / "latest"
    saved, state = load_file(place / "model.safetensors"), torch.load(place / "state.pt", weights_only=True)["model"]
    kept = state["training_weights"]
    assert state["optimizer"]["state"]["param_groups"][0]["train_mode"] is False
    model = load_run(project / "run", "latest").model
    assert not torch.equal(saved["layers.0.weight"], kept[0])
    assert torch.equal(model.module.layers[0].weight, saved["layers.0.weight"])


def test_learning_rates_have_the_names_of_the_optimizers(project):
    config = config_with(SEVERAL, SCHEDULES)
    config["hooks"] = [*FEW_HOOKS[:1], "WriteCSV", *FEW_HOOKS[1:]]
    interrupted(config, project / "run", "after_epoch 2")
    resumed(project / "run")
    steps = read_steps(project / "run")
    assert [name for name in steps if "rate" in name] == [
        "learning_rate_first", "learning_rate_first_1", "learning_rate_last",
    ]  # fmt: skip
    assert steps["learning_rate_first"][:3].tolist() == pytest.approx([0.025, 0.05, 0.05])
    assert steps["learning_rate_last"].tolist() == [0.1] * 5 + [0.05] * 5
    assert "learning_rate_last" in (project / "run" / "training.csv").read_text()


def test_a_checkpoint_of_other_optimizers_is_refused(project):
    config = config_with({"class": "SGD", "lr": 0.1})
    interrupted(config, project / "run", "after_epoch 1")
    override = ["~model.optimizer", "model.optimizer={all: {class: SGD, match: layers, lr: 0.1}}"]
    with pytest.raises(StateError, match=r"model.optimizer has all, but had no names; a resume cannot change that"):
        resume_training(project / "run", overrides=[*override, "hooks.StopAfter.epochs=3"])
