"""Tools that run parts of a config to find out whether it works.

`tryout` with `round_trip` and `model_facts` is `emrun check`. `verification` is `emrun verify-resume`: it starts the
processes of `recorded_trainings`, which run `probe`, and compares them with `differences`. `replay` is `emrun replay`,
`stream_bench` is `emrun bench`. `private_state` finds state that is saved in no checkpoint.

May import: the root, `base`, `ranks`, `config`, `streams`, `storage`, `record`, `loop`, `runs`, `training`, `launch`.
"""
