"""The files of a run, cut off at any byte: `emrun resume` goes on or says what is wrong, never with a traceback.

Taken out once by hand, reading a trace that is no YAML any more as nothing made this fail.
"""

import json
import shutil

import pytest
from campaign import thinned

RESUME = ("resume", "-q", "run", "hooks.StopAfter.epochs=3", "name=other")
NAMES = ("config.yaml", "trace.yaml", "metrics.jsonl", "code/record.json", "code/batches.jsonl")


@pytest.fixture(scope="module")
def whole(small, finished_run, tmp_path_factory):
    """The directory of a project with a finished run, and the result of the run."""
    place = tmp_path_factory.mktemp("whole")
    (place / "config.yaml").write_text(json.dumps(small.config, indent=2))
    shutil.copytree(finished_run, place / "whole", symlinks=True)
    return place, small.result(place / "whole", ("latest", "best"))


@pytest.mark.timeout(7200)
@pytest.mark.fault("config.yaml, trace.yaml, metrics.jsonl, code/ cut at every byte", share=5)
@pytest.mark.parametrize("name", thinned(NAMES, ["config.yaml", "code/record.json"]))
def test_a_file_of_a_run_cut_at_any_byte_never_shows_a_traceback(whole, small, trials, name):
    project, expected = whole
    content = (project / "whole" / name).read_bytes()
    for trial in trials(range(len(content)), small=2 if name.startswith("code") else 6):
        shutil.rmtree(project / "run", ignore_errors=True)
        shutil.copytree(project / "whole", project / "run", symlinks=True)
        (project / "run" / name).write_bytes(content[: trial.case])
        with trial:
            with trial.telling():
                done = small.command(*RESUME, cwd=project)
                assert done.returncode in ((0, 2) if name == "config.yaml" else (0,)), done.stderr
                assert "Traceback" not in done.stderr
                assert done.returncode == 0 or "config.yaml" in done.stderr or "this resume changes" in done.stderr
            if done.returncode:  # as it was, with the config put back
                (project / "run" / name).write_bytes(content)
                with trial.reading():
                    assert small.command("resume", "run", cwd=project).returncode == 0
                assert small.result(project / "run", ("latest", "best")) == expected
