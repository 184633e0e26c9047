"""The ranks of a run: the processes that train one model together, each on its own rows of every batch.

Read `group` (who the ranks are, how they meet, what they exchange), `shares` (the rows of a batch that a rank has),
`parts` (the rows of sources and outputs, apart and joined), `gather` (tensors of all ranks, with gradients) and
`process_end` (how a process ends).

May import: `base`.
"""
