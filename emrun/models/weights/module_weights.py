"""A model of a `torch.nn.Module` whose weights are saved, loaded and averaged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from emrun.base.encoding import decode
from emrun.base.errors import ArgumentError, StateError
from emrun.base.fields import ANOTHER_CHECKPOINT, reading
from emrun.base.types import Batch, State
from emrun.base.wording import listed
from emrun.hook import Loop
from emrun.models.modes import Tensors
from emrun.models.module_model import ModuleModel
from emrun.models.optimizers.named import Optimizers
from emrun.models.sharding import Sharding
from emrun.models.weights.averages import EvaluationWeights
from emrun.models.weights.batch_norm import calculated_anew
from emrun.models.weights.init_from import InitFrom
from emrun.models.weights.loadable import Loadable
from emrun.models.weights.saving import collect_weights, extra_state, load_weights, put, tensors_of
from emrun.ranks.group import ranks
from emrun.storage.checkpoints.manifest import TRAINED
from emrun.storage.checkpoints.shards import has_tensors, write_shard
from emrun.storage.checkpoints.state_file import FILE, load_state
from emrun.storage.checkpoints.weights import FILE as FILE_OF_WEIGHTS, Collected, write_apart, write_weights

_LOG = logging.getLogger(__name__)


class SavedModel(ModuleModel):
    """Saves and loads the weights of a module, and evaluates with others than those that are trained."""

    _optimizers: Optimizers
    _loadable: Loadable
    _evaluation_weights: EvaluationWeights | None = None
    _loaded_from: Path | None = None
    _restores_averages = True  # False once it is known that no hook takes them
    restored_weights: Tensors | None = None
    """After the load of a checkpoint: the weights that evaluations used, if they are not those being trained."""

    def register_mainloop(self, main_loop: Loop) -> None:
        """Store the loop; forget the weights for evaluations of another loop."""
        if not self._optimizers.has_modes:
            self.evaluation_weights = None
        if self.load_initial is not None:
            self.load_initial()
        self._main_loop = main_loop
        self._restores_averages = True

    def before_training(self) -> None:
        """Forget averages of a checkpoint that no hook has taken."""
        super().before_training()
        if self.restored_weights is not None and not self._evaluates:
            self.restored_weights = None
            self._restores_averages = False  # nor after the second load
            _LOG.warning("the averages of the weights in the checkpoint are not used: no hook averages any more")

    def after_stream(self, stream_name: str) -> None:
        """End the stream, and run with the weights that are trained."""
        super().after_stream(stream_name)
        self._use_trained()

    def _use_trained(self) -> None:
        """Run with the weights that are trained from now on."""
        if self._evaluation_weights is not None:
            self._evaluation_weights.use(False)

    def _shard(self, strategy: object) -> Sharding:
        """Divide the module among the ranks; each writes its own weights, as this class does."""
        own = type(self)
        if any(getattr(own, name) is not getattr(SavedModel, name) for name in ("save", "stage", "load")):
            message = f"cannot be used with a save or a load of {own.__name__} yet; remove one of them"
            raise ArgumentError("strategy", message)
        return super()._shard(strategy)

    def save(self, directory: Path) -> None:
        """Write the weights to `model.safetensors`.

        Raises:
            StateError: the weights lie on several ranks, of which each writes its own; see `stage`.
            StorageError: the file cannot be written.
        """
        if self.is_sharded:
            raise StateError("the weights lie on several ranks (model.strategy), and are in the checkpoints only")
        with self._optimizers.mode_of_evaluations():
            for name, weights in self._collected(copied=False).items():
                write_weights(*weights, directory, name)

    def stage(self) -> Callable[[Path], Any] | None:
        """Copy the weights; return a function that writes them in any thread, None if a subclass overrides `save`.

        The function writes large frozen parameters to a file of their own; see `write_apart`. If the weights are
        sharded, it writes what this rank has of them, and returns what `write_shard` returns.
        """
        if getattr(self.save, "__func__", None) is not SavedModel.save:
            return None
        with self._optimizers.mode_of_evaluations():
            found = self._collected(copied=True)
        if self.is_sharded:
            return partial(write_shard, found, ranks().rank)
        parameters = self.module.named_parameters(remove_duplicate=False)
        return partial(write_apart, found, [name for name, each in parameters if not each.requires_grad])

    def _collected(self, *, copied: bool) -> dict[str, Collected]:
        """Return file -> the weights of evaluations, and those of the training if they are others."""
        others = self._evaluation_weights
        module = self.module
        self._loadable.check()
        if others is None:
            return {FILE_OF_WEIGHTS: collect_weights(module, copied=copied)}
        of_both = {
            FILE_OF_WEIGHTS: others.replaced(evaluation=True),
            TRAINED: others.replaced(evaluation=False),
        }
        return {name: collect_weights(module, copied=copied, replaced=replaced) for name, replaced in of_both.items()}

    @property
    def evaluation_weights(self) -> Tensors | None:
        """Name of a parameter or buffer -> the tensor that evaluations use instead; None without such weights.

        A hook sets this, for example to averages, and changes the tensors after updates. `model.safetensors` in a
        checkpoint has these weights, `training.safetensors` those that are trained.
        """
        return None if self._evaluation_weights is None else self._evaluation_weights.others

    @evaluation_weights.setter
    def evaluation_weights(self, weights: Tensors | None) -> None:
        if weights is not None and self._optimizers.has_modes:
            message = "has other weights for evaluations already; nothing else can replace them, e.g. AverageWeights"
            raise ArgumentError("optimizer", message)
        self._use_trained()
        self._evaluation_weights = None if weights is None else EvaluationWeights(self.module, weights)
        self.list_work()

    def recompute_batch_norm(self, batches: Iterable[Batch]) -> None:
        """Calculate the running statistics of BatchNorm anew, for the weights of evaluations.

        This is `torch.optim.swa_utils.update_bn`: the module runs on the batches in training mode, without gradients,
        and the statistics become the means over the batches. Nothing else changes. After an error, and if there is no
        batch, the statistics stay as they are. The statistics of the training stay in any case.
        """
        others = self._evaluation_weights
        was_in_use = others is not None and others.in_use
        rest = iter(batches)
        first = list(islice(rest, 1))  # hooks that prepare for an evaluation have done so with the first batch
        if others is not None:
            others.use(True)
        try:
            with torch.no_grad(), calculated_anew(self.module):
                for batch in chain(first, rest):
                    self._in_precision(self._tensors(batch))
        finally:
            if others is not None:
                others.use(was_in_use)

    def load(self, directory: Path) -> None:
        """Read the weights from `model.safetensors`, and the module's extra state from `state.pt`.

        Raises:
            StorageError: a file cannot be read, or does not fit this module.
        """
        for each in self._optimizers.members:
            each.forget_training()
        self.evaluation_weights = self.restored_weights = None
        self._loaded_from = directory
        load_weights(self.module, directory)
        if extra_state(self.module):
            state = load_state(directory)
            with reading(f"{directory / FILE}", ANOTHER_CHECKPOINT):
                extra = dict(decode(state["model"]["extra"]))
            put(extra, self.module)

    def load_state_dict(self, state: State) -> None:
        """Restore the weights that are trained, the modes of the module's parts, and the metrics."""
        if self._loaded_from is not None and has_tensors(self._loaded_from, TRAINED):
            if self._restores_averages:
                tensors = tensors_of(self.module)
                self.restored_weights = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            load_weights(self.module, self._loaded_from, TRAINED)
        super().load_state_dict(state)

    def _begin_with(self, init_from: Sequence[InitFrom]) -> dict[str, Any]:
        """Load other weights to begin with.

        Returns:
            Where they are from, and what was loaded and what was not; see `InitFrom.load`.

        Raises:
            ArgumentError: they cannot be read, or do not fit the module.
        """
        self.load_initial = None
        loaded: dict[str, str] = {}
        found = [each.load(self.module, loaded) for each in init_from]
        if len(found) == 1:
            return found[0]
        rows = [{**row, "what": f"{i}: {row['what']}"} for i, each in enumerate(found, 1) for row in each["rows"]]
        return {"source": listed([f"{i}: {each['source']}" for i, each in enumerate(found, 1)]), "rows": rows}
