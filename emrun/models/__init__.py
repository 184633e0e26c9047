"""`TorchModel` and its parts.

Read `torch_model`, which trains, and `module_model`, which runs the module. Then read the parts in the order of a step:
`inputs` (batches to tensors; `prefetching` copies them ahead of time), `outputs` (with losses and metrics),
`stream_metrics` (metrics of whole streams; `object_state` is what checkpoints have of them), the packages `step`
(gradients and updates), `optimizers` and `schedules`.
`modes` and the package `weights` are about the module itself.
`precision`, `compilation`, `recomputation` and `memory_format` change how the module is called and what it keeps.
The engine finds models by name and does not import this package.

May import: the root, `base`, `ranks`, `storage`.
"""
