"""The schedules of learning rates: emrun's own, and how those of torch step, are shown and are resumed.

Read `stepping` (when a schedule steps, and how it is resumed) and `preview` (torch's schedulers are run ahead of the
training). emrun's own are in `built_in`: `closed_form` is their base class, `curves` has functions that give the rate
of each update, and `part_lengths` how long a warm-up or a cooldown is. `emrun.models.optimizers` uses them.

May import: what `models` may.
"""
