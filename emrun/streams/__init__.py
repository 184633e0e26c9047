"""Reads batches from a dataset's stream functions: in the thread of the loop, in another thread, or in workers.

Read `stream_pass` (one pass and its position), `reading` (which thread or processes read, and how far ahead), `stream`
(passes, epochs, and how a `bookmark` restores a position), `read_ahead` (the reader thread), then `workers` and
`worker_process` (the two ends of a pipe) with `packing` (how a batch goes through the pipe), `reuse` (streams that use
the memory of a batch again), and `dataset_streams` (the streams of a loop by name).

May import: the root, `base`, `ranks`.
"""
