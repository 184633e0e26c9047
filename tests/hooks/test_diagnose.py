"""Diagnose: planted faults are named, a sound training is not, and a training with looks equals one without."""

import logging
import re

import numpy as np
import pytest
import torch
from campaign import thinned
from doubles import Record, Streams, state_of
from torch import nn

from emrun import AbstractHook, Factory, MainLoop, TorchModel
from emrun.base.errors import ArgumentError, HookError
from emrun.hooks import AverageWeights, Diagnose, Freeze

ADAM = Factory(torch.optim.Adam, lr=0.01)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 32, 8)).astype(np.float32)
BATCHES = [{"x": x, "y": (x.sum(axis=1) > 0).astype(np.int64)} for x in X]


class Net(nn.Module):
    """Two layers; `middle` is what lies between them, `end` what follows."""

    def __init__(self, middle=None, end=None):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.act = nn.ReLU()
        self.middle = middle or nn.Identity()
        self.last = nn.Linear(16, 2)
        self.end = end or nn.Identity()

    def forward(self, x, y):
        logits = self.end(self.last(self.middle(self.act(self.first(x)))))
        return {"loss": nn.functional.cross_entropy(logits, y, reduction="none"), "logits": logits}


class Calls(nn.Module):
    """A layer that is a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def change(module, function):
    with torch.no_grad():
        function(module)
    return module


BEGINNINGS = {
    "no gradient in 3": "no_gradient",
    "never changes": "never_moves",
    "the first layer that returns": "not_finite",
    "the same for all examples of a batch in 3": "same_output",
    "updates are very small in 3": "small_update",
    "updates are very large in 3": "large_update",
}
FIGURE = r"None|all 0|learning rate \S+|from \S+ to \S+|differences up to \S+, values up to \S+|a ratio of \S+"
VERDICT = re.compile(rf"Diagnose, update \d+: ({'|'.join(BEGINNINGS)})[^:]*: (.+)\. What usually helps: [a-z]")


def diagnosed(module, *hooks, **arguments):
    """Train; return the verdicts as verdict -> layers, those of the first time that it is given."""
    texts = []
    handler = logging.Handler()
    handler.emit = lambda entry: texts.append(entry.getMessage())
    logger = logging.getLogger("emrun.hooks._diagnose.verdicts")
    logger.addHandler(handler)
    try:
        train(module, *hooks, **arguments)
    finally:
        logger.removeHandler(handler)
    found = {}
    for text in texts:
        beginning, layers = VERDICT.fullmatch(text[: text.index("helps: ") + 8]).groups()
        found.setdefault(BEGINNINGS[beginning], re.findall(rf"(\S.*?) \((?:{FIGURE})\)(?:, |$)", layers))
    return found


def train(module, *hooks, batches=BATCHES, every="20 updates", optimizer=ADAM, updates_done=0, **arguments):
    model = TorchModel(module, optimizer=optimizer, device="cpu", **arguments)
    hooks = [Diagnose(every=every), *hooks]
    with MainLoop(model, Streams(train=batches), hooks, on_unused_sources="ignore") as loop:
        loop.progress.updates_done = updates_done
        loop.epoch(["train"])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def group(match, **more):
    return Factory(torch.optim.AdamW, options={"groups": [{"match": match, **more}]}, lr=0.01)


class Unused(Net):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)


OVERSHOOTING = {"match": "^last.weight", "lr": 1.0, "weight_decay": 1.5}

FAULTS = {
    "no gradient, None": (Unused, {}, {"no_gradient": ["unused.weight", "unused.bias"]}),
    "no gradient, detached": (
        lambda: Net(middle=Calls(lambda x: x.detach())),
        {},
        {"no_gradient": ["first.weight", "first.bias"]},
    ),
    "no gradient, 0": (
        lambda: Net(middle=Calls(lambda x: x.detach() + 0 * x)),
        {},
        {"no_gradient": ["first.weight", "first.bias"]},
    ),
    "learning rate 0": (Net, {"optimizer": group("^first", lr=0.0)}, {"never_moves": ["first.weight", "first.bias"]}),
    "not finite": (
        lambda: Net(middle=nn.Sequential(Calls(lambda x: 1 / x), nn.Tanh())),
        {},
        {"not_finite": ["middle.0 (Calls)"]},
    ),
    "the same output": (
        lambda: Net(end=Calls(lambda x: x.mean(0, keepdim=True).expand_as(x))),
        {},
        {"same_output": ["output logits"]},
    ),
    "small updates": (
        Net,
        {"optimizer": Factory(torch.optim.SGD, lr=1e-6)},
        {"small_update": ["first.weight", "last.weight"]},
    ),
    "large updates": (
        Net,
        {"optimizer": Factory(torch.optim.SGD, options={"groups": [OVERSHOOTING]}, lr=0.1)},
        {"large_update": ["last.weight"]},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_once(name, caplog):
    module, arguments, expected = FAULTS[name]
    assert diagnosed(module(), batches=BATCHES[:60], **arguments) == expected
    assert len([each for each in caplog.messages if each.startswith("Diagnose")]) == 1


@pytest.mark.parametrize(
    ("name", "is_judged"), [("no gradient, None", True), ("small updates", False), ("learning rate 0", False)]
)
def test_after_a_resume_what_weights_that_have_converged_show_too_is_not_judged(name, is_judged):
    module, arguments, expected = FAULTS[name]
    assert diagnosed(module(), batches=BATCHES[:80], updates_done=7, **arguments) == (expected if is_judged else {})


def test_a_layer_that_is_dead_as_a_whole():
    module = change(Net(), lambda net: net.first.bias.fill_(-90))
    found = diagnosed(module, batches=BATCHES[:60])
    assert found["same_output"] == ["output logits"]
    assert set(found) == {"same_output", "no_gradient"}


def test_weights_of_16_bits_that_are_too_coarse_for_the_learning_rate():
    class Coarse(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 2).bfloat16()

        def forward(self, x, y):
            return {"loss": nn.functional.cross_entropy(self.layer(x.bfloat16()).float(), y, reduction="none")}

    module = change(Coarse(), lambda each: [parameter.fill_(1.0) for parameter in each.parameters()])
    assert diagnosed(module, optimizer=Factory(torch.optim.SGD, lr=1e-5)) == {
        "never_moves": ["layer.weight", "layer.bias"],
    }


class Sound(nn.Module):
    """Shared layers, a tuple of outputs, a mask, a layer that begins at 0, parameters that are not trained."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(8, 16)
        self.rnn = nn.LSTM(16, 16)
        self.act = nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm1d(16)
        self.fixed = nn.Linear(16, 16).requires_grad_(False)
        self.head = change(nn.Linear(16, 3), lambda each: each.weight.zero_())
        self.mask = Calls(lambda z: z.masked_fill(torch.tensor([False, False, True]), -torch.inf))
        self.spread = nn.Parameter(torch.ones(()))

    def forward(self, x, y):
        x = self.act(self.wide(x))
        x = x + self.act(self.norm(self.fixed(x)))
        x = self.rnn(x.expand(3, -1, -1))[0][-1]
        logits = self.mask(self.head(x))
        loss = nn.functional.cross_entropy(logits, y, reduction="none") + self.spread**2
        return {"loss": loss, "logits": logits, "log_variance": self.spread.expand(len(x))}


