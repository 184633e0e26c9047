"""The weights of a module: saved, loaded to begin with, exchanged for evaluations.

Read `saving` (how they are saved and loaded) and `loadable` (whether a resume could load them), then `init_from` (the
weights of a new run) with `fit` (which of them fit), and `averages` (other weights for evaluations) with `batch_norm`.
`over_ranks` keeps the weights of several ranks the same.

May import: what `models` may.
"""
