"""What learns about a training by running it.

Read `trial` (`emrun check`) with `round_trip` and `model_facts`; `verification` (`emrun verify-resume`) with
`recorded_trainings`, whose processes run `probe`, and `differences`; `replay`; `stream_bench`. `private_state` is what
no checkpoint has.

May import: the root of emrun, `config`, `streams`, `storage`, `loop`, `training`.
"""
