"""What a run was made from, besides its config.

Read `snapshot` (written by a thread when the training begins), then `files` (the files of the record, and checksums of
what each stream gave first) and `git` (questions to git).

May import: what `storage` may.
"""
