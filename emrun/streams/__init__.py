"""From a dataset's stream function to batches: in this thread, in another one, or in worker processes.

Read `stream_pass` (one pass and its position), `reading` (who reads, how far ahead), `stream` (passes, epochs, coming
back to a position by a `bookmark`), `read_ahead` (a thread), then `workers` and `worker_process` (the two ends of a
pipe, and `packing`, how a batch comes through it), `reuse` (batches whose memory the stream uses again), and
`dataset_streams` (the streams of a loop by name).

May import: the root of emrun.
"""
