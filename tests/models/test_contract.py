"""What a subclass of `TorchModel` may override, read and set: one test for each line of the contract."""

import copy
import itertools

import pytest
import torch
from campaign import thinned
from doubles import SGD, XY, Affine, run
from torch import nn

from emrun import AbstractHook, TorchModel
from emrun.base.errors import ArgumentError, StreamError

BATCHES = [*XY, *XY]


def trained(kind, *hooks, **arguments):
    """Train a model of a class; return the model and its weight after the training."""
    torch.manual_seed(0)
    model = kind(Affine(), optimizer=SGD, device="cpu", **arguments)
    run(model, BATCHES, *hooks)
    return model, model.module.w.item()


class ByHand(TorchModel):
    """Overrides train_step with what it does by default."""

    def train_step(self, inputs):
        outputs = self.forward(inputs)
        self.backward(outputs["loss"].mean())
        self.update(self.optimizer)
        return outputs


class BySuper(TorchModel):
    """Calls every method of the base class, once for a batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []

    def run(self, batch, train, stream):
        self.calls.append("run")
        return super().run(batch, train, stream)

    def train_step(self, inputs):
        self.calls.append("train_step")
        return super().train_step(inputs)

    def forward(self, inputs):
        self.calls.append("forward")
        return super().forward(inputs)

    def backward(self, loss, optimizer=None):
        self.calls.append("backward")
        super().backward(loss, optimizer)

    def update(self, optimizer, closure=None):
        self.calls.append("update")
        super().update(optimizer, closure)


FORMS = [{}, {"accumulate": 2}, {"micro_batch_size": 1}, {"precision": "bf16"}, {"precision": "fp16", "accumulate": 2}]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_train_step_of_ones_own_makes_the_same_updates(form):
    assert trained(ByHand, **form)[1] == pytest.approx(trained(TorchModel, **form)[1], rel=1e-2)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_methods_that_call_those_of_the_base_class_change_nothing(form):
    model, weight = trained(BySuper, **form)
    assert weight == trained(TorchModel, **form)[1]
    parts = 2 if form.get("micro_batch_size") else 1
    step = ["train_step", "forward", "backward", "update"] * parts
    assert model.calls == ["run", *step] * len(BATCHES)


@pytest.mark.parametrize("name", ["forward", "backward", "update"])
def test_a_single_method_may_be_overridden(name):
    calls = []

    def method(self, *args, **kwargs):
        calls.append(name)
        return getattr(TorchModel, name)(self, *args, **kwargs)

    kind = type("Own", (TorchModel,), {name: method})
    assert trained(kind)[1] == trained(TorchModel)[1]
    assert calls == [name] * len(BATCHES)


def test_a_forward_of_ones_own_is_evaluated_and_its_averages_too():
    class Doubled(TorchModel):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            return {**outputs, "twice": 2 * outputs["predicted"]}

    model, _ = trained(Doubled)
    model.evaluation_weights = {"w": torch.tensor(10.0)}
    outputs = model.run(XY[0], False, "valid")
    assert torch.equal(outputs["twice"], 2 * outputs["predicted"])
    assert outputs["predicted"][0].item() == pytest.approx(10 + model.module.b.item())
    assert list(model.evaluation_weights) == ["w"]


def test_arguments_of_ones_own_and_an_optimizer_of_ones_own():
    class Own(TorchModel):
        def __init__(self, module, *args, rate, **kwargs):
            super().__init__(module, *args, **kwargs)
            self.optimizer = torch.optim.SGD(self.module.parameters(), rate)

    model = Own(Affine(), device="cpu", rate=0.1)
    run(model, BATCHES)
    assert model.module.w.item() == trained(TorchModel)[1]
    assert list(model.optimizers) == ["optimizer"]
    assert list(model.own_optimizers) == ["optimizer"]


class Early(TorchModel):
    """Sets attributes before and after those of the base class."""

    def __init__(self, module, device="cpu", **kwargs):
        self.module = module
        self.device = device
        super().__init__(self.module, device=self.device, **kwargs)
        self.device = torch.device(device)


def test_module_and_device_may_be_set_in_a_constructor():
    model, weight = trained(Early)
    assert weight == trained(TorchModel)[1]
    assert "module" not in vars(model)


def test_a_train_step_that_is_set_on_an_object_replaces_the_method():
    class Counts(TorchModel):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.calls = 0
            self.train_step = self.counted

        def counted(self, inputs):
            self.calls += 1
            return super().train_step(inputs)

    model, weight = trained(Counts)
    assert (model.calls, weight) == (len(BATCHES), trained(TorchModel)[1])


def test_an_optimizer_that_is_removed_in_the_training_is_missed():
    class Remove(AbstractHook):
        def after_update(self, model):
            model.optimizer = None

    with pytest.raises(ArgumentError, match="training needs an optimizer"):
        trained(TorchModel, Remove())


def test_step_outputs_that_a_train_step_sets_are_what_hooks_get():
    class Shows(ByHand):
        def train_step(self, inputs):
            self.step_outputs = {"mine": torch.ones(2)}
            return super().train_step(inputs)

    class Look(AbstractHook):
        seen = ()

        def before_update(self, model):
            self.seen = [*self.seen, *model.step_outputs]

    look = Look()
    trained(Shows, look)
    assert look.seen == ["mine"] * len(BATCHES)


def test_is_skipping_is_read_before_an_update():
    class Look(AbstractHook):
        seen = ()

        def before_update(self, model):
            self.seen = [*self.seen, model.is_skipping]

    look = Look()
    trained(TorchModel, look, precision="fp16")
    assert look.seen == [False] * len(BATCHES)


@pytest.mark.parametrize("calls_super", [True, False])
def test_events_with_and_without_super(calls_super):
    class Listens(TorchModel):
        events = ()

        def before_training(self):
            self.events = [*self.events, "before_training"]
            if calls_super:
                super().before_training()

        def after_epoch(self, epoch_id, epoch_data):
            self.events = [*self.events, "after_epoch"]
            if calls_super:
                super().after_epoch(epoch_id, epoch_data)

    model, weight = trained(Listens)
    assert model.events == ["before_training", "after_epoch"]
    assert weight == trained(TorchModel)[1]


KINDS = [TorchModel, ByHand, BySuper]
FORMS = [{}, {"accumulate": 2}, {"micro_batch_size": 1}]


@pytest.mark.parametrize(
    ("kind", "form"), thinned(itertools.product(KINDS, FORMS), list(zip(KINDS, FORMS, strict=True))), ids=str
)
def test_a_deep_copy_trains_by_itself(kind, form):
    model, weight = trained(kind, **form)
    copied = copy.deepcopy(model)
    run(copied, BATCHES)
    assert model.module.w.item() == weight
    assert copied.module.w.item() != weight
    run(model, BATCHES)
    assert model.module.w.item() == copied.module.w.item()


def test_save_load_and_state_dict_of_ones_own(tmp_path):
    class Keeps(TorchModel):
        best = 0.0

        def save(self, directory):
            super().save(directory)
            (directory / "own.txt").write_text("own")

        def load(self, directory):
            super().load(directory)
            self.best = float(len((directory / "own.txt").read_text()))

        def state_dict(self):
            return {**super().state_dict(), "best": 2.0}

    model, weight = trained(Keeps)
    assert model.stage() is None
    model.save(tmp_path)
    other = Keeps(Affine(), optimizer=SGD, device="cpu")
    other.load(tmp_path)
    assert (other.module.w.item(), other.best) == (weight, 3.0)
    assert model.state_dict()["best"] == 2.0


def test_the_first_window_of_a_train_step_is_watched():
    class Forgets(TorchModel):
        def train_step(self, inputs):
            return self.forward(inputs)

    with pytest.raises(ArgumentError, match=r"Forgets.train_step has made no update in its first batch"):
        trained(Forgets)


@pytest.mark.parametrize("asks", [False, True])
def test_the_first_window_is_watched_with_an_update_of_ones_own_too(asks):
    class Own(TorchModel):
        def train_step(self, inputs):
            if asks:
                self.update(self.optimizer)
            return self.forward(inputs)

        def update(self, optimizer, closure=None):
            optimizer.step()

    with pytest.raises(ArgumentError, match=r"Own.train_step has made no update in its first batch"):
        trained(Own)


def test_an_update_is_forgotten_before_a_batch_that_fails_early():
    model, _ = trained(TorchModel, micro_batch_size=1)
    assert model.has_updated
    with pytest.raises(StreamError):
        model.run({**XY[0], "y": XY[0]["y"][:1]}, True, "train")
    assert not model.has_updated


def test_parts_of_batches_run_a_module_that_is_replaced():
    model, _ = trained(TorchModel, micro_batch_size="auto")
    other = Affine()
    model.module = other
    assert model._micro_batches._forward_pass.module is other


def test_a_module_that_is_replaced_runs_from_then_on():
    model, _ = trained(TorchModel)
    model.module = nn.Module()
    assert isinstance(model.module, nn.Module)
    assert not isinstance(model.module, Affine)


FACE = 25
PART = 20
DECLARED = {"iterations_per_update", "load_initial", "least_rows", "write_setting"}  # of `AbstractModel`


@pytest.mark.parametrize("form", [*FORMS, {"optimizer": {"one": SGD}}], ids=str)
def test_no_object_stores_more_attributes_than_a_reader_keeps_in_mind(form):
    given = {"optimizer": SGD, **form}
    if isinstance(given["optimizer"], dict):
        one = copy.copy(SGD)
        one.options = {"match": "w"}
        given["optimizer"] = {"one": one}
    model = TorchModel(Affine(), device="cpu", **given)
    run(model, BATCHES)
    seen = set()
    counts = {}

    def look(value):
        if id(value) in seen or not type(value).__module__.startswith("emrun.models"):
            return
        seen.add(id(value))
        attributes = getattr(value, "__dict__", {})
        counts[type(value).__name__] = len(attributes.keys() - DECLARED)
        for each in attributes.values():
            look(each)
            for part in each.values() if isinstance(each, dict) else each if isinstance(each, list | tuple) else ():
                look(part)

    look(model)
    assert counts.pop("TorchModel") <= FACE
    assert max(counts.values()) <= PART, counts
    assert len(counts) > 10
