"""The verdicts of Diagnose: when one is given, its words, and the file that lists them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from emrun.base.fields import ANYTHING, TEXT, mapping_of, record, sequence_of, whole
from emrun.storage.files import write_atomically
from emrun.storage.metrics import numbers

_LOG = logging.getLogger(__name__)

LOOKS = 3
"""How many looks in a row must find most of the faults."""
FILE = "diagnosis.jsonl"
_MOST = 5  # layers in a line of the log
_AT_ONCE = ("not_finite", "dead_units", "dead_layer")
_ONLY_FROM_THE_BEGINNING = ("never_moves", "small_update")
_CLEARED = -1

_WORDS: dict[str, tuple[str, Callable[[Any], str], str]] = {
    "no_gradient": (
        f"no gradient in {LOOKS} looks in a row: ",
        lambda figure: "None" if figure is None else "all 0",
        "the loss does not depend on it, or what comes after it is dead: look for detach(), no_grad() and dead units, "
        "or set requires_grad to False if this is meant",
    ),
    "never_moves": (
        "never changes: ",
        lambda figure: "in no optimizer" if figure is None else f"learning rate {figure:.3g}",
        "give it to an optimizer with a learning rate that is large enough for its dtype, or set requires_grad to "
        "False if this is meant",
    ),
    "not_finite": (
        "the first layer that returns values that are not finite: ",
        lambda figure: f"from {figure[0]:.3g} to {figure[1]:.3g}",
        "look at its inputs, and for log(0), a division by 0 and sqrt(0) in or before it; a smaller learning rate, "
        "ClipGradients, or bf16 instead of fp16; if all layers do, every: 1 updates finds where it begins in a new run",
    ),
    "same_output": (
        f"the same for all examples of a batch in {LOOKS} looks in a row: ",
        lambda figure: f"differences up to {figure[0]:.3g}, values up to {figure[1]:.3g}",
        "look for dead units, inputs that are not normalised, and a mean or softmax over the wrong axis; a smaller "
        "learning rate",
    ),
    "dead_units": (
        f"units that are 0 for all examples of at least {LOOKS} looks: ",
        lambda figure: f"{figure:.0%} of them",
        "a smaller learning rate, a warm-up, normalisation before the layer, or LeakyReLU",
    ),
    "dead_layer": (
        f"all units are 0 for all examples of at least {LOOKS} looks: ",
        lambda figure: "nothing passes",
        "a smaller learning rate, a warm-up, normalisation before the layer, LeakyReLU, or another start of the bias",
    ),
    "small_update": (
        f"updates are very small in {LOOKS} looks in a row, for the size of the weights: ",
        lambda figure: f"a ratio of {figure:.1e}",
        "about 1e-3 is usual: a larger learning rate, or look for a loss that is scaled down",
    ),
    "large_update": (
        f"updates are very large in {LOOKS} looks in a row, for the size of the weights: ",
        lambda figure: f"a ratio of {figure:.2g}",
        "about 1e-3 is usual: a smaller learning rate, a warm-up, or ClipGradients",
    ),
}
"""Verdict -> what it says, its figure in words, and what usually helps."""

_GIVEN = {
    "update": whole(),
    "iteration": whole(),
    "verdict": TEXT,
    "layers": sequence_of(TEXT),
    "figures": sequence_of(ANYTHING),
    "message": TEXT,
}
STATE = {"streaks": mapping_of(mapping_of(whole(_CLEARED))), "given": sequence_of(record(_GIVEN))}
"""The fields of `Verdicts.state_dict`."""


class Verdicts:
    """Decides from what the looks find which verdicts are given: each once, and again when the fault had gone."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []
        """Those that were given: update, iteration, verdict, layers, figures, message."""
        self._streaks: dict[str, dict[str, int]] = {}  # verdict -> layer -> looks in a row, see `_next`
        self._new: dict[str, dict[str, Any]] = {}  # verdict -> layer -> figure, of this look

    def add(self, verdict: str, layer: str, is_so: bool, figure: Any) -> None:
        """Add what a look has found.

        Args:
            verdict: a key of the words above.
            layer: a layer, a parameter or an output.
            is_so: whether the look has found the fault there.
            figure: what the message shows, as plain types.
        """
        streaks = self._streaks.setdefault(verdict, {})
        before = streaks.get(layer, 0)
        needed = 1 if verdict in _AT_ONCE else LOOKS
        now = _next(before, is_so, needed)
        if not is_so and verdict in _ONLY_FROM_THE_BEGINNING and now == 0:
            now = _CLEARED
        if now:
            streaks[layer] = now
        else:
            streaks.pop(layer, None)
        if is_so and before < needed <= now:
            self._new.setdefault(verdict, {})[layer] = figure

    def give(self, update: int, iteration: int) -> bool:
        """Log the new verdicts, and add them to those given; return whether there are any."""
        new, self._new = self._new, {}
        for verdict, found in new.items():
            begin, in_words, help_ = _WORDS[verdict]
            shown = [f"{layer} ({in_words(figure)})" for layer, figure in found.items()]
            more = f" and {len(shown) - _MOST} more" if len(shown) > _MOST else ""
            message = f"{begin}{', '.join(shown[:_MOST])}{more}. What usually helps: {help_}"
            _LOG.warning("Diagnose, update %d: %s", update, message)
            self.given.append(
                {
                    "update": update,
                    "iteration": iteration,
                    "verdict": verdict,
                    "layers": list(found),
                    "figures": list(found.values()),
                    "message": message,
                }
            )
        return bool(new)

    def write(self, path: Path) -> None:
        """Write the verdicts that were given to a file, a line of JSON for each; without any, there is no new file.

        Raises:
            StorageError: the file cannot be written.
        """
        plain = [{**each, "figures": [_plain(figure) for figure in each["figures"]]} for each in self.given]
        lines = [f"{json.dumps(each, allow_nan=False)}\n" for each in plain]
        if lines or path.exists():
            write_atomically(path, "".join(lines))

    def state_dict(self) -> dict[str, Any]:
        """Return the streaks and the verdicts."""
        return {"streaks": {name: dict(each) for name, each in self._streaks.items()}, "given": list(self.given)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._streaks = {name: dict(each) for name, each in state["streaks"].items()}
        self.given, self._new = [dict(each) for each in state["given"]], {}


def _plain(figure: Any) -> Any:
    """Return a figure in types that JSON has."""
    return [numbers(each) for each in figure] if isinstance(figure, list | tuple) else numbers(figure)


def _next(streak: int, is_so: bool, needed: int) -> int:
    """Return the next streak of a layer.

    It counts the looks that found the fault in a row. With `needed` of them the verdict is given, and the streak is at
    `needed + LOOKS - 1`; then it counts down the looks without the fault, until it may be given again.
    """
    if streak == _CLEARED:
        return _CLEARED
    full = needed + LOOKS - 1
    if streak >= needed:
        return full if is_so else (streak - 1 if streak > needed else 0)
    return (full if streak + 1 == needed else streak + 1) if is_so else 0
