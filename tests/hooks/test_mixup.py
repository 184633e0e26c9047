"""Mixup and CutMix mix copies of the train batches, by numbers that depend on the seed and the iteration alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from emrun.base.errors import ArgumentError, ConfigError, HookError, StreamError
from emrun.hooks import Mixup
from emrun.training.create import create_training

IMAGES = torch.arange(4 * 3 * 6 * 6, dtype=torch.float32).reshape(4, 3, 6, 6)
LABELS = np.array([0, 1, 2, 1])


MODEL = SimpleNamespace(input_names=["image", "target"], optional_input_names=[])


def mixed(images=IMAGES, labels=LABELS, *, seed=1, iteration=5, training=True, **options):
    hook = Mixup(**{"classes": 3, **options})
    hook.register_mainloop(SimpleNamespace(model=MODEL, training=training, seed=seed, iterations_done=iteration))
    batch = {"image": images, "label": labels}
    hook.before_batch("train", batch)
    return batch


@pytest.mark.parametrize("make", [torch.clone, lambda images: images.numpy().copy()])
@pytest.mark.parametrize("options", [{"alpha": 1.0}, {"cutmix_alpha": 1.0}, {"alpha": 1.0, "cutmix_alpha": 1.0}])
def test_images_and_targets_are_mixed_alike_and_those_of_the_stream_stay(options, make):
    images = make(IMAGES)
    for iteration in range(8):
        batch = mixed(images, iteration=iteration, **options)
        assert (torch.as_tensor(images) == IMAGES).all()
        assert batch["target"].sum(1).numpy() == pytest.approx(1)
        assert all(row[label] >= 0.4999 for row, label in zip(batch["target"], LABELS, strict=True))
        assert batch["image"].shape == IMAGES.shape
        assert batch["image"].dtype == torch.float32
        assert (batch["label"] == LABELS).all()


def test_mixup_takes_weighted_sums_of_images_and_targets_by_the_same_pairs():
    batch = mixed(torch.eye(4).reshape(4, 1, 2, 2), np.arange(4), alpha=1.0, classes=4)
    assert torch.allclose(batch["image"].reshape(4, 4), batch["target"])  # each image is the target of its class
    assert (batch["image"] % 1 > 0).sum() > 0


def test_cutmix_replaces_a_rectangle_whose_share_the_targets_have():
    ones = torch.stack([torch.full((1, 8, 8), float(number)) for number in range(4)])
    shares = set()
    for iteration in range(20):
        batch = mixed(ones, np.arange(4), cutmix_alpha=1.0, classes=4, iteration=iteration)
        found = torch.stack([(batch["image"] == number).float().mean((1, 2, 3)) for number in range(4)], 1)
        assert torch.allclose(found, batch["target"])  # the share of the pixels of each image
        shares |= set(found.max(1).values.tolist())
    assert len(shares) > 5


def test_bytes_stay_bytes():
    images = IMAGES.to(torch.uint8)
    batch = mixed(images, alpha=1.0)
    assert batch["image"].dtype == torch.uint8
    exact = mixed(images.float(), alpha=1.0)["image"]
    assert (batch["image"].float() - exact).abs().max() <= 0.5


def test_the_numbers_are_a_function_of_seed_and_iteration():
    options = {"alpha": 0.3, "cutmix_alpha": 1.0}
    state = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    for key in ((1, 5), (1, 6), (2, 5)):
        one, again = (mixed(seed=key[0], iteration=key[1], **options) for _ in range(2))
        assert torch.equal(one["image"], again["image"])
        assert torch.equal(one["target"], again["target"])
    assert not torch.equal(mixed(seed=1, **options)["target"], mixed(seed=2, **options)["target"])
    has_fractions = {bool((mixed(iteration=each, **options)["image"] % 1).any()) for each in range(9)}
    assert has_fractions == {True, False}  # sums have some, rectangles do not
    assert state == (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_evaluations_get_targets_alone_and_predictions_need_no_labels():
    batch = mixed(alpha=1.0, training=False)
    assert batch["image"] is IMAGES
    assert batch["target"].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 0]]
    hook = Mixup(alpha=1.0, classes=3)
    hook.register_mainloop(SimpleNamespace(model=MODEL, training=False))
    batch = {"image": IMAGES}
    hook.before_batch("valid", batch)
    assert list(batch) == ["image"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give alpha, cutmix_alpha, or both"),
        ({"alpha": -1.0}, "-1.0 is not a number of at least 0"),
        ({"cutmix_alpha": True}, "True is not a number"),
        ({"alpha": 1.0, "classes": 0}, "0 is not a whole number"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ArgumentError, match=message):
        Mixup(**options)


def test_the_yaml_in_its_docstring_trains_and_a_model_that_does_not_read_the_targets_is_an_error(
    digits_config, in_docstring, tmp_path
):
    config = digits_config([*in_docstring(Mixup), {"StopAfter": {"epochs": 1}}])
    config["dataset"]["flat"] = False
    with pytest.raises((ConfigError, HookError), match="adds the source 'target', which the model does not read"):
        create_training(config, output_dir=tmp_path / "run")
    flatten = {"class": "torch.nn.Sequential", "args": [{"class": "torch.nn.Flatten"}, config["model"]["module"]]}
    config["model"] |= {
        "module": flatten,
        "loss": {"class": "torch.nn.CrossEntropyLoss", "inputs": ["logits", "target"]},
    }
    assert create_training(config, output_dir=tmp_path / "run").main_loop.run_training().status == "finished"


def test_batches_that_cannot_be_mixed_are_said():
    with pytest.raises(StreamError, match="'label' is from 0 to 2, but there are 2 classes, from 0"):
        mixed(alpha=1.0, classes=2)
    for labels in (LABELS + 0.5, LABELS[:, None], np.eye(3)[LABELS]):
        with pytest.raises(StreamError, match=r"'label' is torch.* of shape .*, not one whole number"):
            mixed(labels=labels, alpha=1.0)
    assert mixed(labels=LABELS.astype(np.float32), alpha=1.0)["target"].shape == (4, 3)
    with pytest.raises(StreamError, match="has no height and width, which CutMix needs"):
        mixed(IMAGES.flatten(1), cutmix_alpha=1.0)
    with pytest.raises(StreamError, match="cannot mix 'image'"):
        mixed([np.zeros((1, 2)), np.zeros((2, 2)), np.zeros((1, 1)), np.zeros((1, 2))], alpha=1.0)
    with pytest.raises(StreamError, match="the batch has no 'label'"):
        hook = Mixup(alpha=1.0, classes=3)
        hook.register_mainloop(SimpleNamespace(model=MODEL, training=True))
        hook.before_batch("train", {"image": IMAGES})
    with pytest.raises(HookError, match="set `classes`"):
        Mixup(alpha=1.0, dataset=object()).register_mainloop(SimpleNamespace(model=MODEL))
