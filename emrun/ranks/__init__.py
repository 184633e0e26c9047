"""The ranks of a run: the processes that train one model together, each on its own rows of every batch.

Read `group` (who the ranks are, how they meet, what they exchange), `shares` (the rows of a batch that a rank has),
`parts` (the rows of sources and outputs, apart and joined) and `gather` (tensors of all ranks, with gradients).

May import: `base`.
"""