def rate(update):
    """Return the share of the learning rate."""
    return max(0.0, update - 30) / 40 if update < 70 else 1e-6


SILENT = {
    "plain": (Net, {}),
    "sound": (Sound, {}),
    "a warm-up from 0, and an end that is almost 0": (
        Sound,
        {"scheduler": Factory(torch.optim.lr_scheduler.LambdaLR, rate, options={"step_on": "update"})},
    ),
    "accumulate": (Sound, {"accumulate": 3}),
    "micro batches": (Sound, {"micro_batch_size": 12}),
    "recompute": (Net, {"recompute": "first|act"}),
    "fp16": (Net, {"precision": "fp16"}),
    "bf16": (Sound, {"precision": "bf16"}),
}


@pytest.mark.parametrize("name", thinned(SILENT, ["a warm-up from 0, and an end that is almost 0", "fp16"]))
def test_it_says_nothing_when_all_is_well(name, caplog):
    module, arguments = SILENT[name]
    assert diagnosed(module(), every="10 updates", **arguments) == {}
    assert not [each for each in caplog.messages if each.startswith("Diagnose")]


def test_what_is_frozen_is_not_meant():
    assert diagnosed(Net(), Freeze("^first"), batches=BATCHES[:50], every="10 updates") == {}
    frozen = Freeze("^first", until="40 updates")
    assert diagnosed(Net(), frozen, batches=BATCHES[:80], every="10 updates") == {}


def test_a_loss_of_0_is_not_a_fault():
    class Margin(Net):
        def forward(self, x, y):
            return {"loss": super().forward(x, y)["logits"].clamp(max=-1e3).sum(1) * 0.0 + 0.0}

    assert "no_gradient" not in diagnosed(Margin(), batches=BATCHES[:60], every="10 updates")


def test_weights_that_have_converged_may_have_small_updates():
    same = [BATCHES[0]] * 120
    assert diagnosed(Net(), batches=same, optimizer=Factory(torch.optim.SGD, lr=3.0, momentum=0.9)).keys() <= {
        "large_update"
    }


class Verdicts(AbstractHook):
    """Plants a fault in some updates: the gradients of the first layer are 0."""

    def __init__(self, updates):
        super().__init__()
        self.updates = updates

    def before_batch(self):
        self.main_loop.model.module.middle.is_off = self.main_loop.updates_done + 1 in self.updates


class Switch(nn.Module):
    is_off = False

    def forward(self, x):
        return x.detach() if self.is_off else x


def test_a_verdict_needs_three_looks_in_a_row_and_is_given_once(caplog):
    planted = Verdicts({5, 6, *range(8, 20), *range(60, 90)})
    assert diagnosed(Net(middle=Switch()), planted, every="1 updates") != {}
    found = [each.split(":")[0] for each in caplog.messages if each.startswith("Diagnose")]
    assert found == ["Diagnose, update 10"]


