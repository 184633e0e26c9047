"""The schedules of learning rates: emrun's own, and how those of torch step, are shown and are resumed.

A schedule sets the learning rates of the parameter groups of one optimizer. Read `stepping` first: it builds a schedule
from its form in the config, which gives one of two kinds, with the same methods.

- `stepping.Scheduler` has one of torch's schedulers, which keep a state that each step changes. The file says when it
  steps, what a checkpoint has of it, and how a resume takes arguments that the config has changed since. Only a copy
  that is run ahead of the training, in `preview`, shows the rates of a whole run.
- `closed_form.ClosedForm` is the base class of emrun's own, which calculate the share of the rate from the number of
  updates done and the horizon: how long the run will be. So a run that a resume makes longer has the rates of a run
  that had this length from its beginning, or is refused. `curves` makes one function of the warm-up, the schedule and
  the cool-down, whose `lengths` may be shares of the run. The classes are in `built_in`; a new one needs one method.

The optimizers of `emrun.models.optimizers` step their schedules, and tell them how long the run will be.

May import: what `models` may.
"""
