"""`TorchModel` and its parts.

Read `torch_model` first: the documented face, with the methods that a subclass may override and the events of the
loop. It owns a `ForwardPass`, `Optimizers`, `Weights` and a `TrainingStep`, each in a file or a package of its own:

- `forward_pass`: sources become tensors (`inputs`, `scaling`; `prefetching` copies them ahead of time), the module runs
  (`precision`, `compilation`, `recomputation`, `memory_format`, `device`), and `outputs` adds losses and metrics.
- `step`: gradients and updates; the table in its docstring says which kind of step a model has.
- `optimizers` and `schedules`: how they are built from the config, how they step, how they are saved and loaded.
- `weights`: checkpoints, averages, the weights that a run begins with.

`module_model` has what models of finished runs (`ensemble`, `sequence`) tell, too; `stream_metrics` is about metrics of
whole streams (`object_state` is what checkpoints have of them). `sync_batch_norm` and `sharding` are for several ranks,
`ways` compares a step with the same one without compilation, parts or 16 bits.
The engine finds models by name and does not import this package.

May import: the root, `base`, `ranks`, `storage`.
"""
