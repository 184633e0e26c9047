"""From a dataset's stream function to batches: in this thread, in another one, or in worker processes.

Read `stream_pass` (one pass and its position), `stream` (passes, epochs, coming back to a position), then `read_ahead`
and `workers` (who reads), and `reuse` (batches whose memory the stream uses again).

May import: the root of emrun.
"""
