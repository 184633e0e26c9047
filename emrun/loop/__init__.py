"""The training loop and its parts. Each part answers one question, and nothing else writes its state.

Read `batches` first: the path of a batch. `training` says which streams an epoch has, and which epochs follow one
another. Then `callbacks` (how are hooks called), `requests` (what do hooks, limits and signals want), `progress` (where
is the training), `checkpointer` (what is saved when), `snapshot` (what does a checkpoint hold), `session` (how does the
loop begin and end), `parts` (how are all of them built), and `main_loop`, which is what users see; `emrun.hook.Loop` is
what hooks may ask of it. `ranks` is what several ranks add.

May import: the root, `base`, `ranks`, `streams`, `storage`, `record`.
"""
