"""What may have changed when a run is resumed: nothing, the config, the length of the dataset; and once more.

Taken out once by hand, looking whether the run is finished made this fail.
"""

import shutil

import pytest

from emrun.models.torch_model import TorchModel

TRAIN = ("train", "-q", "config.yaml", "--output-dir", "run")
CASES = (
    "finished",
    "finished, by the command that started it",
    "resumed twice",
    "finished, with another end",
    "another config by the command that started it",
    "what cannot be changed",
    "a shorter dataset",
    "a dataset shorter than the position",
)


def stopped_at(number):
    """End the process before the n-th batch."""
    import os

    run, count = TorchModel.run, 0

    def counted(*arguments):
        nonlocal count
        count += 1
        if count == number:
            os._exit(9)
        return run(*arguments)

    TorchModel.run = counted


@pytest.mark.campaign  # tests/cli/test_resume.py has another config, tests/training/test_resume.py most others
@pytest.mark.timeout(7200)
@pytest.mark.fault("a run is resumed twice, when finished, with another config, with a shorter dataset")
def test_a_run_that_is_resumed_goes_on_or_says_why_not(project, small, finished_run, expected, trials):
    def command(*arguments, at=None):
        prepare = None if at is None else lambda: stopped_at(at)
        return small.command(*arguments, cwd=project, prepare=prepare)

    def result():
        return small.result(project / "run", ("latest", "best"))

    def files():
        written = ("train.log", ".owner.json")  # by every process that looks at the run
        own = (path for path in (project / "run").rglob("*") if path.is_file() and path.name not in written)
        return {path: path.read_bytes() for path in own}

    for trial in trials(CASES, small=8):
        case = trial.case
        shutil.rmtree(project / "run", ignore_errors=True)
        if case.startswith("finished"):
            shutil.copytree(finished_run, project / "run", symlinks=True)
        else:
            assert command(*TRAIN, at=28).returncode == 9
        before = files()
        with trial, trial.telling():
            if case == "finished":
                done = command("resume", "run")
                assert done.returncode == 0
                assert "nothing to do: the run is finished" in done.stderr
                assert files() == before
            elif case == "finished, by the command that started it":
                done = command(*TRAIN, "--auto-resume")
                assert (done.returncode, done.stdout) == (0, "")
                assert files() == before
            elif case == "resumed twice":
                assert command("resume", "-q", "run", at=6).returncode == 9
                assert command("resume", "-q", "run").returncode == 0
                assert "nothing to do" in command("resume", "run").stderr
                assert result() == expected
            elif case == "finished, with another end":
                assert command("resume", "-q", "run", "hooks.StopAfter.epochs=4").returncode == 0
                assert [line["epoch"] for line in result()["metrics"]] == [0, 1, 2, 3, 4]
                assert result()["metrics"][:4] == expected["metrics"]
            elif case == "another config by the command that started it":
                done = command(*TRAIN, "--auto-resume", "model.optimizer.lr=1.0", "seed=6")
                assert done.returncode == 2
                assert "with other values (seed: " in done.stderr
                assert files() == before
            elif case == "what cannot be changed":
                done = command("resume", "-q", "run", "model.optimizer.class=SGD")
                assert done.returncode == 2
                assert "model.optimizer is SGD, but was Adam" in done.stderr
                assert files() == before
            else:
                n = 50 if case == "a shorter dataset" else 5
                done = command("resume", "run", f"dataset.n={n}", "dataset.dim=11")
                assert "Traceback" not in done.stderr, done.stderr
                if n == 5:
                    assert done.returncode == 2
                    assert "is beyond its end" in done.stderr
                    done = command("resume", "run", "dataset.n=60")
                    assert result()["metrics"] == expected["metrics"]
                else:
                    assert "this resume is not exact: stream 'train'" in done.stderr
                assert done.returncode == 0, done.stderr
            assert "Traceback" not in command("resume", "run").stderr
