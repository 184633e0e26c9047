"""What all models of a `torch.nn.Module` tell: sources, outputs, metrics of whole streams; `TorchModel` trains, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn import Module

from emrun.base.types import Batch, State, Strings, Values
from emrun.hook import Loop
from emrun.model import AbstractModel, Target
from emrun.models.forward_pass import ForwardPass
from emrun.models.inputs import tokens_of
from emrun.models.modes import Tensors, modes, set_modes
from emrun.models.stream_metrics import StreamMetrics
from emrun.models.units import Units
from emrun.models.weights.over_ranks import broadcast
from emrun.models.weights.saving import extra_state, tensors_of
from emrun.ranks.group import ranks
from emrun.ranks.pieces import is_in_pieces
from emrun.ranks.shares import rows_in


class ModuleModel(AbstractModel):
    """Tells what a `ForwardPass` needs and returns, and measures whole streams.

    Args:
        forward_pass: runs the module.

    Raises:
        ArgumentError: a metric of a whole stream does not work here.
    """

    shares_batches = True
    _set_by_init = "_stream_metrics"

    def __init__(self, forward_pass: ForwardPass) -> None:
        vars(self).pop("module", None)  # which a subclass has set before
        self._forward_pass = forward_pass
        self.device = forward_pass.device
        self._main_loop: Loop | None = None
        of_streams = forward_pass.outputs.of_streams
        self._stream_metrics = StreamMetrics(of_streams, forward_pass.device) if of_streams else None

    @property
    def module(self) -> Module:
        """The `torch.nn.Module`, on `device`; before the constructor of this class, what a subclass has set."""
        own = vars(self)
        module: Module = own["_forward_pass"].module if "_forward_pass" in own else own["module"]
        return module

    @module.setter
    def module(self, module: Module) -> None:
        if "_forward_pass" in vars(self):
            self._forward_pass.replace(module)
        else:
            vars(self)["module"] = module

    @property
    def input_names(self) -> Strings:
        """Names of the sources that every batch must have."""
        return self._forward_pass.inputs.required

    @property
    def optional_input_names(self) -> Strings:  # type: ignore[override]
        """Names of the sources that are used if a batch has them."""
        return self._forward_pass.inputs.optional

    @property
    def output_names(self) -> Strings:
        """Names of the outputs, as far as they are known before the first batch."""
        return self._forward_pass.outputs.names

    @property
    def metric_names(self) -> Strings:  # type: ignore[override]
        """Names of the entries of `model.metrics` that are outputs."""
        return list(self._forward_pass.outputs.of_batches)

    @property
    def writes(self) -> Strings:  # type: ignore[override]
        """Names of the entries of `model.metrics` that are computed once for each stream."""
        return list(self._forward_pass.outputs.of_streams)

    @property
    def only_in(self) -> Mapping[str, Strings]:  # type: ignore[override]
        """Entry of `model.metrics` -> its `streams`, if it has some."""
        return self._forward_pass.outputs.only_in

    @property
    def targets(self) -> Sequence[Target]:  # type: ignore[override]
        """What the losses compare."""
        return self._forward_pass.outputs.targets

    @property
    def losses(self) -> Values:
        """Key in the model's section -> the object that calculates a loss; checkpoints do not have these objects."""
        return {term.key: term.function for term in self._forward_pass.outputs.terms.values()}

    def part_with(self, source: str) -> str:
        """Return the key of the loss or metric that needs a source, or else `forward`, for messages."""
        return self._forward_pass.part_with(source)

    def predict_only(self) -> None:
        """Leave out what needs a source that a batch does not have, and metrics of whole streams; see `predict`."""
        self._forward_pass.leave_out_missing()
        self._stream_metrics = None

    def without_measures(self) -> None:
        """Leave out losses and metrics, and the sources that only they need."""
        self._forward_pass.leave_out_measures()
        self._stream_metrics = None

    def program_inputs(self, batch: Batch) -> Values:
        """Return the sources of a batch as a program of the model gets them: source -> tensor, or a mapping or list."""
        return self._forward_pass.inputs.unscaled(batch)

    def without_autocast(self) -> None:
        """Run the module in the precision of its weights from now on."""
        self._forward_pass.leave_autocast()

    def begin_alike(self) -> None:
        """Take the parameters and buffers of rank 0."""
        broadcast({name: each for name, each in tensors_of(self.module).items() if not is_in_pieces(each)}, ranks())

    def use_dataset(self, dataset: Any) -> None:
        """Take from the dataset how its sources are scaled, how many train rows its classes have, what is a picture.

        Raises:
            ArgumentError: these do not fit the model, or the dataset has tokens that the module does not have.
        """
        outputs = self._forward_pass.outputs
        outputs.use_dataset(dataset)
        check = getattr(dataset, "check_vocabulary", None)
        if check is not None and (size := tokens_of(self.module)) is not None:
            check(size)
        if self.in_units:
            outputs.use_units(Units(self.in_units, dataset))

    # metrics of whole streams

    def stream_values(self, stream: str) -> Values:
        """Return the metrics of a whole stream."""
        return self._stream_metrics.values(stream) if self._stream_metrics is not None else {}

    def after_stream(self, stream_name: str) -> None:
        """Compute the metrics of a whole stream.

        Raises:
            ArgumentError: a metric is not a number.
        """
        if self._stream_metrics is not None:
            self._stream_metrics.end(stream_name)

    def _measure(self, outputs: Values, inputs: Tensors, train: bool, stream: str, batch: Batch) -> None:
        """Add a batch to the metrics of its stream, unless a hook runs the model on a batch of its own.

        Without rows, the batch has none of this rank, but its metrics are computed with those of the others.
        """
        loop = self._main_loop
        metrics = self._stream_metrics
        is_of_loop = loop is None or loop.stream_name is None or (loop.stream_name, loop.training) == (stream, train)
        if metrics is not None and is_of_loop:
            if rows_in(batch):
                metrics.add(stream, outputs, inputs)
            else:
                metrics.begin(stream)

    # what checkpoints have beside the weights

    def state_dict(self) -> State:
        """Return the module's extra state, which is not in its tensors, the modes of its parts, and the metrics."""
        return {
            "extra": extra_state(self.module),
            "modes": modes(self.module),
            "stream_metrics": (self._stream_metrics.state_dict() if self._stream_metrics is not None else None),
        }

    def load_state_dict(self, state: State) -> None:
        """Restore the modes of the module's parts, and the metrics."""
        set_modes(self.module, state["modes"])
        if self._stream_metrics is not None and state["stream_metrics"] is not None:
            self._stream_metrics.load_state_dict(state["stream_metrics"])

    def of_rank(self, state: Values) -> State:
        """Return the states of the metrics of whole streams."""
        return {"stream_metrics": state["stream_metrics"]}

    def of_new_rank(self, states: Sequence[Values], *, is_first: bool) -> State:
        """Return merged states of the metrics of whole streams, or empty ones."""
        measured = [state["stream_metrics"] for state in states if state["stream_metrics"] is not None]
        if self._stream_metrics is None or not measured:
            return {}
        return {
            "stream_metrics": self._stream_metrics.merged(measured if is_first else measured[:1], empty=not is_first)
        }
