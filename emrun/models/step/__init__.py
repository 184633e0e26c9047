"""The step of a `TorchModel`: what it does with a train batch, chosen once when the model is built.

Each kind of step says how gradients come about; Updater makes the updates of all of them (hooks, the step of the
optimizer, its schedule), and SkippedUpdates counts those that are not made. `choice` chooses the kind:

    model                                     a batch is an update    a window of batches, or parts of a batch
    ----------------------------------------  ----------------------  ----------------------------------------
    one process                               SingleStep              AccumulatedStep
    one process, fp16                         ScaledStep              AccumulatedScaledStep
    several ranks                             SummedBatchStep         SummedStep
    several ranks, several optimizers or a
    subclass that trains in its own way       SummedStep              SummedStep
    several ranks that share the weights      ShardedStep             ShardedStep

When an update is made, the gradients are complete and unscaled in each kind of step. Updater.update, in its order: the
hooks before the update, the learning rates, whether it is skipped or its loss refused, the step of the optimizer, the
hooks after it.

A batch that is split is run by MicroBatches, which gives its parts to such a step. The training of a subclass that
trains in its own way is called by Manual, in each kind of step.

Read `training_step` (the base class, with the plain forward and backward), `single` and `updater`; then `accumulated`,
`micro_batches` (`size_search` is about full memory), `summed` with `gradient_sums`, and `sharded`. `loss_scale` is the
scale of float16; `halves` finds losses that look at a whole batch; `gradients` has functions for gradients.

May import: what `models` may.
"""
