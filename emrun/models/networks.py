"""The modules of emrun's bases: for rows of a table, windows of a series, images and texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, hub, nn

from emrun.base.arguments import expanded, similar_folder
from emrun.base.errors import ArgumentError, needing, reason_of
from emrun.base.lazy import prepare_torchvision
from emrun.base.types import Values
from emrun.base.wording import did_you_mean, listed

SMALL = "small"
"""The name of a network that needs no files and no download."""


_EMBEDDED = 8  # the width of the embedding of a category
_HEAD = 32  # the width of a head of attention


def layers(before: int, widths: Sequence[int], dropout: float, outputs: int) -> nn.Sequential:
    """Return hidden layers of some widths, each linear, normalised, GELU and dropout, and a linear last one."""
    found: list[nn.Module] = []
    for width in widths:
        found += [nn.Linear(before, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(dropout)]
        before = width
    return nn.Sequential(*found, nn.Linear(before, outputs))


class TableNet(nn.Module):
    """Predicts values or the logits of classes from numbers and categories of a row.

        model:
          module:
            class: TableNet
            numbers: ${data:width.numbers}
            categories: ${data:width.categories}
            embeddings: ${data:embeddings.categories}
            outputs: ${data:classes.target}
          inputs: [numbers, categories]

    Args:
        numbers: the number of columns of numbers.
        categories: the number of columns of categories.
        embeddings: the number of rows of the embedding of all categories.
        outputs: the number of values or classes.
        hidden: the widths of the hidden layers.
        dropout: the share of hidden values that are left out in training.
    """

    def __init__(
        self,
        numbers: int,
        categories: int,
        embeddings: int,
        outputs: int,
        hidden: Sequence[int] = (128, 128),
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if numbers + categories == 0:
            raise ArgumentError("numbers", "there is no column to predict from; list some as numbers or categories")
        self.embedding = nn.Embedding(embeddings, _EMBEDDED) if categories else None
        self.layers = layers(numbers + categories * _EMBEDDED, hidden, dropout, outputs)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Return the outputs, (B, outputs).

        Args:
            numbers: (B, numbers).
            categories: (B, categories), whole numbers of which each column has its own.
        """
        values = numbers
        if self.embedding is not None:
            values = torch.cat([numbers, self.embedding(categories).flatten(1)], dim=1)
        outputs: Tensor = self.layers(values)
        return outputs


