"""`emrun check --numerics`: a model computes the same in each way in which it can be run, shown on two real batches.

Read `proof` first: it builds the model and makes the table. `rows` has the words of a row, `gradients` measures the
gradients of a batch and compares two of them. The comparisons: `halves` (a batch and its halves), `ways` (compiled, in
16 bits, in parts, recomputed), `passes` (evaluated twice, saved and loaded), `on_ranks` and `fresh`, which start
other processes.

May import: what `diagnosis` may.
"""
