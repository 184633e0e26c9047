"""Mix pairs of examples of train batches: mixup and CutMix."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emrun.base.arguments import check_count, check_number
from emrun.base.errors import ArgumentError, HookError, StreamError
from emrun.base.randomness import derived_seed
from emrun.dataset import classes_of
from emrun.hook import AbstractHook, Loop


class Mixup(AbstractHook):
    """Mixes pairs of examples of each train batch, and adds the source `target`, the probabilities of the classes.

        model:
          loss: {class: torch.nn.CrossEntropyLoss, inputs: [logits, target]}
        hooks:
          - Mixup: {alpha: 0.2, cutmix_alpha: 1.0}

    Mixup (Zhang et al. 2018) adds two images, and their targets, with the weights s and 1 - s, where s is drawn from
    Beta(alpha, alpha). CutMix (Yun et al. 2019) replaces a rectangle of an image by that of another image; s is the
    share of the image that is kept. With both, one of them is drawn for each batch. The larger share is that of the
    example itself, whose label stays in the batch: so an accuracy of the label is that of the main one. Evaluations get
    the images as they are, and targets of zeros and ones; a stream without labels is left as it is.

    The random numbers are a function of the seed and the number of the iteration: a resume is exact. Images that are
    whole numbers, such as bytes, are rounded. On several ranks, pairs are made of the examples of each rank.

    Args:
        alpha: for mixup; 0 for none.
        cutmix_alpha: for CutMix; 0 for none. The last two axes of the image are height and width.
        classes: the number of classes; by default that of the dataset's `classes_names`.
        image: the source with the images, an array or a tensor of shape (B, ...).
        label: the source with the labels, whole numbers of shape (B,).

    Raises:
        ArgumentError: an argument has a value that is not allowed, or both are 0.
        HookError: `classes` is not given, and the dataset does not say it; or the model does not read `target`.
        StreamError: a train batch lacks the image or the label, a label is not a class, or the image cannot be mixed.
    """

    every_rank = True

    def __init__(
        self,
        alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
        classes: int | None = None,
        image: str = "image",
        label: str = "label",
        dataset: Any = None,
    ) -> None:
        super().__init__(dataset=dataset)
        for name, value in (("alpha", alpha), ("cutmix_alpha", cutmix_alpha)):
            check_number(name, value, "a number of at least 0", least=0)
        if not alpha and not cutmix_alpha:
            raise ArgumentError("alpha", "give alpha, cutmix_alpha, or both")
        if classes is not None:
            check_count("classes", classes, minimum=1)
        self._mixers = [(mix, strength) for mix, strength in ((_mixed, alpha), (_cut, cutmix_alpha)) if strength]
        self._classes = classes
        self._image = image
        self._label = label

    def register_mainloop(self, main_loop: Loop) -> None:
        """Find the number of classes.

        Raises:
            HookError: it is not known, or the model does not read the targets.
        """
        super().register_mainloop(main_loop)
        model = main_loop.model
        if "target" not in (*model.input_names, *model.optional_input_names):
            raise HookError(
                "Mixup adds the source 'target', which the model does not read; name it in `inputs` of the loss"
            )
        if self._classes is None:
            names = classes_of(self.dataset, self._label)
            if names is None:
                raise HookError("Mixup needs the number of classes, as the dataset has no classes_names; set `classes`")
            self._classes = len(names)

    def before_batch(self, stream_name: str, batch: Any) -> None:
        """Add the targets; in training, put mixed images and targets into the batch."""
        loop = self.main_loop
        missing = [name for name in (self._image, self._label) if name not in batch]
        if missing and loop.training:
            raise StreamError(f"Mixup: the batch has no {missing[0]!r}", first_batch=True)
        if missing:
            return
        targets = self._targets(batch[self._label])
        if loop.training:
            try:
                given = batch[self._image]
                images = (
                    given if isinstance(given, Tensor) else torch.from_numpy(np.require(given, requirements=["C", "W"]))
                )
                generator = np.random.Generator(np.random.PCG64(derived_seed(loop.seed, "Mixup", loop.iterations_done)))
                mix, alpha = self._mixers[generator.integers(len(self._mixers))]
                other = torch.from_numpy(generator.permutation(len(images)))
                share = generator.beta(alpha, alpha)
                batch[self._image], share = mix(images, other, max(share, 1 - share), generator)
            except (TypeError, ValueError) as error:
                raise StreamError(f"Mixup: cannot mix {self._image!r}: {error}", first_batch=True) from error
            targets = share * targets + (1 - share) * targets[other]
        batch["target"] = targets

    def _targets(self, labels: Any) -> Tensor:
        """Return the targets of unmixed examples: float32 of shape (B, classes)."""
        given = torch.as_tensor(labels)
        numbers = given.long()
        if given.ndim != 1 or (numbers != given).any():
            raise StreamError(
                f"Mixup: {self._label!r} is {given.dtype} of shape {tuple(given.shape)}, not one whole "
                "number for each example",
                first_batch=True,
            )
        if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < (self._classes or 0):
            raise StreamError(
                f"Mixup: {self._label!r} is from {int(numbers.min())} to {int(numbers.max())}, but there are "
                f"{self._classes} classes, from 0",
                first_batch=True,
            )
        return torch.nn.functional.one_hot(numbers, self._classes or -1).float()


def _mixed(images: Tensor, other: Tensor, share: float, generator: np.random.Generator) -> tuple[Tensor, float]:
    """Return weighted sums of the images and others, in their dtype, and the share of the images."""
    if images.is_floating_point():
        return share * images + (1 - share) * images[other], share
    sums = share * images.float() + (1 - share) * images[other].float()
    return sums.round().to(images.dtype), share


def _cut(images: Tensor, other: Tensor, share: float, generator: np.random.Generator) -> tuple[Tensor, float]:
    """Return the images with a rectangle of others, and the share of the images that is kept.

    Raises:
        ValueError: they have no height and width.
    """
    if images.ndim < 3:
        raise ValueError(f"its shape {tuple(images.shape)} has no height and width, which CutMix needs")
    spans = []
    for size in images.shape[-2:]:
        length = round(size * math.sqrt(1 - share))
        middle = int(generator.integers(size))
        spans.append((max(middle - length // 2, 0), min(middle - length // 2 + length, size)))
    (top, bottom), (left, right) = spans
    cut = images.clone()
    cut[..., top:bottom, left:right] = images[other][..., top:bottom, left:right]
    return cut, 1 - (bottom - top) * (right - left) / math.prod(images.shape[-2:])
