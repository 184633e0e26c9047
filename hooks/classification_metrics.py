"""Precision, recall, F1 score, accuracy and specificity of predicted classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from emrun.base.arguments import check_choice
from emrun.base.errors import ArgumentError, HookError
from emrun.base.types import EpochData
from emrun.epoch_data import declared
from emrun.hook import Loop
from emrun.hooks._shared.class_counts import MOST, ClassHook, Counted

Average = Literal["binary", "micro", "macro", "weighted"]
_BY_CLASS = ("precision", "recall", "f1", "specificity")


class ClassificationMetrics(ClassHook):
    """Computes precision, recall, F1 score, accuracy and specificity of predicted classes over each stream.

        hooks:
          - ClassificationMetrics: {predicted_variable: logits, gt_variable: label, var_prefix: class_}
          - SaveBest: {variable: class_f1, condition: max}

    Without `f1_average`, precision, recall, F1 score and specificity have a value for each class, such as
    `valid/f1/cat`, and their `mean` over the classes that occur. The classes have the names that `classes_names` or the
    dataset gives them, else their numbers. The accuracy is one number; with `macro`, the mean of those of the classes.

    The values are those of scikit-learn's `precision_recall_fscore_support` with `zero_division=0`: a value that would
    be 0/0 is 0, and classes that are neither labels nor predictions of the stream do not count in an average. The
    specificity of a class is the share of the examples of other classes that were predicted as another class.

    Predictions are class numbers of the same shape as the labels, or logits of shape (B, C, ...), of which the largest
    counts, with labels of shape (B, ...) or (B, 1, ...). Each place of a sequence counts as an example. Classes are
    numbers from 0; the output of a model with one logit for two classes must be compared with 0 in the model. Only the
    counts of the confusion matrix are kept: the memory does not grow with the examples.

    Args:
        predicted_variable: the output with the predictions.
        gt_variable: the source with the true classes.
        f1_average: one number instead of one for each class: `binary`, the value of class 1 of two classes; `macro`,
            the mean over the classes; `weighted`, the mean weighted by the number of labels of each class; or `micro`,
            of the counts of all classes together.
        var_prefix: what the names of the statistics begin with, if another hook writes the same names.
        mask_name: a variable of the shape of the labels; where it is 0, such as in padding, nothing counts.
        classes_names: the names of the classes, in the order of their numbers; by default those of the dataset.
        streams: the streams whose predictions are compared; by default all.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
        HookError: another hook, or the model, writes a statistic of the same name, the dataset does not have one of
            `streams`, or its names are not a list of names.
        StreamError: a batch lacks a variable, the shapes do not fit, the values are not class numbers, there is another
            number of classes than of names, or there are more than 2,000 classes.
    """

    def __init__(
        self,
        predicted_variable: str,
        gt_variable: str,
        f1_average: Average | None = None,
        var_prefix: str = "",
        mask_name: str | None = None,
        classes_names: Sequence[str] | None = None,
        streams: Sequence[str] | None = None,
        dataset: Any = None,
    ) -> None:
        most = 2 if f1_average == "binary" else MOST
        super().__init__(predicted_variable, gt_variable, mask_name, classes_names, streams, dataset, most=most)
        if f1_average is not None:
            check_choice("f1_average", f1_average, Average)
        names = self._names
        if f1_average is None and "mean" in (names or ()):
            raise ArgumentError(
                "classes_names", "'mean' is the name of the average; rename the class, or set f1_average"
            )
        if f1_average == "binary" and names is not None and len(names) != 2:
            raise ArgumentError("f1_average", f"'binary' needs two classes, not {len(names)}")
        self._average = f1_average
        self._prefix = var_prefix
        classes = ["mean", *names] if f1_average is None and names is not None else []
        by_class = [f"{name}/{part}" if part else name for name in _BY_CLASS for part in classes or [""]]
        self.writes = tuple(f"{var_prefix}{name}" for name in (*by_class, "accuracy"))

    def register_mainloop(self, main_loop: Loop) -> None:
        """Check the streams, and that nothing else writes a statistic of the same name.

        Raises:
            HookError: a check failed.
        """
        super().register_mainloop(main_loop)
        self._check_writes()

    def before_training(self) -> None:
        """Check the names again, when all hooks know what they write."""
        self._check_writes()

    def _check_writes(self) -> None:
        names = {name.partition("/")[0] for name in self.writes}
        for other in (*self.main_loop.hooks, self.main_loop.model):
            clashing = sorted(names & {name.partition("/")[0] for name in declared(other, "writes") or ()})
            if clashing and other is not self:
                kind = type(other).__name__
                raise HookError(
                    f"ClassificationMetrics: {kind} writes {clashing[0]!r} too; set another var_prefix, such as class_",
                    self._index,
                    (self._prefix,) if self._prefix else (),
                )

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Add the statistics to the data of the epoch."""
        for stream, matrix in self.matrices():
            for name, value in self._statistics(matrix).items():
                epoch_data.setdefault(stream, {})[f"{self._prefix}{name}"] = value

    def _statistics(self, matrix: Counted) -> dict[str, Any]:
        """Return name -> value of the statistics."""
        right = matrix.diagonal().astype(np.float64)
        predicted = matrix.sum(0).astype(np.float64)
        true = matrix.sum(1).astype(np.float64)
        total = true.sum()
        others = total - true
        right_others = total - true - predicted + right
        parts = {
            "precision": (right, predicted),
            "recall": (right, true),
            "f1": (2 * right, predicted + true),
            "specificity": (right_others, others),
        }
        averaged = {name: self._averaged(*pair, true, predicted) for name, pair in parts.items()}
        accuracy = float(_divided(right.sum(), total))
        return {**averaged, "accuracy": averaged["recall"] if self._average == "macro" else accuracy}

    def _averaged(self, above: Counted, below: Counted, true: Counted, predicted: Counted) -> Any:
        """Return the average of a value for each class, or a mapping with all values and their mean."""
        if self._average == "micro":
            return float(_divided(above.sum(), below.sum()))
        values = _divided(above, below)
        weights: Any = true + predicted > 0  # of classes that occur
        if self._average == "binary":
            weights = np.arange(len(values)) == 1
        elif self._average == "weighted":
            weights = true
        mean = float(_divided((values * weights).sum(), weights.sum()))
        if self._average is not None:
            return mean
        names: Sequence[Any] = range(len(values)) if self._names is None else self._names
        return {"mean": mean, **{str(name): float(value) for name, value in zip(names, values, strict=True)}}


def _divided(above: Any, below: Any) -> Counted:
    """Return a quotient, 0 where it would be 0/0."""
    divisor = np.asarray(below, np.float64)
    quotient: Counted = np.divide(above, divisor, out=np.zeros_like(divisor), where=divisor > 0)
    return quotient
