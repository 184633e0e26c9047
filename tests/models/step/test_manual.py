"""What the first window of a `train_step` of one's own is checked for."""

import json
from pathlib import Path

import pytest
import torch
from doubles import SGD, XY, Affine, run, vectors
from torch import nn

from emrun import Factory, TorchModel, create_training, read_steps
from emrun.base.errors import ArgumentError
from emrun.training.create import train

BATCHES = [*XY, *XY]


class Own(TorchModel):
    """Makes an update by the words of `does`: backward, update, step (of the optimizer itself), every (fourth call)."""

    does = ()
    calls = 0

    def train_step(self, inputs):
        outputs = self.forward(inputs)
        self.calls += 1
        if "backward" in self.does:
            self.backward(outputs["loss"].mean())
        if "every" not in self.does or self.calls % 4 == 0:
            if "update" in self.does:
                self.update(self.optimizer)
            if "step" in self.does:
                self.optimizer.step()
        return None if "nothing" in self.does else [1.0] if "list" in self.does else outputs


def trained(*does, **arguments):
    model = Own(Affine(), optimizer=SGD, **arguments)
    model.does = does
    run(model, BATCHES)
    assert "train_step" not in vars(model)
    return model


@pytest.mark.parametrize(
    ("does", "arguments", "message"),
    [
        (["backward"], {}, "Own.train_step has made no update in its first batch; call self.update"),
        (["update"], {}, "Own.train_step has made updates without gradients in its first batch; call self.update"),
        (["update"], {"accumulate": 3}, "has made updates without gradients in its first 3 batches"),
        (["backward"], {"accumulate": 3}, "no update in its first 3 batches"),
        (
            ["backward", "step"],
            {},
            "no update in its first batch; call self.update",
        ),
        (["backward", "update", "every"], {}, "or set model.accumulate to the number of batches of an update"),
        (["backward", "update", "nothing"], {}, "Own.train_step returned nothing; end it with `return outputs`"),
        (["backward", "update", "list"], {}, "Own.train_step returned a list; end it"),
    ],
)
def test_a_step_that_trains_nothing_or_returns_nothing_is_refused(does, arguments, message):
    with pytest.raises(ArgumentError, match=message):
        trained(*does, **arguments)


@pytest.mark.parametrize(
    ("does", "arguments"),
    [(["backward", "update"], {}), (["backward", "update"], {"accumulate": 4})],
)
def test_a_step_that_updates_is_watched_in_its_first_window_only(does, arguments, caplog):
    assert trained(*does, **arguments).calls == len(BATCHES)
    assert caplog.text == ""


class ByHand(TorchModel):
    """Changes its weights without any optimizer."""

    def train_step(self, inputs):
        with torch.no_grad():
            self.module.w.mul_(0.5)
        return self.forward(inputs)


def test_a_model_without_any_optimizer_is_left_alone():
    model = ByHand(Affine(2.0))
    assert model.has_updated is None
    run(model, BATCHES)
    assert model.module.w.item() == 2.0 * 0.5 ** len(BATCHES)
    assert "train_step" not in vars(model)
    assert model.has_updated is None


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Linear(3, 1)
        self.judge = nn.Linear(1, 1)

    def forward(self, x):
        return {"fake": self.generator(x)}


class Adversarial(TorchModel):
    """Trains a judge and a generator; `is_named` says whether the first backward names its optimizer."""

    is_named = False
    detaches = False

    def train_step(self, inputs):
        outputs = self.forward(inputs)
        fake = outputs["fake"].detach() if self.detaches else outputs["fake"]
        self.backward(self.module.judge(fake).mean(), **({"optimizer": "judge"} if self.is_named else {}))
        self.update("judge")
        self.backward(-self.module.judge(self.module.generator(inputs["x"])).mean())
        self.update("generator")
        return outputs


@pytest.mark.parametrize(("is_named", "detaches"), [(False, False), (True, False), (False, True)])
def test_gradients_from_both_sides_of_another_update_are_told_once(is_named, detaches, caplog):
    names = ("judge", "generator")
    optimizers = {name: Factory(torch.optim.SGD, lr=0.1, options={"match": name}) for name in names}
    model = Adversarial(Gan(), optimizer=optimizers)
    model.is_named, model.detaches = is_named, detaches
    run(model, vectors())
    told = "the optimizer generator uses gradients from before and after the update of another optimizer"
    assert caplog.text.count(told) == (not is_named and not detaches)
    assert "no update of" not in caplog.text


class OneOfTwo(TorchModel):
    """Never updates its generator."""

    def train_step(self, inputs):
        outputs = self.forward(inputs)
        self.backward(self.module.judge(outputs["fake"]).mean())
        self.update("judge")
        return outputs


def test_an_optimizer_of_two_that_is_never_updated_is_told_once(caplog):
    optimizers = {name: Factory(torch.optim.SGD, lr=0.1, options={"match": name}) for name in ("judge", "generator")}
    run(OneOfTwo(Gan(), optimizer=optimizers), vectors(), epochs=3)
    told = "no update of the optimizer 'generator' in this epoch; if this is a mistake, call self.update('generator')"
    assert caplog.text.count(told) == 1


def test_the_losses_of_optimizers_with_names_are_columns_of_the_steps_and_of_rows_between_epochs(tmp_path, monkeypatch):
    sample = Path(__file__).parents[3] / "sample_configs" / "gan"
    monkeypatch.syspath_prepend(sample)
    changes = [
        "hooks.StopAfter={iterations: 4}",
        "hooks.WriteCSV={every: 2 updates}",
        "main_loop.skip_zeroth_epoch=true",
    ]
    training = create_training(sample / "config.yaml", output_dir=tmp_path / "run", overrides=changes)
    train(training)
    steps = read_steps(tmp_path / "run")
    assert steps["loss"].tolist() == steps["loss_generator"].tolist()  # that of the last backward
    assert (steps["loss_discriminator"] != steps["loss_generator"]).all()
    (line, *_) = [json.loads(each) for each in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    assert line["means"]["loss_discriminator"] == pytest.approx(steps["loss_discriminator"][:2].mean())
