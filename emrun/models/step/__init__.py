"""The step of a `TorchModel`: what it does with a train batch, chosen once when the model is built.

`plain` makes an update with each batch, as PyTorch's own loop does; `windows` adds up the gradients of several batches,
or of the parts of a batch (`micro_batches`; `size_search` is about full memory). Their losses are scaled (`scaled`,
float16), and their gradients summed over ranks (`summed`). `own` is for subclasses that train in their own way. All of
them make their updates as `plain` does: hooks, the step of the optimizer, its schedule; `skipped_updates` counts those
that are not made. `gradients` has functions for gradients.

May import: what `models` may.
"""
