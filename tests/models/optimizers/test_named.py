"""Several optimizers: updates, schedules, gradients of one alone, warnings; optimizers of two modes."""

import pytest
import torch
from doubles import Streams, run
from torch import nn

from emrun import AbstractHook, Factory, MainLoop, TorchModel
from emrun.base.errors import ArgumentError, StateError
from emrun.hooks import Freeze, StopAfter
from emrun.models.schedules.built_in import Cosine

FACTORS = [{"x": [[1.0, 2.0], [0.5, -1.0]]}, {"x": [[-1.0, 0.0], [2.0, 1.0]]}, {"x": [[0.0, 3.0], [1.0, 1.0]]}]


class Game(nn.Module):
    """Two parts, each of which has a loss that depends on both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.maker = nn.Linear(2, 2)
        self.judge = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))

    def forward(self, x):
        made = self.maker(x)
        real, false = self.judge(x), self.judge(made)
        return {"judge_loss": (false - real).tanh(), "maker_loss": -false, "loss": (false - real) ** 2}


class Player(TorchModel):
    def train_step(self, inputs):
        for name in ("judge", "maker"):
            outputs = self.forward(inputs)
            self.backward(outputs[f"{name}_loss"].mean(), optimizer=name)
            self.update(self.optimizers[name] if name == "judge" else name)
        return outputs


def form(target=torch.optim.SGD, options=(), **arguments):
    return Factory(target, options=dict(options), **{"lr": 0.1, **arguments})


def forms(**more):
    return {
        "maker": form(torch.optim.AdamW, {"match": "^maker"}),
        "judge": form(momentum=0.9, options={"match": "^judge", **more}),
    }


def by_hand(net, steps, epochs=2):
    """Train with plain PyTorch; `steps` are pairs of an optimizer and the name of its loss."""
    for _ in range(epochs):
        for batch in FACTORS:
            x = torch.tensor(batch["x"])
            for optimizer, loss in steps:
                net.zero_grad()
                net(x)[loss].mean().backward()
                optimizer.step()
    return net


def equal(one, other):
    return all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))


def parts(net):
    maker = torch.optim.AdamW(net.maker.parameters(), lr=0.1)
    return maker, torch.optim.SGD(net.judge.parameters(), lr=0.1, momentum=0.9)


def test_a_step_of_two_optimizers_equals_a_loop_by_hand():
    net, model = Game(), Player(Game(), optimizer=forms(), device="cpu")
    run(model, FACTORS, epochs=2)
    maker, judge = parts(net)
    assert equal(by_hand(net, [(judge, "judge_loss"), (maker, "maker_loss")]), model.module)


def test_the_standard_step_makes_one_backward_and_updates_all():
    net, model = Game(), TorchModel(Game(), outputs=["loss"], optimizer=forms(), device="cpu")
    run(model, FACTORS, epochs=2)
    maker, judge = parts(net)
    both = type("Both", (), {"step": lambda self: (maker.step(), judge.step())})()
    assert equal(by_hand(net, [(both, "loss")]), model.module)


def test_two_optimizers_in_a_window_update_as_for_one_batch():
    whole = [{"x": [row for batch in FACTORS for row in batch["x"]]}]
    arguments = {"outputs": ["loss"], "optimizer": forms(), "device": "cpu"}
    parts, one = TorchModel(Game(), accumulate=3, **arguments), TorchModel(Game(), **arguments)
    run(parts, FACTORS, epochs=2), run(one, whole, epochs=2)
    for pair in zip(parts.module.parameters(), one.module.parameters(), strict=True):
        torch.testing.assert_close(*pair)  # the gradients are added in another order


def test_a_backward_for_an_optimizer_leaves_other_gradients_alone():
    model = TorchModel(Game(), optimizer=forms(), device="cpu")
    outputs = model.forward({"x": torch.ones(2, 2)})
    model.backward(outputs["maker_loss"].mean(), optimizer="maker")
    assert all(each.grad is not None for each in model.module.maker.parameters())
    assert all(each.grad is None for each in model.module.judge.parameters())


def test_optimizers_and_schedules_have_the_names_of_the_config():
    schedule = Factory(torch.optim.lr_scheduler.StepLR, step_size=1)
    model = TorchModel(Game(), optimizer=forms(), scheduler={"judge": schedule}, device="cpu")
    assert list(model.optimizers) == ["maker", "judge"]
    assert (list(model.schedulers), model.optimizer, model.scheduler) == (["judge"], None, None)
    assert model.step_values()["learning_rate"] == {"maker": 0.1, "judge": 0.1}
    model = TorchModel(Game(), optimizer=forms(), scheduler=schedule, device="cpu")
    assert list(model.schedulers) == ["maker", "judge"]
    model = TorchModel(Game(), optimizer=form(), device="cpu")
    assert model.optimizers == {"optimizer": model.optimizer}


def test_a_state_that_no_optimizer_can_load_is_refused_for_each_of_them():
    saved = TorchModel(Game(), optimizer=forms(), device="cpu").state_dict()
    others = {name: Factory(torch.optim.Adagrad, options=each.options) for name, each in forms().items()}
    with pytest.raises(StateError) as caught:
        TorchModel(Game(), optimizer=others, device="cpu").load_state_dict(saved)
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "optimizer 'maker'",
        "optimizer 'judge'",
    ]


class Uneven(TorchModel):
    """Updates the judge three times in each batch, and the maker in every fourth batch."""

    batches = 0

    def train_step(self, inputs):
        self.batches += 1
        outputs = self.forward(inputs)
        for name in ["judge"] * 3 + ["maker"] * (self.batches % 4 == 0):
            outputs = self.forward(inputs)
            self.backward(outputs[f"{name}_loss"].mean(), optimizer=name)
            self.update(name)
        return outputs


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("schedule", ["Cosine", "StepLR"])
def test_the_rates_are_those_of_the_plan_however_often_an_optimizer_steps(schedule, accumulate):
    class Used(AbstractHook):
        def __init__(self):
            super().__init__()
            self.rates = {}

        def before_update(self, model, optimizer):
            name = next(name for name, each in model.optimizers.items() if each is optimizer)
            self.rates[name, self.main_loop.updates_done] = optimizer.param_groups[0]["lr"]

    form = {
        "Cosine": Factory(Cosine, final=0.1),
        "StepLR": Factory(torch.optim.lr_scheduler.StepLR, step_size=2, options={"step_on": "update"}),
    }[schedule]
    player = Uneven if accumulate == 1 else Player
    model = player(Game(), optimizer=forms(), scheduler=form, accumulate=accumulate, device="cpu")
    hook = Used()
    MainLoop(model, Streams(train=FACTORS), [hook, StopAfter(epochs=4)]).run_training()
    first = model.schedule_plan()
    planned = {each.optimizer: each.rates[0] for each in (first, *first.others)}
    assert len(planned["maker"]) >= 8 // accumulate
    assert (
        {update for name, update in hook.rates if name == "maker"} == set(range(8)) if accumulate == 2 else {3, 7, 11}
    )
    assert hook.rates == {each: pytest.approx(planned[each[0]][each[1]]) for each in hook.rates}


def refused(**arguments):
    with pytest.raises(ArgumentError) as caught:
        TorchModel(Game(), device="cpu", **arguments)
    return str(caught.value)


def test_what_does_not_fit_several_optimizers_is_refused():
    constant = Factory(torch.optim.lr_scheduler.ConstantLR)
    assert "optimizer.b: missing key 'match'" in refused(optimizer={"a": form(options={"match": "maker"}), "b": form()})
    both = {"a": form(options={"match": "maker"}), "b": form(options={"match": "."})}
    assert "optimizer.b.match: selects parameter 'maker.weight', which optimizer 'a' trains" in refused(optimizer=both)
    assert "optimizer: '1st' is not a name of letters" in refused(optimizer={"1st": form()})
    assert "optimizer: is empty" in refused(optimizer={})
    assert "scheduler.judg: there is no optimizer 'judg'" in refused(optimizer=forms(), scheduler={"judg": constant})
    assert "scheduler: has names, but there is one" in refused(optimizer=form(), scheduler={"judge": constant})
    groups = [{"match": "tail"}]
    assert "optimizer.judge.groups[0].match: 'tail' matches none" in refused(optimizer=forms(groups=groups))
    wrong = {"judge": Factory(torch.optim.lr_scheduler.StepLR, step_size=1, options={"step_on": "day"})}
    assert "scheduler.judge.step_on: 'day' is neither" in refused(optimizer=forms(), scheduler=wrong)


def test_an_unknown_optimizer_is_named_where_it_is_used():
    model = TorchModel(Game(), optimizer=forms(), device="cpu")
    with pytest.raises(ArgumentError, match=r"there is no optimizer 'juge'; did you mean 'judge'\?"):
        model.update("juge")
    with pytest.raises(ArgumentError, match="name one of the optimizers: maker, judge"):
        model.update(None)
    with pytest.raises(ArgumentError, match="there is no optimizer 'maker'; there are optimizer"):
        TorchModel(Game(), optimizer=form(), device="cpu").backward(torch.ones(()), optimizer="maker")
    with pytest.raises(ArgumentError, match="several optimizers"):
        model.optimizer = torch.optim.SGD(model.module.parameters())


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused, self.frozen = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return {"loss": self.used(x)}


def test_parameters_without_a_gradient_or_an_optimizer_are_named_once(caplog):
    run(TorchModel(Unused(), optimizer=form(), device="cpu"), FACTORS, epochs=2)
    (message,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert message.startswith("in the first update, there is no gradient for unused.weight, unused.bias: nothing")
    caplog.clear()
    run(TorchModel(Unused(), optimizer=form(options={"match": "^used"}), device="cpu"), FACTORS, epochs=2)
    (message,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert message.startswith("no optimizer trains unused.weight, unused.bias; if this is meant")


class Replacing(nn.Module):
    """Has another weight after the seventh forward, which is in the second epoch."""

    def __init__(self):
        super().__init__()
        self.part, self.calls = nn.Linear(2, 1, bias=False), 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 7:
            self.part.weight = nn.Parameter(self.part.weight.detach().clone())
        return {"loss": self.part(x)}


def test_a_parameter_that_is_replaced_in_the_training_is_named_once(caplog):
    run(TorchModel(Replacing(), optimizer=form(), device="cpu"), FACTORS, epochs=4)
    (message,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert message.startswith("no optimizer trains part.weight; if this is meant")


class Frozen(nn.Module):
    def __init__(self, part, keeps=False):
        super().__init__()
        self.body, self.head, self.keeps = nn.Sequential(nn.Linear(2, 2), part), nn.Linear(2, 1), keeps
        self.body.requires_grad_(False).eval()

    def train(self, mode=True):
        super().train(mode)
        self.body.train(mode and not self.keeps)

    def forward(self, x):
        return {"loss": self.head(self.body(x))}


NORM = "body is frozen and was in evaluation mode, but is run in training mode: its BatchNorm changes with each batch"


@pytest.mark.parametrize(
    ("part", "keeps", "hooks", "expected"),
    [
        (nn.BatchNorm1d(2), False, [], [f"{NORM}; `Freeze: {{match: '^body\\.'}}` keeps BatchNorm as it is"]),
        (nn.BatchNorm1d(2), False, ["^body\\."], []),
        (nn.BatchNorm1d(2), True, [], []),
        (nn.BatchNorm1d(2, track_running_stats=False), False, [], []),
        (nn.Dropout(0.1), False, ["^body\\."], [NORM.replace("BatchNorm changes with each batch", "dropout drops")]),
        (nn.Dropout(0.0), False, [], []),
    ],
)
def test_a_frozen_part_whose_evaluation_mode_ends_is_named_once(part, keeps, hooks, expected, caplog):
    model = TorchModel(Frozen(part, keeps), optimizer=form(), device="cpu")
    run(model, FACTORS, *map(Freeze, hooks), epochs=2)
    messages = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert len(messages) == len(expected)
    assert all(map(str.startswith, messages, expected))


class Averaging(torch.optim.SGD):
    """In `eval`, the parameters are averages of all their values."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.values, self.calls = [], []

    def step(self):
        super().step()
        self.values.append(self.param_groups[0]["params"][0].detach().clone())

    def train(self):
        self.calls.append("train")

    def eval(self):
        self.calls.append("eval")
        if self.values:
            with torch.no_grad():
                self.param_groups[0]["params"][0].copy_(torch.stack(self.values).mean(dim=0))


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return {"loss": self.w * x.sum(), "w": self.w.expand(len(x))}


