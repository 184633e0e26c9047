"""The optimizers of a `TorchModel`: built from a config, stepped, shown, saved and loaded.

Read `named` first: a model has `Optimizers`, by their names; most models have one, without a name. Each of them is a
`ScheduledOptimizer` of `scheduled`: an optimizer of torch, its schedule (`emrun.models.schedules`) and the learning
rates of its last update. What it does with them is in files that know nothing of schedules:

- `build` makes an optimizer from its form in the config, over the parameter groups that `groups` makes.
- `state` says what a checkpoint holds of it, and how a resume checks and loads that.
- `bare_step` is about time: the step without torch's wrapper.
- `parameters` finds parameters of optimizers, and their names in a module.

May import: what `models` may.
"""