class SeriesNet(nn.Module):
    """Predicts the future of series from their past: a linear forecast, and what hidden layers add to it.

        model:
          module: {class: SeriesNet, past: 48, columns: 3, future: 24, outputs: 1}
          inputs: [past]

    Args:
        past: the number of times that are known.
        columns: the number of series that are known.
        future: the number of times to predict.
        outputs: the number of series to predict.
        hidden: the widths of the hidden layers.
        dropout: the share of hidden values that are left out in training.
    """

    def __init__(
        self,
        past: int,
        columns: int,
        future: int,
        outputs: int,
        hidden: Sequence[int] = (128, 128),
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self._shape = (future, outputs)
        self.linear = nn.Linear(past * columns, future * outputs)
        self.layers = layers(past * columns, hidden, dropout, future * outputs)

    def forward(self, past: Tensor) -> Tensor:
        """Return the future, (B, future, outputs), of the past, (B, past, columns)."""
        values = past.flatten(1)
        outputs: Tensor = self.linear(values) + self.layers(values)
        return outputs.reshape(-1, *self._shape)


class PictureNet(nn.Module):
    """Predicts the logits of classes of images, by a small network or by one of torchvision.

        model:
          module: {class: PictureNet, classes: 3, model: resnet18, pretrained: true}
          inputs: [image]

    Args:
        classes: the number of classes.
        model: `small`, or the name of a classification model of torchvision, such as `resnet18`.
        pretrained: whether a new run begins with the weights of torchvision, but for the last layer; torch downloads
            them unless it has them.

    Raises:
        ArgumentError: there is one class, or no such model.
    """

    def __init__(self, classes: int, model: str = SMALL, pretrained: bool = False) -> None:
        super().__init__()
        _check_classes(classes)
        self._model = model
        self.weights_to_begin_with = self._pretrained if pretrained else None
        if model == SMALL:
            self.net = _small(classes)
            if pretrained:
                raise ArgumentError(
                    "pretrained", "there are no weights of the model 'small'; write a torchvision model"
                )
            return
        with needing(f"the model {model!r}", "torchvision", "vision"):
            prepare_torchvision()
        from torchvision import models

        known = models.list_models(module=models)
        if model not in known:
            near = did_you_mean(model, [SMALL, *known]) or f"; there are {listed([SMALL, *known])}"
            raise ArgumentError("model", f"there is no model {model!r}{near}")
        self.net = models.get_model(model, weights=None, num_classes=classes)

    def _pretrained(self) -> Values:
        """Return the entry of `init_from` for the weights of torchvision, which only a new run reads.

        Raises:
            ArgumentError: they are not there and cannot be downloaded.
        """
        from torchvision import models

        weights = models.get_model_weights(self._model).DEFAULT
        file = Path(hub.get_dir(), "checkpoints", Path(weights.url).name)
        try:
            weights.get_state_dict(progress=False, check_hash=True)  # downloads the file, unless it is there
        except (OSError, RuntimeError) as error:  # the latter, if the file has another checksum than its name says
            raise ArgumentError(
                "pretrained",
                f"{weights.url} cannot be downloaded ({getattr(error, 'reason', error)}); copy that file to {file}, "
                "or write false, to begin with random weights",
            ) from error
        return {"path": str(file), "rename": {"^": "net."}, "on_mismatch": "skip"}

    def forward(self, image: Tensor) -> Tensor:
        """Return the logits, (B, classes), of images, (B, 3, H, W), or of grey ones, (B, 1, H, W)."""
        logits: Tensor = self.net(image.expand(-1, 3, -1, -1))
        return logits


class MaskNet(nn.Module):
    """Predicts the logits of classes of pixels: a small U-Net (Ronneberger et al., 2015).

        model:
          module: {class: MaskNet, classes: 3, width: 32}
          inputs: [image]

    Args:
        classes: the number of classes.
        width: the channels of the first layer; each of the two halvings of the size doubles them.
    """

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        _check_classes(classes)
        self.down = nn.ModuleList([_block(3, width), _block(width, 2 * width), _block(2 * width, 4 * width)])
        self.up = nn.ModuleList([_block(6 * width, 2 * width), _block(3 * width, width)])
        self.last = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Return the logits, (B, classes, H, W), of images, (B, 3, H, W), or of grey ones, (B, 1, H, W)."""
        fine = self.down[0](image.expand(-1, 3, -1, -1))
        middle = self.down[1](_halved(fine))
        coarse = self.down[2](_halved(middle))
        middle = self.up[0](torch.cat([_resized(coarse, middle), middle], dim=1))
        fine = self.up[1](torch.cat([_resized(middle, fine), fine], dim=1))
        logits: Tensor = self.last(fine)
        return logits


class TextNet(nn.Module):
    """Predicts the logits of classes of texts from their tokens, each seen with the two around it.

        model:
          module: {class: TextNet, tokens: 30000, classes: 3}
          inputs: [input_ids, attention_mask]

    Args:
        tokens: the number of tokens of the tokenizer.
        classes: the number of classes.
        width: the width of the embedding of a token.
        dropout: the share of values that are left out in training.

    Raises:
        ArgumentError: there is one class.
    """

    def __init__(self, tokens: int, classes: int, width: int = 64, dropout: float = 0.3) -> None:
        super().__init__()
        _check_classes(classes)
        self.embedding = nn.Embedding(tokens, width)
        self.near = nn.Conv1d(width, width, 3, padding=1)
        self.last = nn.Sequential(nn.Dropout(dropout), nn.Linear(2 * width, classes))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the logits, (B, classes), of tokens, (B, T), where the mask is not 0."""
        values = self.embedding(input_ids).transpose(1, 2)
        seen = attention_mask.unsqueeze(1).to(values.dtype)
        values = self.near(values * seen).relu() * seen
        mean = values.sum(dim=2) / seen.sum(dim=2).clamp(min=1)
        logits: Tensor = self.last(torch.cat([mean, values.amax(dim=2)], dim=1))
        return logits


def text_model(tokens: int, classes: int, model: str = SMALL, width: int = 64, dropout: float = 0.3) -> nn.Module:
    """Return a `TextNet`, or a model of transformers that classifies texts.

    Args:
        tokens: see `TextNet`.
        classes: see `TextNet`.
        model: `small` for a `TextNet`, or a directory that `save_pretrained` wrote, or a name in the cache of
            transformers.
        width: see `TextNet`.
        dropout: see `TextNet`.
    """
    if model == SMALL:
        return TextNet(tokens, classes, width, dropout)
    _check_classes(classes)
    more = {"num_labels": classes, "ignore_mismatched_sizes": True}
    return _of_transformers("AutoModelForSequenceClassification", model, more)


def chat_model(tokens: int, model: str = SMALL, width: int = 128, layers: int = 2) -> nn.Module:
    """Return a language model of transformers: a small Llama with random weights, or one with its own weights.

    Args:
        tokens: the number of tokens of the tokenizer.
        model: `small`, or a directory that `save_pretrained` wrote, or a name in the cache of transformers.
        width: the width of the layers of `small`, a multiple of 32.
        layers: the number of its layers.
    """
    if model != SMALL:
        return _of_transformers("AutoModelForCausalLM", model, {"use_cache": False})
    with needing("the model 'small'", "transformers", "transformers"):
        from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(
        vocab_size=tokens, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=max(1, width // _HEAD), tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    found: nn.Module = LlamaForCausalLM(config)
    return found


def _of_transformers(name: str, model: str, more: Values) -> nn.Module:
    """Return a model of transformers with its weights, which are on this machine.

    Raises:
        ArgumentError: it cannot be loaded.
    """
    with needing(f"the model {model!r}", "transformers", "transformers"):
        import transformers
        from huggingface_hub import snapshot_download
    folder = expanded(model)
    try:
        place = folder if folder.is_dir() else snapshot_download(model, local_files_only=True)
        found: nn.Module = getattr(transformers, name).from_pretrained(str(place), dtype=torch.float32, **more)
    except (OSError, ValueError) as error:
        reason = f"{model!r} cannot be loaded: {reason_of(error).splitlines()[0]}{similar_folder(folder)}"
        advice = (
            f"write {SMALL!r}, a directory that save_pretrained has written, or a name in the cache of transformers"
        )
        raise ArgumentError("model", f"{reason}; {advice}") from error
    return found


def _check_classes(classes: int) -> None:
    if classes < 2:
        raise ArgumentError("classes", f"the data have {classes} class, so that there is nothing to tell apart")


def _block(before: int, width: int) -> nn.Sequential:
    """Return two convolutions of the same size."""
    groups = math.gcd(8, width)
    first = [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.GroupNorm(groups, width), nn.ReLU()]
    return nn.Sequential(
        *first, nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(groups, width), nn.ReLU()
    )


def _halved(values: Tensor) -> Tensor:
    return nn.functional.max_pool2d(values, 2, ceil_mode=True)


def _resized(values: Tensor, like: Tensor) -> Tensor:
    """Return values of twice the size, as far as `like` goes; the gradients are the same in each run, also on a GPU."""
    batch, channels, height, width = values.shape
    twice = values[:, :, :, None, :, None].expand(batch, channels, height, 2, width, 2)
    rows, columns = like.shape[-2:]
    return twice.reshape(batch, channels, 2 * height, 2 * width)[:, :, :rows, :columns]


def _small(classes: int) -> nn.Sequential:
    """Return a network of four convolutions for small images."""
    found: list[nn.Module] = []
    before = 3
    for width, stride in ((32, 2), (64, 2), (128, 2), (128, 1)):
        found += [nn.Conv2d(before, width, 3, stride, padding=1, bias=False), nn.GroupNorm(8, width), nn.ReLU()]
        before = width
    return nn.Sequential(*found, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(before, classes))
