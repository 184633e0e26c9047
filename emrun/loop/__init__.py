"""The training loop and its collaborators, each with one question to answer and a state that only it writes.

Read `epochs` first: an epoch, a stream, its batches. Then `dispatch` (how is a hook called), `endings` (what ends a
training, and when), `state` (where is it), `saving` (what is saved when), `session` (how does it begin and end), and
`main_loop`, which puts them together and is what users and hooks see. The others answer one small question each.

May import: the root of emrun, `streams`, `storage`.
"""
