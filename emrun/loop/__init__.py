"""The training loop and its parts. Each part answers one question, and nothing else writes its state.

Read `epochs` first: an epoch, its streams, their batches. Then `dispatch` (how are hooks called), `endings` (what ends
the training, and when), `state` (where is the training), `saving` (what is saved when), `session` (how does the loop
begin and end), and `main_loop`, which combines them and is what users see; `answers` is what hooks may ask of it. The
other modules are small.

May import: the root of emrun, `base`, `ranks`, `streams`, `storage`.
"""
