"""`TorchModel`, and what it is put together from.

Read `torch_model`, then in the order of a step: `inputs` (batches to tensors; `prefetching` copies them ahead),
`updates` (gradients and traces), `optimizer` and `schedule` (`saved_values` checks what a checkpoint has of them).
What is saved of a module: `structure`, `laziness`, `weights`; `built_apart` builds the structure once more.
The engine finds models by name and does not import this package.

May import: the root of emrun, `storage`.
"""
