"""Words and tools that know nothing of training.

Read `errors` (what emrun raises for users) with `wording` (parts of messages), `types` (what contracts, configs and
hooks share) and `arguments` (checks of values). `encoding` turns states and batches into plain types and tensors,
`fields` checks what a file has, `sources` counts the examples of a batch. `randomness` has seeds, `censor` keeps values
of the environment out of what emrun writes. `lazy`, `slow_start` and `user_modules` are about imports; `temporary`,
`terminal` and `signals` about the system.

May import: nothing of emrun.
"""
