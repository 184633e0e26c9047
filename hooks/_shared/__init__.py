"""What several hooks use: when an interval has passed, values of batches as columns, rows and pictures of examples.

May import: what `hooks` may.
"""
