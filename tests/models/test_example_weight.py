"""Examples of weight 0 do not count, neither in an update nor in a statistic: alone, in parts, and on several ranks."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from campaign import thinned
from doubles import SGD, Streams, run
from in_ranks import all_in_ranks
from torch import nn
from windows import Net, batches, weights

from emrun import AbstractHook, Factory, MainLoop, TorchModel
from emrun.base.errors import StreamError
from emrun.hooks import ComputeStats, Diagnose, SkipSpike, StopAfter, StopOnNaN
from emrun.ranks.group import join
from emrun.ranks.parts import weighs_nothing, weighted

NAN = float("nan")


def test_what_has_no_weight_is_0_and_has_no_gradient():
    values = torch.tensor([2.0, NAN, math.inf], requires_grad=True)
    for weight in (torch.tensor([3.0, 0.0, 0.0]), torch.tensor([3, 0, 0]), torch.tensor([True, False, False])):
        found = weighted(values, weight)
        assert found.tolist() == [2.0 * weight[0], 0.0, 0.0]
        found.sum().backward()
        assert values.grad.tolist() == [weight[0], 0.0, 0.0]
        values.grad = None
    assert weighted(NAN, 0.0) == 0.0
    assert math.isnan(weighted(NAN, 2.0))


def test_a_batch_weighs_nothing_if_all_its_weights_are_0():
    for found in (torch.zeros(2), np.zeros(2)):
        assert weighs_nothing({"example_weight": found})
        assert not weighs_nothing({"example_weight": found + 1})
        assert not weighs_nothing({"example_weight": found * NAN})
    assert not weighs_nothing({"loss": torch.zeros(2)})


class Named(nn.Module):
    """Returns logits, and the number of labels as the weight."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def forward(self, x, label):
        return {"logits": self.layer(x), "example_weight": (label != -100).float()}


CROSS_ENTROPY = Factory(nn.CrossEntropyLoss, options={"inputs": ["logits", "label"]})
EXAMPLES = Factory(nn.CrossEntropyLoss, reduction="none", options={"inputs": ["logits", "label"]})
SEVERAL = {"one": EXAMPLES, "two": Factory(nn.CrossEntropyLoss, options={"inputs": ["logits", "label"], "scale": 0.5})}
LOSSES = {"examples": None, "scalar": CROSS_ENTROPY, "several": SEVERAL}


def module_of(kind):
    torch.manual_seed(1)
    return Net("tokens") if kind == "examples" else Named()


def found(*has_weight, size=4):
    """Return batches, some of whose examples have no weight and no label."""
    made = batches([size] * len(has_weight))
    for each, has in zip(made, has_weight, strict=True):
        each["label"] = np.arange(size)
        each["tokens"] = np.where(has, each["tokens"], 0).astype(np.float32)
        each["label"] = np.where(has, each["label"], -100)
    return made


class See(AbstractHook):
    """Keeps the losses of the batches, and the statistics."""

    def __init__(self):
        super().__init__()
        self.losses, self.statistics, self.scalars = [], {}, {}

    def after_batch(self):
        self.losses.append(float(self.main_loop.model.step_values().get("loss", NAN)))

    def after_epoch(self, epoch_data):
        self.statistics = {name: values["loss"] for name, values in epoch_data.items()}
        self.scalars = {name: values.get("scalar") for name, values in epoch_data.items()}


STATISTICS = {"loss": ["mean", "std"]}


def trained(kind, made, *hooks, **arguments):
    """Train; return the final weights, the loss of each batch, and the statistics."""
    module, see = module_of(kind), See()
    model = TorchModel(module, loss=LOSSES[kind], optimizer=SGD, device="cpu", **arguments)
    run(model, made, *hooks, ComputeStats(STATISTICS), see)
    return weights(module), see.losses, see.statistics.get("train")  # of rank 0


def same(one, other):
    return one == pytest.approx(other, abs=1e-6, nan_ok=True)


STEPS = [{}, {"accumulate": 2}, {"micro_batch_size": 2}, {"precision": "bf16"}, {"precision": "fp16", "accumulate": 2}]


@pytest.mark.parametrize(
    ("kind", "arguments"),
    thinned(itertools.product(LOSSES, STEPS), [*zip(LOSSES, STEPS[::2], strict=False), (next(iter(LOSSES)), STEPS[1])]),
    ids=str,
)
def test_a_batch_without_weight_changes_nothing_and_has_no_loss(kind, arguments, caplog):
    caplog.set_level("INFO")
    hooks = StopOnNaN(after_batch=True), SkipSpike(window=1, factor=1e9, keep=0)
    made = found(False, False, True, True, False, False)
    ours, losses, statistics = trained(kind, made, *hooks, **arguments)
    theirs, expected, alone = trained(kind, made[2:4], **arguments)
    trained(kind, made, StopAfter(iterations=2), **arguments)  # which ends it after such a batch
    assert same(ours, theirs)
    assert same(losses, [NAN, NAN, *expected, NAN, NAN])
    assert same(statistics, alone)
    assert "NaN" not in caplog.text
    assert "SkipSpike" not in caplog.text


@pytest.mark.parametrize("kind", ["examples", "several"])
def test_a_part_or_a_batch_of_a_window_without_weight_changes_nothing(kind):
    without, half = found(False, True), found([False, False, True, True])
    theirs, (loss,), statistics = trained(kind, without[1:])
    ours, losses, found_in = trained(kind, without, accumulate=2)
    assert same(ours, theirs)
    assert same(losses, [NAN, loss])
    assert same(found_in, statistics)
    rows = [{name: values[2:] for name, values in half[0].items()}]
    for one, other in zip(trained(kind, half, micro_batch_size=2), trained(kind, rows), strict=True):
        assert same(one, other)


