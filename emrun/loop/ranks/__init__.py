"""The loop on several ranks; a reader of one process need not open this.

`requests` lets all ranks end a run, and save checkpoints, at the same point. `callbacks` says what each rank calls of
the hooks, `batches` which rows of a batch a rank has, `states` what each rank keeps of a state, `shards` how the ranks
write a checkpoint together. `hangs` says that a rank hangs.

May import: what `loop` may.
"""
