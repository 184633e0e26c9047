"""Modules of the current directory that have the names of Python's or of emrun's, and worker processes.

Taken out once by hand, each of these made this fail: PYTHONSAFEPATH while the processes are started (`random.py`, by
forkserver); the path without the current directory while they are (`emrun.py`, by spawn).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

METHODS = ("forkserver", "spawn", "fork")
COMMANDS = {"emrun": [str(Path(sys.executable).with_name("emrun"))], "python -m emrun": [sys.executable, "-m", "emrun"]}
SHADOWS = ["random", "emrun", "datasets"]

PARTS = """
import os
import pathlib

import numpy as np
import beside

FILES = {name: f"import pathlib, os; pathlib.Path('ran').write_text(f'{name} {os.getpid()}')" for name in NAMES}


class Data:
    def __init__(self):
        for name, text in FILES.items():  # not before, as Python's -m runs an emrun.py of the current directory
            pathlib.Path(f"{name}.py").write_text(text)

    def train_stream(self, ctx):
        import beside_too
        assert "PYTHONSAFEPATH" not in os.environ
        for rows in ctx.batches(16, 4, shuffle=True):
            yield {"x": np.ones((len(rows), 3), np.float32)}
"""

CONFIG = {
    "seed": 5,
    "dataset": {"class": "parts.Data"},
    "model": {
        "module": {"class": "torch.nn.Linear", "in_features": 3, "out_features": 1},
        "inputs": ["x"],
        "outputs": ["loss"],
        "optimizer": {"class": "SGD", "lr": 0.1},
    },
    "main_loop": {"skip_zeroth_epoch": True, "workers": 1},
    "hooks": [{"StopAfter": {"epochs": 1}}],
}


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.fault(
    "a module of the current directory has the name of one of Python's or emrun's, beside worker processes"
)
def test_no_module_of_the_current_directory_is_imported_for_one_of_pythons(tmp_path, trials):
    cases = [(method, command) for method in METHODS for command in COMMANDS] * 2
    for trial in trials(list(enumerate(cases)), small=1):
        number, (method, command) = trial.case
        place = tmp_path / str(number)
        place.mkdir()
        (place / "parts.py").write_text(PARTS.replace("NAMES", repr(SHADOWS)))
        for name in ("beside", "beside_too"):  # the user's own modules are found
            (place / f"{name}.py").touch()
        (place / "config.yaml").write_text(json.dumps(CONFIG))
        with trial:
            arguments = ["train", "-q", "config.yaml", f"main_loop.start_method={method}"]
            done = subprocess.run(
                [*COMMANDS[command], *arguments], cwd=place, capture_output=True, text=True, timeout=200
            )
            assert done.returncode == 0, done.stderr
            with trial.telling():
                assert not (place / "ran").exists(), (place / "ran").read_text()
