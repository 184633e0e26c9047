"""`TorchModel`, and what it is put together from.

Read `torch_model`, then `inputs` (batches to tensors), `optimizer` (with the schedule) and `weights` (files).
The engine finds models by name and does not import this package.

May import: the root of emrun, `storage`.
"""
