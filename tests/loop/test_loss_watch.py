"""A loss that is not finite ends the training, however its update is made."""

from functools import partial

import numpy as np
import pytest
import torch

from emrun import AbstractHook, MainLoop, TorchModel, TrainingAborted
from emrun.hooks import SaveEvery, SkipSpike, StopAfter
from emrun.storage.run import Run


class Data:
    def train_stream(self):
        for _ in range(8):
            yield {"x": np.ones((4, 1), np.float32)}


class Module(torch.nn.Module):
    """The loss of some calls, counted from 1, is not finite, and so are its gradients."""

    def __init__(self, bad, value="nan", weights=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.bad, self.value, self.weights, self.count = bad, float(value), weights, 0

    def forward(self, x):
        self.count += 1
        losses = self.weight * x[:, 0]
        outputs = {"loss": losses * self.value if self.count in self.bad else losses}
        if self.weights is not None:
            outputs["example_weight"] = torch.full((len(x),), 0.0 if self.count in self.bad else 1.0)
            outputs["loss"] = losses  # the mean of which is 0 / 0
        return outputs


class Own(TorchModel):
    def train_step(self, inputs):
        outputs = self.forward(inputs)
        self.backward(outputs["loss"].mean())
        self.update("optimizer")
        return outputs


class WithoutUpdate(TorchModel):
    optimizer_of_its_own = None

    def train_step(self, inputs):
        outputs = self.forward(inputs)
        outputs["loss"].mean().backward()
        with torch.no_grad():
            self.module.weight -= 0.1 * self.module.weight.grad
        return {**outputs, "loss": outputs["loss"].mean()}


SGD = partial(torch.optim.SGD, lr=0.1)
FINITE_FIRST = {3, 4, 5, 6, 7, 8}


def trained(module, run=None, hooks=(), kind=TorchModel, policy="error", **options):
    model = kind(module, optimizer=options.pop("optimizer", SGD), device="cpu", **options)
    loop = MainLoop(model, Data(), [*hooks, StopAfter(epochs=1)], run=run, skip_zeroth_epoch=True, on_nan_loss=policy)
    loop.run_training()
    return loop


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("kind", [TorchModel, Own])
def test_no_update_is_made_with_a_loss_that_is_not_finite(kind, value):
    module = Module({3}, value)
    with pytest.raises(TrainingAborted, match=r"the loss is (NaN|infinite) at iteration 3 \(main_loop.on_nan_loss\)"):
        trained(module, kind=kind)
    assert module.weight.item() == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("bad", "options"),
    [
        ({3}, {"accumulate": 2}),
        ({4}, {"accumulate": 2}),
        ({5}, {"micro_batch_size": 2}),
        ({6}, {"micro_batch_size": 2}),
    ],
)
def test_a_loss_of_a_window_ends_the_training_before_a_checkpoint_has_its_weights(tmp_path, bad, options):
    run = Run(tmp_path)
    with pytest.raises(TrainingAborted, match=r"main_loop\.on_nan_loss"):
        trained(Module(bad), run, [SaveEvery(every="1 updates", keep=1, model_name="kept")], **options)
    manifests = list(tmp_path.glob("checkpoints/it-*/model.safetensors"))
    assert manifests
    from safetensors.torch import load_file

    assert all(torch.isfinite(load_file(path)["weight"]) for path in manifests)


class Watches(AbstractHook):
    def before_update(self, model, optimizer):
        self.count = getattr(self, "count", 0) + 1


@pytest.mark.parametrize("kind", [TorchModel, Own])
@pytest.mark.parametrize("hooks", [(), (Watches,)], ids=["plain", "a hook listens"])
@pytest.mark.parametrize(
    ("bad", "options", "iteration"),
    [
        ({1}, {"accumulate": 4}, 1),
        ({2}, {"accumulate": 4}, 2),
        ({6}, {"accumulate": 4}, 6),
        ({7}, {"accumulate": 3}, 7),
        ({5}, {"micro_batch_size": 2}, 3),
        ({6}, {"micro_batch_size": 2}, 3),
        ({7}, {"micro_batch_size": 2, "accumulate": 4}, 4),
    ],
)
def test_the_batch_of_a_window_whose_loss_is_not_finite_ends_the_training_at_once(kind, hooks, bad, options, iteration):
    with pytest.raises(TrainingAborted, match=rf"NaN at iteration {iteration} .*, so no update is made with it"):
        trained(Module(bad), hooks=[each() for each in hooks], kind=kind, **options)


def test_a_skipped_update_of_a_window_drops_all_its_batches_and_no_more():
    module, plain = Module({2}), Module(set())
    loop = trained(module, hooks=[SkipSpike(window=1)], accumulate=4)
    assert (loop.updates_done, loop.model.skipped_updates) == (2, 1)
    trained(plain, accumulate=8)
    assert module.weight.item() == plain.weight.item()  # both have made one update, of equal batches


def test_a_batch_of_a_window_whose_examples_all_have_the_weight_0_adds_nothing():
    module, plain = Module({2}, weights=True), Module(set(), weights=True)
    trained(module, accumulate=4)
    trained(plain, accumulate=4)
    assert module.weight.item() == plain.weight.item()


@pytest.mark.parametrize("where", ["loss.a", "loss.b"])
def test_one_of_several_losses_ends_the_training(where):
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, x):
            value = (self.weight * x[:, 0]).mean()
            return {name: value * (float("nan") if f"loss.{name}" == where else 1) for name in ("a", "b")}

    losses = {f"of_{name}": partial(_passed, name) for name in ("a", "b")}
    for name, each in losses.items():
        each.options = {"inputs": [name[3:]]}
    with pytest.raises(TrainingAborted, match="NaN at iteration 1"):
        trained(Two(), loss=losses)


def _passed(name):
    return lambda value: value


def test_a_step_without_an_optimizer_is_looked_at_at_the_end_of_the_epoch():
    with pytest.raises(TrainingAborted, match=r"NaN at iteration 8 .*, and its update is made"):
        trained(Module(FINITE_FIRST), kind=WithoutUpdate, optimizer=None)


def test_a_batch_whose_examples_all_have_the_weight_0_has_no_loss():
    loop = trained(Module({3}, "nan", weights=True))
    assert loop.outcome.status == "finished"


def test_skipped_updates_do_not_count_also_that_of_the_last_batch():
    module = Module({3, 8})
    loop = trained(module, hooks=[SkipSpike(window=1)])
    assert loop.outcome.status == "finished"
    assert torch.isfinite(module.weight)


@pytest.mark.parametrize(("policy", "warns"), [("warn", True), ("ignore", False)])
def test_another_policy_trains_on(caplog, policy, warns):
    loop = trained(Module({3}), policy=policy)
    assert (loop.outcome.status, loop.iterations_done) == ("finished", 8)
    assert ("the loss of the last training batch is NaN" in caplog.text) is warns
    assert (loop.outcome.warning is not None) is warns


def test_a_loss_of_an_evaluation_does_not_end_the_training():
    class Evaluated(Module):
        def forward(self, x):
            outputs = super().forward(x)
            return outputs if self.training else {"loss": outputs["loss"] * float("nan")}

    model = TorchModel(Evaluated(set()), optimizer=SGD, device="cpu")
    loop = MainLoop(model, Data(), [StopAfter(epochs=1)], extra_streams=["train"])
    loop.run_training()
    assert loop.outcome.status == "finished"
