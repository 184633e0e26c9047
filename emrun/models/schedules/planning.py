"""The plan of the learning rates of a model: its schedule, and how long the loop says the run will be."""

from __future__ import annotations

from emrun.base.errors import StateError
from emrun.base.types import Horizon
from emrun.hook import Loop
from emrun.models.schedules.closed_form import REPLAN, ClosedForm
from emrun.models.schedules.stepping import Scheduler
from emrun.schedule_plan import SchedulePlan


def horizon_of(loop: Loop | None) -> Horizon:
    """Return how long the run will be; without a loop, this is not known."""
    return Horizon(None, missing="the model does not belong to a main loop") if loop is None else loop.horizon


def plan_of(scheduler: Scheduler | ClosedForm, loop: Loop) -> tuple[SchedulePlan, bool]:
    """Return the plan of a schedule, and whether the zeroth epoch will tell more.

    Raises:
        ArgumentError: the schedule does not fit the length of the run.
    """
    horizon, limits, fixed = loop.horizon, loop.limits, loop.fixed_epoch_size
    if isinstance(scheduler, ClosedForm):
        return scheduler.shown(horizon), scheduler.is_awaited(horizon) and not scheduler.plans
    if horizon.share is not None:
        horizon = Horizon(None, horizon.updates_per_pass, "time ends the run")
    epochs = [limits[unit] for unit in ("epochs", "passes") if unit in limits and not (fixed and unit == "passes")]
    epoch = -(-fixed // loop.model.iterations_per_update) if fixed else horizon.updates_per_pass
    if horizon.updates is not None and epoch is not None:
        epochs.append(horizon.updates // epoch)
    is_known = (horizon.updates if scheduler.on_update else epochs or None) is not None
    is_due = horizon.is_awaited and scheduler.metric is None and not is_known
    return scheduler.shown(horizon, min(epochs, default=None)), is_due


def check_length(scheduler: Scheduler | ClosedForm, loop: Loop | None, key: str = "model.scheduler") -> None:
    """Check that a run with a loaded schedule may have the length that the loop gives it now.

    Args:
        scheduler: the schedule.
        loop: the loop.
        key: the key of the schedule in the config.

    Raises:
        StateError: the length has changed, and with it the rates of updates that were made; or the schedule is over,
            and nothing limits the updates of the run any more.
    """
    if not isinstance(scheduler, ClosedForm):
        return
    horizon = horizon_of(loop)
    refusal = scheduler.refusal(horizon)
    if refusal is None and loop is not None and loop.has_run and horizon.updates is None:
        refusal = scheduler.refusal_without_end()
    if refusal is not None:
        raise StateError(f"{key}: {refusal.replace(REPLAN, f'{key}.on_extend=replan')}")
