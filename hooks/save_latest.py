"""Save a checkpoint after every epoch, in place of the previous one."""

from __future__ import annotations

from collections.abc import Mapping

from emrun.base.arguments import check_choice
from emrun.base.errors import HookError
from emrun.base.types import EpochData, Policy
from emrun.hook import AbstractHook, Loop


class SaveLatest(AbstractHook):
    """Saves the checkpoint `latest` after every epoch, in place of the previous one.

    emrun adds this hook to every config that does not list it.

        hooks:
          - SaveLatest: {on_save_failure: warn}

    Args:
        on_save_failure: what to do if the checkpoint cannot be saved, for whatever reason: `error`, `warn` or
            `ignore`.

    Raises:
        ArgumentError: `on_save_failure` has another value.
        HookError: there is no run directory.
    """

    name = "latest"

    def __init__(self, on_save_failure: Policy = "error") -> None:
        super().__init__()
        check_choice("on_save_failure", on_save_failure, Policy)
        self._on_save_failure = on_save_failure

    def register_mainloop(self, main_loop: Loop) -> None:
        """Check that there is a run directory for the checkpoints."""
        super().register_mainloop(main_loop)
        if not main_loop.has_run:
            raise HookError(f"{type(self).__name__} saves checkpoints, but the main loop has no run directory")

    def after_epoch(self, epoch_id: int, epoch_data: EpochData) -> None:
        """Request the checkpoint."""
        self.main_loop.request_checkpoint(self.name, self._on_save_failure)

    def most_kept(self, done: Mapping[str, float]) -> float | None:
        """Return how many checkpoints a run keeps at most of this hook; None if this is not known.

        Args:
            done: the `epochs`, `updates` and `iterations` of the run, as far as they are known.
        """
        return 1
