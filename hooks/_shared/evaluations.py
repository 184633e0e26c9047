"""Hooks that save examples of the streams that are evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emrun.base.errors import ArgumentError, HookError
from emrun.base.types import Interval
from emrun.hook import Loop
from emrun.hooks._shared.examples import Examples
from emrun.hooks._shared.streams import OfStreams


class SavesExamples(OfStreams):
    """Saves examples of evaluations. Batches that the model is trained on are left out.

    The zeroth epoch evaluates the train stream too: it is left out, unless `streams` names it.

    Args:
        streams: the streams; None for all that are evaluated.
        every: how often files are written, in epochs.
        variables: the variables that are read.
        root_dir: the folder for all files, in the run directory.
        dataset: the dataset.
        output_dir: the run directory.

    Raises:
        ArgumentError: an argument has a value that is not allowed.
    """

    changes_batches = False

    def __init__(
        self,
        streams: Sequence[str] | None,
        every: int | str,
        variables: Sequence[str],
        root_dir: str,
        dataset: Any,
        output_dir: str | Path | None,
    ) -> None:
        super().__init__(streams, variables, dataset=dataset, output_dir=output_dir)
        self._every = Interval.parse("every", every)
        parts = Path(root_dir).parts if isinstance(root_dir, str) else ()
        if not parts or ".." in parts or Path(root_dir).is_absolute():
            raise ArgumentError("root_dir", f"{root_dir!r} is not a folder in the run directory")
        self._given_root = root_dir
        self.files = (f"{root_dir.rstrip('/')}/",)
        self.root = Path(output_dir or ".") / root_dir
        self._is_due = True
        self._epoch = self._count = self._batches = 0

    def register_mainloop(self, main_loop: Loop) -> None:
        """Check that the dataset has the streams, and that no other hook writes the same files.

        Raises:
            HookError: a check failed.
        """
        super().register_mainloop(main_loop)
        others = [hook for hook in main_loop.hooks if type(hook) is type(self) and hook is not self]
        if any(self.writes_same(other) for other in others):
            raise HookError(
                f"two hooks {type(self).__name__} write to {self._given_root}; set another root_dir for one of them",
                self._index,
                (self._given_root,),
            )

    def writes_same(self, other: Any) -> bool:
        """Return whether another hook of the class writes the same files."""
        return bool(self.root == other.root)

    def before_epoch(self, epoch_id: int) -> None:
        """Note the epoch: in `emrun eval`, that of the checkpoint."""
        self._epoch = self.main_loop.training_epochs_done if self.main_loop.evaluating else epoch_id
        self._is_due = self.main_loop.evaluating or epoch_id % self._every.count == 0

    def before_stream(self, stream_name: str) -> None:
        """Count the examples of the stream from 0."""
        self._count = self._batches = 0

    def looks_at(self, stream: str) -> bool:
        """Return whether the examples of a stream are saved now."""
        loop = self.main_loop
        if loop.training or not self._is_due or not super().looks_at(stream):
            return False
        return self._streams is not None or loop.evaluating or stream != loop.train_stream_name

    def next_batch(self, batch_data: dict[str, Any]) -> Examples:
        """Return the examples of a batch, and count them."""
        examples = Examples(type(self).__name__, batch_data, self.main_loop.batch_length, self._count)
        self._count += examples.count
        self._batches += 1
        return examples


def needed(*variables: str | None) -> list[str]:
    """Return the names of variables without those that are None, each once."""
    return list(dict.fromkeys(name for name in variables if name is not None))
