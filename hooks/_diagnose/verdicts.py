"""The verdicts of Diagnose: when one is given, and its words."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

_LOG = logging.getLogger(__name__)

LOOKS = 3
"""How many looks in a row must find most of the faults."""
_MOST = 5  # layers in a line of the log
_ONLY_FROM_THE_BEGINNING = ("never_moves", "small_update")

_WORDS: dict[str, tuple[str, Callable[[Any], str], str]] = {
    "no_gradient": (
        f"no gradient in {LOOKS} looks in a row: ",
        lambda figure: "None" if figure is None else "all 0",
        "the loss does not depend on it, or what comes after it is dead: look for detach(), no_grad() and dead units, "
        "or set requires_grad to False if this is meant",
    ),
    "never_moves": (
        "never changes: ",
        lambda figure: "no learning rate" if figure is None else f"learning rate {figure:.3g}",
        "a learning rate that is large enough for its dtype, or requires_grad False if this is meant",
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


Finding = tuple[str, str, bool, Any]
"""A verdict, a layer, whether a look has found this fault there, and the figure that the message shows."""


class Verdicts:
    """Decides from what the looks find which verdicts are given, each once for a layer."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []
        """The verdicts of this process: `update`, `verdict`, and `layers` with what usually `helps`."""
        self._streaks: dict[tuple[str, str], int] = {}  # verdict and layer -> how many looks in a row have found it
        self._settled: set[tuple[str, str]] = set()  # verdicts and layers that are not judged any more

    def give(self, update: int, findings: Sequence[Finding], *, is_resumed: bool) -> None:
        """Log the verdicts that are new after a look.

        Args:
            update: the update of the look.
            findings: what the look has found, and where it has found nothing.
            is_resumed: whether the first look was after a resume.
        """
        new: dict[str, dict[str, Any]] = {}  # verdict -> layer -> figure
        for verdict, layer, is_so, figure in findings:
            key = (verdict, layer)
            is_early = verdict in _ONLY_FROM_THE_BEGINNING
            if key in self._settled or (is_early and is_resumed):
                continue
            streak = self._streaks[key] = self._streaks.get(key, 0) + 1 if is_so else 0
            if streak == (1 if verdict == "not_finite" else LOOKS):
                new.setdefault(verdict, {})[layer] = figure
                self._settled.add(key)
            elif is_early and not is_so:
                self._settled.add(key)
        for verdict, figures in new.items():
            begin, in_words, help_ = _WORDS[verdict]
            shown = [f"{layer} ({in_words(figure)})" for layer, figure in figures.items()]
            more = f" and {len(shown) - _MOST} more" if len(shown) > _MOST else ""
            layers = f"{', '.join(shown[:_MOST])}{more}"
            self.given.append({"update": update, "verdict": verdict, "layers": list(figures), "helps": help_})
            _LOG.warning("Diagnose, update %d: %s%s. What usually helps: %s", update, begin, layers, help_)
