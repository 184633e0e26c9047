"""Checkpoints: directories that are committed by one rename, and what they hold.

Read `commits` (how a checkpoint is committed and named) with `manifest` (what it holds); `finding` says which one a
name means, and which is intact. `state_file` and `weights` are the formats of its files; `saved_weights` reads weights
that any program saved.

May import: what `storage` may.
"""
