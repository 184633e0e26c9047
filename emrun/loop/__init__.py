"""The training loop and its parts. Each part answers one question, and nothing else writes its state.

Read `epochs` first: an epoch, its streams, their batches. `whole_training` says which epochs follow one another. Then
`dispatch` (how are hooks called), `endings` (what ends the training, and when), `state` (where is the training),
`saving` (what is saved when), `session` (how does the loop begin and end), and `main_loop`, which combines them and is
what users see; `emrun.hook.Loop` is what hooks may ask of it. Most other modules are parts that listen, as hooks do, to
batches and to the end of an epoch; see `batch_calls`.

May import: the root, `base`, `ranks`, `streams`, `storage`, `record`.
"""