class Watching(AbstractHook):
    """Keeps the updates of which a look watches the layers, and the number of torch's hooks after each batch."""

    def __init__(self):
        super().__init__()
        self.updates, self.left = [], 0

    def before_update(self, model):
        if model.module.first._forward_hooks:
            self.updates.append(self.main_loop.updates_done + 1)

    def after_batch(self):
        self.left += sum(len(each._forward_hooks) for each in self.main_loop.model.module.modules())


LOOKS = [(100, [10, 20, 50, 100]), (40, [4, 8, 20, 40, 80, 120]), (3, [1, *range(3, 121, 3)])]


@pytest.mark.parametrize(("every", "expected"), thinned(LOOKS, LOOKS[:1]))
def test_the_updates_of_the_looks(every, expected):
    seen = Watching()
    train(Net(), seen, every=f"{every} updates")
    assert (seen.updates, seen.left) == (expected, 0)


def test_after_a_resume_the_first_looks_come_again():
    seen = Watching()
    train(Net(), seen, every="40 updates", updates_done=70)
    assert seen.updates == [74, 78, 80, 90, 120, 160]


def test_an_error_in_a_look_leaves_nothing_behind():
    class Fail(AbstractHook):
        def before_update(self):
            if self.main_loop.updates_done == 1:
                raise RuntimeError("planted")

    module = Net()
    with pytest.raises(RuntimeError, match="planted"):
        diagnosed(module, Fail(), every="2 updates")
    assert not any(each._forward_hooks for each in module.modules())


class Random(Net):
    def __init__(self):
        super().__init__(middle=nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.3)))


MECHANICS = {
    "plain": {},
    "accumulate": {"accumulate": 2},
    "micro batches": {"micro_batch_size": 5},
    "fp16": {"precision": "fp16"},
    "recompute": {"recompute": r"^middle\.1$|^act"},
    "several": {
        "optimizer": {
            "one": Factory(torch.optim.AdamW, options={"match": "^(first|middle)"}, lr=0.01),
            "two": Factory(torch.optim.SGD, options={"match": "^last"}, lr=0.1),
        }
    },
}


@pytest.mark.parametrize("name", thinned(MECHANICS, ["accumulate", "several"]))
def test_a_training_with_looks_equals_one_without(name):
    def trained(*hooks):
        torch.manual_seed(1)
        arguments = {"optimizer": ADAM, **MECHANICS[name]}
        model, record = TorchModel(Random(), device="cpu", **arguments), Record()
        data, hooks = Streams(train=BATCHES[:9], valid=BATCHES[:2]), [*hooks, record, AverageWeights(decay=0.9)]
        with MainLoop(model, data, hooks, extra_streams=["valid"], on_unused_sources="ignore") as loop:
            for _ in range(2):
                loop.epoch(["train"], ["valid"])
        values = [each["loss"] for each in (*record.trained, *record.evaluated)]
        return state_of(model.module), dict(model.evaluation_weights), values, torch.rand(3)

    expected, found = trained(), trained(Diagnose(every="2 updates"))
    for one, other in zip(expected[:2], found[:2], strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert all(map(torch.equal, expected[2], found[2]))
    assert torch.equal(expected[3], found[3])


def test_a_compiled_module_is_judged_by_its_outputs_and_parameters(caplog):
    caplog.set_level("INFO")
    module = Net(end=Calls(lambda x: x.mean(0, keepdim=True).expand_as(x)))
    faults = {"batches": BATCHES[:60], "optimizer": group("^first", lr=0.0)}
    found = diagnosed(module, compile={"backend": "eager"}, **faults)
    assert found == {"same_output": ["output logits"], "never_moves": ["first.weight", "first.bias"]}
    assert caplog.text.count("the module is compiled, so only its outputs and parameters are looked at") == 1


def test_a_model_that_returns_only_a_loss_is_judged_by_its_last_layer():
    class OnlyLoss(Net):
        def forward(self, x, y):
            return {"loss": super().forward(x, y)["loss"]}

    module = change(OnlyLoss(), lambda net: net.first.bias.fill_(-90))
    assert diagnosed(module, batches=BATCHES[:60])["same_output"] == ["last (Linear)"]


@pytest.mark.parametrize(
    ("every", "message"), [(5, "write for example '5 updates'"), ("5 epochs", "'5 epochs' is not an interval")]
)
def test_a_wrong_interval(every, message):
    with pytest.raises(ArgumentError, match=message):
        Diagnose(every=every)


def test_a_model_without_a_module_is_an_error(scripted, numbers):
    with pytest.raises(HookError, match="Diagnose needs a TorchModel, not Scripted"):
        MainLoop(scripted(), numbers, [Diagnose()])


def test_the_example_of_the_docstring(in_docstring, train_digits, caplog):
    train_digits(in_docstring(Diagnose))
    assert not [each for each in caplog.messages if each.startswith("Diagnose")]
