"""The weights of a module: what a checkpoint has of them, and others that evaluations use, such as averages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from emrun.base.encoding import decode
from emrun.base.errors import ArgumentError
from emrun.base.fields import ANOTHER_CHECKPOINT, reading
from emrun.base.types import Batch, Json
from emrun.base.wording import listed
from emrun.models.forward_pass import ForwardPass
from emrun.models.modes import Tensors
from emrun.models.optimizers.named import Optimizers
from emrun.models.weights.averages import EvaluationWeights
from emrun.models.weights.batch_norm import calculated_anew
from emrun.models.weights.init_from import InitFrom
from emrun.models.weights.saving import collect_weights, extra_state, load_weights, put, tensors_of
from emrun.ranks.group import ranks
from emrun.storage.checkpoints.manifest import TRAINED
from emrun.storage.checkpoints.shards import has_tensors, write_shard
from emrun.storage.checkpoints.state_file import FILE, load_state
from emrun.storage.checkpoints.weights import FILE as FILE_OF_WEIGHTS, Collected, write_apart, write_weights

_LOG = logging.getLogger(__name__)


class Weights:
    """Saves and loads the weights of a module, and evaluates with others than those that are trained.

    Args:
        forward_pass: has the module.
        optimizers: those that have other weights for evaluations put them into the module.
    """

    def __init__(self, forward_pass: ForwardPass, optimizers: Optimizers) -> None:
        self._forward_pass = forward_pass
        self._optimizers = optimizers
        self.averages: EvaluationWeights | None = None
        """The weights that evaluations use; None if they use those that are trained."""
        self.restored: Tensors | None = None
        """After the load of a checkpoint: the weights that evaluations used, if they are not those being trained."""
        self._loaded_from: Path | None = None
        self._restores_averages = True  # False once it is known that no hook takes them

    # other weights for evaluations

    def register(self) -> None:
        """Belong to another loop, whose hooks may take the averages of a checkpoint."""
        self._restores_averages = True

    def replace_averages(self, weights: Tensors | None) -> None:
        """Use other weights for evaluations from now on; None for those that are trained.

        Raises:
            ArgumentError: they do not fit the module, or the optimizer has other weights for evaluations.
        """
        if weights is not None and self._optimizers.has_modes:
            raise ArgumentError(
                "optimizer",
                "has other weights for evaluations already; nothing else can replace them, e.g. AverageWeights",
            )
        self.use_trained()
        self.averages = None if weights is None else EvaluationWeights(self._forward_pass.module, weights)

    def use_trained(self) -> None:
        """Run with the weights that are trained from now on."""
        if self.averages is not None:
            self.averages.use(False)

    def drop_restored(self) -> None:
        """Forget averages of a checkpoint that no hook has taken."""
        if self.restored is not None:
            self.restored = None
            self._restores_averages = False  # nor after the second load
            _LOG.warning("the averages of the weights in the checkpoint are not used: no hook averages any more")

    def take_restored(self, weights: Tensors | None) -> None:
        """Note what is left of the averages of a checkpoint, once a hook has taken them."""
        self.restored = weights

    def recompute_batch_norm(self, batches: Iterable[Batch], forward: Callable[[Tensors], Any]) -> None:
        """Calculate the running statistics of BatchNorm anew; see `TorchModel.recompute_batch_norm`.

        Args:
            batches: the batches on which the module runs.
            forward: runs the module, in the precision of the model.
        """
        rest = iter(batches)
        first = list(islice(rest, 1))  # hooks that prepare for an evaluation have done so with the first batch
        with self._evaluating(), torch.no_grad(), calculated_anew(self._forward_pass.module):
            for batch in chain(first, rest):
                forward(self._forward_pass.tensors(batch))

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Use the weights for evaluations in the block."""
        averages = self.averages
        if averages is None:
            yield
            return
        was_in_use = averages.in_use
        averages.use(True)
        try:
            yield
        finally:
            averages.use(was_in_use)

    # checkpoints

    def save(self, directory: Path) -> None:
        """Write the weights to `model.safetensors`.

        Raises:
            StorageError: the file cannot be written.
        """
        with self._optimizers.mode_of_evaluations():
            for name, weights in self._collected(copied=False).items():
                write_weights(*weights, directory, name)

    def stage(self, *, is_sharded: bool) -> Callable[[Path], Any]:
        """Copy the weights; return a function that writes them in any thread.

        The function writes large frozen parameters to a file of their own; see `write_apart`. If the weights are
        sharded, it writes what this rank has of them, and returns what `write_shard` returns.
        """
        with self._optimizers.mode_of_evaluations():
            collected = self._collected(copied=True)
        if is_sharded:
            return partial(write_shard, collected, ranks().rank)
        parameters = self._forward_pass.module.named_parameters(remove_duplicate=False)
        return partial(write_apart, collected, [name for name, each in parameters if not each.requires_grad])

    def _collected(self, *, copied: bool) -> dict[str, Collected]:
        """Return file -> the weights of evaluations, and those of the training if they are others."""
        module = self._forward_pass.module
        averages = self.averages
        if averages is None:
            return {FILE_OF_WEIGHTS: collect_weights(module, copied=copied)}
        return {
            name: collect_weights(module, copied=copied, replaced=averages.replaced(evaluation=name != TRAINED))
            for name in (FILE_OF_WEIGHTS, TRAINED)
        }

    def load(self, directory: Path) -> None:
        """Read the weights from `model.safetensors`, and the module's extra state from `state.pt`.

        Raises:
            StorageError: a file cannot be read, or does not fit the module.
        """
        module = self._forward_pass.module
        for member in self._optimizers.members:
            member.forget_training()
        self.replace_averages(None)
        self.restored = None
        self._loaded_from = directory
        load_weights(module, directory)
        if extra_state(module):
            state = load_state(directory)
            with reading(f"{directory / FILE}", ANOTHER_CHECKPOINT):
                extra = dict(decode(state["model"]["extra"]))
            put(extra, module)

    def load_trained(self) -> None:
        """Read the weights that are trained, after a `load`, if evaluations use others."""
        if self._loaded_from is None or not has_tensors(self._loaded_from, TRAINED):
            return
        module = self._forward_pass.module
        if self._restores_averages:
            self.restored = {name: tensor.detach().clone() for name, tensor in tensors_of(module).items()}
        load_weights(module, self._loaded_from, TRAINED)


def begin_with(module: Module, init_from: Sequence[InitFrom]) -> Json:
    """Load other weights into a module, to begin with.

    Returns:
        Where they are from, and what was loaded and what was not; see `InitFrom.load`.

    Raises:
        ArgumentError: they cannot be read, or do not fit the module.
    """
    loaded: dict[str, str] = {}
    reports = [each.load(module, loaded) for each in init_from]
    if len(reports) == 1:
        return reports[0]
    numbered = list(enumerate(reports, 1))
    return {
        "source": listed([f"{number}: {report['source']}" for number, report in numbered]),
        "rows": [{**row, "what": f"{number}: {row['what']}"} for number, report in numbered for row in report["rows"]],
    }
