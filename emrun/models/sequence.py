"""Sequence: several runs, each of which gets the outputs of those before it."""

from __future__ import annotations

from typing import Any

from emrun.base.errors import StateError
from emrun.base.types import Batch, Strings, Values
from emrun.base.wording import listed
from emrun.models.ensemble import MadeOfRuns, outputs_of


class Sequence(MadeOfRuns):
    """Runs the models of finished runs one after another, each on the batch with the outputs of those before.

        model:
          class: Sequence
          runs: [log/features, log/classifier]
          metrics: {accuracy: {import: emrun.metrics.accuracy, inputs: [logits, label]}}

    A batch must have the sources of the first run; a later run may get sources too. If two runs return an output of the
    same name, the later one counts. The rest is as for `Ensemble`: see there. It cannot be trained.

    Args:
        runs: see `Ensemble`.
        outputs: the outputs to return. Default: those of all runs.
        loss: see `TorchModel`.
        metrics: see `TorchModel`.

    Raises:
        ArgumentError: a run cannot be loaded, or does not have the classes of the others.
        StateError: a run needs what is neither a source nor an output of the runs before.
    """

    @property
    def input_names(self) -> Strings:
        """Names of the sources that the first run needs, and those of losses and metrics."""
        return list(dict.fromkeys([*self.members[0][1].input_names, *super().input_names]))

    @property
    def optional_input_names(self) -> Strings:  # type: ignore[override]
        """Names of the sources that later runs use unless they are outputs of those before."""
        used = [name for _, each in self.members for name in (*each.input_names, *each.optional_input_names)]
        return [name for name in dict.fromkeys([*used, *super().optional_input_names]) if name not in self.input_names]

    def returned(self, batch: Batch, stream: str) -> Values:
        """Return the outputs of all runs."""
        outputs: dict[str, Any] = {}
        for run, each in self.members:
            outputs |= outputs_of(run, each, {**batch, **outputs}, stream)
        if missing := [name for name in self.wanted or () if name not in outputs]:
            raise StateError(f"no run returns {listed(missing)} (they return {listed(list(outputs))})")
        return outputs