class Whole(AbstractHook):
    """Keeps the losses that a hook of rank 0 sees."""

    whole_batches = True

    def __init__(self):
        super().__init__()
        self.seen = []

    def after_batch(self, batch_data):
        self.seen.append(batch_data["loss"].item())


def two_trainings():
    """Return what a rank trains whose rows have no weight in one batch, and that of all ranks in another."""
    join()
    made, whole = found([True, True, False, False], False), Whole()
    return (
        trained("examples", made, accumulate=2),
        trained("several", made, whole),
        trained("scalar", made, micro_batch_size=1),
        whole.seen,
    )


@pytest.fixture(scope="module")
def of_two():
    """Return what two ranks train without the weights of some rows, and with a loss that is weighted."""
    return all_in_ranks(2, {"without": two_trainings, "weighted": with_loss_weight})


def test_a_rank_or_all_ranks_without_weight(of_two):
    made = found([True, True, False, False], False)
    (examples, several, scalar, seen), (others, *_) = of_two["without"]
    rows = [{name: values[:2] for name, values in made[0].items()}]
    assert torch.equal(examples[0], others[0])
    for kind, ours in (("examples", examples), ("several", several), ("scalar", scalar)):
        theirs, (loss,), statistics = trained(kind, rows)
        assert same(ours[0], theirs)
        assert same(ours[1], [loss, NAN])
        assert same(ours[2], statistics)
        assert kind != "several" or same(seen, [loss, NAN])


@pytest.mark.parametrize("kind", LOSSES)
def test_the_statistics_of_an_evaluation_leave_out_batches_without_weight(kind):
    names = ["mean", "std", "sum", "min", "max", "nancount", "median"]

    def evaluated(made):
        model, see = TorchModel(copy.deepcopy(module), loss=LOSSES[kind], device="cpu"), See()
        loop = MainLoop(model, Streams(valid=made), [ComputeStats({"loss": names}), see], on_unused_sources="ignore")
        loop.run_evaluation("valid")
        return see.statistics["valid"]

    module, made = module_of(kind), found(True, False, True)
    ours, theirs = evaluated(made), evaluated(made[::2])
    assert same({name: ours[name] for name in ("mean", "std")}, {name: theirs[name] for name in ("mean", "std")})
    if kind != "examples":  # of which each has a loss
        assert same(ours, theirs)
    assert all(math.isnan(evaluated(made[1:2])[name]) for name in ("mean", "std"))


def test_hooks_do_not_take_a_missing_loss_for_a_fault(caplog):
    caplog.set_level("INFO")
    hooks = SkipSpike(variable="loss", keep=0), Diagnose(every="1 updates")
    trained("several", found(True, False, False, False, False), *hooks)
    assert "SkipSpike" not in caplog.text
    assert "no gradient" not in caplog.text


def by_loss_weight(kind, made, **arguments):
    """Train on weights that are outputs of the module; return the final weights, the losses and the statistics."""
    torch.manual_seed(1)
    module, see = Net(kind), See()
    model = TorchModel(module, optimizer=SGD, device="cpu", **arguments)
    run(model, made, ComputeStats({"loss": "mean", **({"scalar": "mean"} if kind == "loss_weight" else {})}), see)
    return weights(module), see.losses, see.statistics.get("train"), see.scalars.get("train")


def with_loss_weight():
    join()
    return by_loss_weight("loss_weight", batches([4, 3, 5, 4]), accumulate=2)


@pytest.mark.parametrize("arguments", [{}, {"accumulate": 2}, {"micro_batch_size": 2}], ids=str)
def test_loss_weight_weights_what_is_minimised_and_no_statistic(of_two, arguments):
    made = batches([4, 3, 5, 4])
    theirs, expected, weighted_mean, _ = by_loss_weight("tokens", made, **arguments)
    ours, losses, mean, scalar = by_loss_weight("loss_weight", made, **arguments)
    assert same(ours, theirs)
    assert same(losses, expected)
    assert not same(mean, weighted_mean)
    assert same(mean, scalar)  # the mean over the examples alike
    if arguments == {"accumulate": 2}:
        first, second = of_two["weighted"]
        assert torch.equal(first[0], second[0])
        assert all(map(same, first, (theirs, expected, mean, scalar)))


def test_loss_weight_goes_before_example_weight_and_needs_a_number_per_example():
    class Both(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.layer, self.count = nn.Linear(3, 1), count

        def forward(self, x):
            loss = self.layer(x)[:, 0] ** 2
            return {"loss": loss, "loss_weight": torch.eye(4)[0][: self.count], "example_weight": torch.ones(4)}

    made = [{"x": np.ones((4, 3), np.float32) * np.arange(1, 5)[:, None].astype(np.float32)}]
    see, model = See(), TorchModel(Both(4), optimizer=SGD, device="cpu")
    first = model.module(torch.ones(1, 3))["loss"].item()
    run(model, made, ComputeStats({"loss": "mean"}), see)
    assert same(see.losses, [first])
    with pytest.raises(StreamError, match=r"'loss_weight' or 'example_weight' has shape \(3,\), not \(4,\)"):
        run(TorchModel(Both(3), optimizer=SGD, device="cpu"), made)


@pytest.mark.parametrize("accumulate", [2, 4])
@pytest.mark.parametrize("kind", ["examples", "scalar"])
def test_a_window_that_the_epoch_ends_may_end_with_a_batch_without_weights(kind, accumulate):
    module = module_of(kind)
    before = weights(module)
    model = TorchModel(module, loss=LOSSES[kind], optimizer=SGD, accumulate=accumulate, device="cpu")
    run(model, found([1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]))
    assert not torch.equal(weights(module), before)
    assert model.has_updated
