"""`emrun ls`."""

import json
import subprocess
import sys

import pytest
from stored_runs import CONFIG


def table(text):
    """Return the rows of a table, each as a mapping from its heading; columns are two blanks apart."""
    heading, _, *lines = [line.split() for line in text.splitlines()]
    return [dict(zip(heading, line, strict=False)) for line in lines]


@pytest.fixture
def runs(make_run):
    make_run("b", (0.1, 0.7, 0.6), status="interrupted")
    make_run("a", (0.1, 0.9), config=CONFIG.replace("lr: 0.003", "lr: 0.1"))
    make_run("c", (), status="failed")
    make_run("d", (0.2,), status="killed", where="log/sweep")


def test_a_run_that_ended_within_its_first_epoch_is_listed(make_run, emrun_here):
    run = make_run("long", (0.1,), status="running")
    run.end("finished", 0, "1000 iterations done (StopAfter iterations: 1000)", 0, 1000)
    assert [row["name"] for row in table(emrun_here("ls").stdout.replace("max valid", "max-valid"))] == ["long"]


def test_runs_are_listed_with_their_status(runs, emrun):
    done = emrun("ls")
    assert done.returncode == 0
    assert done.stderr == "1 run not shown: they ended before the first iteration; -a shows them\n"
    rows = table(done.stdout.replace("max valid/accuracy", "best"))
    assert [(row["name"], row["status"], row["epochs"], row["best"]) for row in rows] == [
        ("a", "finished", "1", "0.9"), ("b", "interrupted", "2", "0.7"),
    ]  # fmt: skip
    everything = emrun("ls", "log", "-ar").stdout
    assert [line.split()[0] for line in everything.splitlines()[2:]] == ["a", "b", "c", "sweep/d"]


def test_runs_are_sorted_and_chosen_and_columns_are_any_value(runs, emrun_here):
    done = emrun_here("ls", "-a", "--sort", "-model.optimizer.lr", "-c", "model.optimizer.lr,min:valid/loss")
    assert [line.split() for line in done.stdout.splitlines()[2:]] == [
        ["a", "0.1", "0.1"],
        ["b", "0.003", "0.3"],
        ["c", "0.003"],
    ]
    done = emrun_here("ls", "--sort", "best")
    assert [row["name"] for row in table(done.stdout.replace("max valid", "max-valid"))] == ["a", "b"]
    assert emrun_here("ls", "-c", "name,epochs").stdout == emrun_here("ls", "-c", "epochs").stdout
    assert emrun_here("ls", "-c", "name").stdout.splitlines()[0] == "name"
    done = emrun_here("ls", "--where", "status=failed", "--where", "model.optimizer.lr<1")
    assert [row["name"] for row in table(done.stdout)] == ["c"]
    assert done.stderr == "2 runs not shown: they do not meet the conditions\n"


def test_runs_are_sorted_by_whole_numbers_of_any_size(make_run, emrun_here):
    for name, value in (("a", 10**400), ("b", 3), ("c", -(10**400))):
        make_run(name, (0.1, 0.2), config=CONFIG.replace("width: 32", f"width: {value}"))
    done = emrun_here("ls", "--sort", "vars.width", "-c", "name")
    assert done.returncode == 0, done.stderr
    assert [row["name"] for row in table(done.stdout)] == ["c", "b", "a"]


def test_the_long_list_counts_models_and_datasets(runs, emrun_here):
    output = emrun_here("ls", "-l").stdout
    assert "interrupted here" in output
    assert output.splitlines()[-1].split() == ["my_model.Net", "Digits", "2"]


def test_a_single_run_is_shown_with_its_config_and_files(runs, emrun_here):
    output = emrun_here("ls", "log/a", "-v").stdout
    assert "    lr: 0.1   # low" in output.splitlines()
    assert any(line.split()[:2] == ["-", "metrics.jsonl"] for line in output.splitlines())


def test_json_has_all_facts(runs, emrun_here):
    first, second, third = json.loads(emrun_here("ls", "-a", "--json", "-c", "model.optimizer.lr").stdout)
    assert first["directory"] == "log/a"
    assert first["best"] == {"statistic": "valid/accuracy/mean", "condition": "max", "value": 0.9, "epoch": 1}
    assert first["columns"] == {"model.optimizer.lr": 0.1}
    assert (first["duration_seconds"], first["begin"]) == (120.0, "2026-11-20T21:03:01+01:00")
    assert (second["status"], third["best"], third["epochs"]) == ("interrupted", None, 0)


def test_damaged_runs_and_names_of_any_kind_are_shown(make_run, emrun_here, tmp_path):
    for name in ("<script>alert(1)", "\x1b[31mred", "two\nlines"):
        make_run("x", (0.5, 0.6)).directory.rename(tmp_path / "log" / name)
    make_run("x", (0.5, 0.6)).directory.rename(tmp_path / "log" / "\udcff")  # the byte 0xFF
    (tmp_path / "log" / "<script>alert(1)" / "trace.yaml").write_text("status: &a [*a]\n")
    done = emrun_here("ls")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    names = {line.split()[0] for line in done.stdout.splitlines()[2:]}
    assert names == {"<script>alert(1)", r"\udcff", r"\x1b[31mred", r"two\nlines"}
    assert "damaged" in done.stdout
    assert done.stderr.startswith("warning: <script>alert(1): trace.yaml:1:13: alias *a contains itself")
    assert [run["status"] for run in json.loads(emrun_here("ls", "--json").stdout)].count("damaged") == 1


WRONG = [
    (["ls", "nowhere"], "nowhere does not exist; give a directory with runs, or a run"),
    (["ls", "--where", "epochs"], "'epochs' is not a condition; write for example model.optimizer.lr=0.1"),
    (["ls", "--sort", "model.optimiser.lr"], "did you mean 'model.optimizer.lr'"),
    (["ls", "-c", "valid/acuracy"], "did you mean 'valid/accuracy'"),
]  # fmt: skip


def test_what_cannot_be_listed_is_an_error(runs, emrun_here):
    for arguments, message in WRONG:
        done = emrun_here(*arguments)
        assert done.returncode == 2, arguments
        assert message in done.stderr


def test_an_empty_directory_has_no_runs(emrun_here, tmp_path):
    (tmp_path / "log").mkdir()
    done = emrun_here("ls")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "no runs in log (-r also searches the directories below)\n"


def test_neither_torch_nor_code_of_the_user_is_imported(runs, tmp_path):
    (tmp_path / "my_model.py").write_text("raise SystemExit('imported')\n")
    code = (
        "import sys; sys.path.insert(0, ''); from emrun.cli import emrun\n"
        "for line in ('ls -lar --sort best --where seed=42', 'ls --json', 'trace log/a', 'trace log/a --steps',\n"
        "             'prune --epochs 2 --dry-run', 'prune log/a --checkpoints -y', 'prune --status failed -y'):\n"
        "    assert emrun.main(line.split(), standalone_mode=False) == 0, line\n"
        "    assert not {'torch', 'my_model', 'numpy'} & set(sys.modules), line\n"
        "assert emrun.main(['diff', 'log/a', 'log/b'], standalone_mode=False) == 1\n"
        "assert not {'torch', 'my_model', 'numpy'} & set(sys.modules)\n"
        "assert emrun.main(['report', 'log/a'], standalone_mode=False) == 0\n"
        "assert not {'torch', 'my_model'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "log" / "c").exists()
