"""What a run was made from, besides its config.

Read `record` (written by a thread when the training begins), then `files` (the files of the record), `git` (questions
to git) and `first_batches` (checksums of what each stream gave first).

May import: what `storage` may.
"""
