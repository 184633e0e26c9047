"""`TorchModel`, and what it is put together from.

Read `torch_model`, which trains, and `module_model`, which runs the module. Then in the order of a step: `inputs`
(batches to tensors; `prefetching` copies them ahead), `outputs` (losses and metrics too), `updates` (gradients and
traces), `optimizer` and `schedule`. Of the module itself: `laziness`, and `weights`, which tells whether a resume could
load them; for that `built_apart` builds the module once more.
The engine finds models by name and does not import this package.

May import: the root of emrun, `storage`.
"""