def test_evaluations_use_the_weights_of_the_mode_and_leave_those_of_the_training_as_they_were(tmp_path):
    model = TorchModel(Weight(), optimizer=Factory(Averaging, lr=1.0), device="cpu")
    batch = {"x": [1.0]}
    seen = []
    for _ in range(3):
        model.run(batch, True, "train")
        seen.append(model.run(batch, False, "valid")["w"].item())
        model.save(tmp_path)
        model.run(batch, False, "valid")
    assert seen == [-1.0, -1.5, -2.0]  # the averages of -1, -2, -3
    assert model.optimizer.calls == ["eval", *["train", "eval"] * 3]
    model.run(batch, True, "train")
    assert model.module.w.item() == -4.0
    assert model.stage() is not None
    assert model.module.w.item() == -4.0


def test_a_loaded_model_continues_with_the_weights_of_the_training():
    model, again = (TorchModel(Weight(), optimizer=Factory(Averaging, lr=1.0), device="cpu") for _ in range(2))
    batch = {"x": [1.0]}
    for _ in range(2):
        model.run(batch, True, "train")
    again.run(batch, True, "train")
    again.load_state_dict(model.state_dict())
    again.run(batch, True, "train")
    assert (model.module.w.item(), again.module.w.item()) == (-2.0, -3.0)
