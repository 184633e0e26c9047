"""What `emrun train --json` and `emrun resume --json` print: one object, and everything else on standard error."""

import json
import re

from click.testing import CliRunner

from emrun.cli import emrun as commands

NOISY = "\n\nprint('noise of the code')\n"


def printed(*arguments):
    done = CliRunner().invoke(commands, [*arguments, "--json"], standalone_mode=False)
    return done.return_value, json.loads(done.stdout), done.stderr


def test_a_run_is_one_object_and_a_resume_of_it_too(project):
    status, found, log = printed("train", "config.yaml", "--output-dir", "run", "hooks.StopAfter.epochs=2")
    assert (status, found["status"], found["exit_status"], found["epochs"]) == (0, "finished", 0, 2)
    assert found["directory"] == str(project / "run")
    rows = [json.loads(line) for line in (project / "run" / "metrics.jsonl").read_text().splitlines()]
    assert found["last"]["streams"] == rows[-1]["streams"]
    best = found["best"]
    stream, variable, aggregation = best["statistic"].split("/")
    assert best["value"] == rows[best["epoch"]]["streams"][stream][variable][aggregation]
    assert found["seconds"]["training"] > 0
    assert found["examples_per_second"] > 0
    assert found["peak_memory"]["process"] > 1_000_000
    assert (found["resume"], found["verdicts"]) == (None, [])
    assert "epoch 2" in log
    status, again, _ = printed("resume", "run")
    assert status == 0
    assert again == {**{name: found[name] for name in again}, "directory": "run"}


def test_a_run_that_fails_says_where_it_is_and_how_to_resume(project):
    module = next(project.glob("*.py"))
    module.write_text(module.read_text() + NOISY)
    (project / "fails.py").write_text(
        "import emrun\n\n\nclass Fails(emrun.AbstractHook):\n    def before_epoch(self, epoch_id):\n"
        "        print('noise')\n        1 / (2 - epoch_id)\n"
    )
    status, found, log = printed("train", "config.yaml", "--output-dir", "run", "hooks.fails.Fails={}")
    assert (status, found["status"], found["exit_status"]) == (1, "failed", 1)
    assert re.match("ZeroDivisionError: ", found["problems"][0]["message"])
    assert found["problems"][0]["code"] == "code.failed"
    assert (found["epochs"], found["resume"]) == (1, ["emrun", "resume", str(project / "run")])
    assert "noise\n" in log
