"""A lazy model gets its shapes before anything uses it, from a batch that the training still gets."""

import numpy as np
import pytest
import torch
from torch import nn

from emrun import AbstractHook, MainLoop, TorchModel
from emrun.base.errors import ArgumentError
from emrun.config.config import load_config
from emrun.diagnosis.tryout import try_out
from emrun.hook import TrainingTerminated
from emrun.models.laziness import end_laziness
from emrun.models.weights.saving import collect_weights, load_weights
from emrun.storage.checkpoints.weights import write_weights

BATCHES = [{"x": np.full((2, 3), i, "float32"), "y": np.ones(2, "float32")} for i in range(3)]


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.LazyLinear(1)

    def forward(self, x, y):
        return {"loss": nn.functional.binary_cross_entropy_with_logits(self.linear(x)[:, 0], y)}


class Needs(Lazy):
    def forward(self, x, y, shift):
        return super().forward(x + shift[:, None], y)


class Given(Lazy):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)


class Data:
    def train_stream(self):
        yield from BATCHES


class Looks(AbstractHook):
    def __init__(self):
        super().__init__()
        self.seen = []

    def before_training(self):
        model = self.main_loop.model
        self.seen.append((model.is_lazy, model.optimizer is not None))


class Changes(Looks):
    factor = 2.0

    def before_batch(self, stream_name, batch):
        batch["shift"] = self.factor * batch["y"]


class ChangesLater(Changes):
    factor = None

    def before_training(self):
        super().before_training()
        self.factor = 2.0


class Crops(AbstractHook):
    def before_batch(self, stream_name, batch):
        batch["x"] = batch["x"][:, :2]


class TakesNote(AbstractHook):
    changes_batches = False

    def __init__(self):
        super().__init__()
        self.seen = []

    def before_batch(self, stream_name, batch):
        self.seen.append(float(batch["x"][0, 0]))


class OneEpoch(AbstractHook):
    def after_epoch(self, epoch_id, epoch_data):
        raise TrainingTerminated("one epoch")


def model(module=None):
    return TorchModel(module or Lazy(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), device="cpu")


def run(dataset, hooks, module=None):
    loop = MainLoop(model(module), dataset, [*hooks, OneEpoch()], skip_zeroth_epoch=True, on_unused_sources="ignore")
    loop.run_training()
    return loop


def test_hooks_see_the_shapes_and_the_optimizer_before_training_also_where_one_changes_batches():
    hooks = Looks(), Changes()
    run(Data(), hooks)
    assert [hook.seen for hook in hooks] == [[(False, True)], [(False, True)]]


def test_the_shapes_are_those_of_the_batch_as_hooks_change_it():
    assert run(Data(), [Crops()]).model.module.linear.in_features == 2


def test_a_hook_that_changes_batches_only_after_its_before_training_is_waited_for():
    hooks = Looks(), ChangesLater()
    loop = run(Data(), hooks, Needs())
    assert [hook.seen for hook in hooks] == [[(True, False)], [(True, False)]]
    assert loop.model.module.training
    assert not loop.model.is_lazy


SEEN = []


class Remembers(Looks):
    def before_training(self):
        super().before_training()
        SEEN.extend(self.seen)

    def before_batch(self, stream_name, batch):
        batch["more"] = batch["y"]


def test_check_has_the_same_order():
    SEEN.clear()
    config = {
        "dataset": {"class": f"{__name__}.Data"},
        "model": {"module": {"class": f"{__name__}.Lazy"}, "optimizer": {"class": "SGD", "lr": 0.1}, "device": "cpu"},
        "main_loop": {"on_unused_sources": "ignore"},
        "hooks": [f"{__name__}.Remembers", {"StopAfter": {"epochs": 1}}],
    }
    try_out(load_config(config))
    assert set(SEEN) == {(False, True)}  # before each of the trainings that it tries


class OneIterator:
    def __init__(self):
        self.iterator = iter(BATCHES)

    def train_stream(self):
        return self.iterator


class WithState:
    def __init__(self):
        self.index = 0

    def train_stream(self):
        return self

    def __iter__(self):
        return self

    def __next__(self):
        if self.index == len(BATCHES):
            raise StopIteration
        self.index += 1
        return BATCHES[self.index - 1]

    def state_dict(self):
        return {"index": self.index}

    def load_state_dict(self, state):
        self.index = state["index"]


def test_a_stream_with_a_state_is_trained_from_its_first_batch():
    hook = TakesNote()
    run(WithState(), [hook])
    assert hook.seen == [0, 1, 2]


def test_one_iterator_for_all_passes_is_refused_by_a_lazy_model_only():
    dataset, hook = OneIterator(), TakesNote()
    with pytest.raises(ArgumentError, match="returns the same iterator for each pass"):
        run(dataset, [])
    run(dataset, [hook], Given())
    assert hook.seen == [0, 1, 2]


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (lambda: nn.LazyLinear(2), torch.ones(1, 3)),
        (lambda: nn.LazyConv2d(4, 3, groups=2), torch.ones(1, 6, 5, 5)),
        (lambda: nn.LazyConvTranspose1d(4, 3, groups=2), torch.ones(1, 6, 5)),
        (lambda: nn.LazyBatchNorm1d(), torch.ones(2, 3)),
        (lambda: nn.LazyBatchNorm1d(affine=False), torch.ones(2, 3)),
        (lambda: nn.LazyInstanceNorm1d(affine=True), torch.ones(2, 3, 4)),
    ],
    ids=["linear", "convolution", "transposed", "norm", "norm without weights", "instance norm"],
)
def test_a_lazy_part_that_was_loaded_is_what_a_batch_makes_of_it(tmp_path, make, batch):
    seen, loaded = make(), make()
    seen(batch)
    write_weights(*collect_weights(seen), tmp_path)
    load_weights(loaded, tmp_path)
    end_laziness(loaded)
    assert type(loaded) is type(seen)
    assert repr(loaded) == repr(seen)
    assert not loaded._forward_pre_hooks
    assert vars(loaded).keys() == vars(seen).keys()
    assert torch.equal(loaded.eval()(batch), seen.eval()(batch))


def test_a_part_that_is_lazy_in_its_own_way_stays_so_until_its_first_batch(tmp_path):
    class Own(nn.LazyLinear):
        cls_to_become = None

        def initialize_parameters(self, input):
            super().initialize_parameters(input)
            self.seen = True

    module = Own(2)
    write_weights(*collect_weights(nn.Linear(3, 2)), tmp_path)
    load_weights(module, tmp_path)
    end_laziness(module)
    module(torch.ones(1, 3))
    assert module.seen
