"""Completion in a shell: what is offered at each place, by the scripts of bash, zsh and fish."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from emrun.cli import emrun as commands

EMRUN = Path(sys.executable).with_name("emrun")
SHELLS = ("bash", "zsh", "fish")


@pytest.fixture
def project(project):
    """The current directory: a project with a run in `log`."""
    run = project / "log" / "tumours_20261120-210301"
    run.mkdir(parents=True)
    (run / "trace.yaml").write_text("status: finished\n")
    shutil.copy(project / "config.yaml", run)
    return project


def completed(line):
    """Return the values that complete the last word of a line; `file:` and `dir:` leave this to the shell."""
    *words, incomplete = line.split(" ")
    complete = ShellComplete(commands, {}, "emrun", "_EMRUN_COMPLETE")
    found = complete.get_completions(words, incomplete)
    return [f"{each.type}:{each.value}" if each.type in ("file", "dir") else each.value for each in found]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("verify", ["verify-resume", "verify-run"]),
        ("train --auto", ["--auto-resume"]),
        ("train con", ["file:con"]),
        ("check config.yaml mod", ["model."]),
        ("train config.yaml model.module.h", ["model.module.hidden="]),
        ("train config.yaml model.optimizer.l", ["model.optimizer.lr="]),
        ("train config.yaml model.optimizer.par", []),
        ("train config.yaml dataset.b", ["dataset.batch_size="]),
        ("train config.yaml main_loop.wor", ["main_loop.workers="]),
        ("train config.yaml see", ["seed="]),
        ("train config.yaml hooks.SaveB", ["hooks.SaveBest."]),
        ("train config.yaml hooks.WriteC", ["hooks.WriteCSV."]),
        ("train config.yaml hooks.StopAfter.ep", ["hooks.StopAfter.epochs="]),
        ("train config.yaml hooks.my_hooks.GradientNorm.en", []),
        ("train config.yaml ~main_loop.e", ["~main_loop.extra_streams."]),
        ("train config.yaml ~model.optimizer.l", ["~model.optimizer.lr"]),
        ("train config.yaml model.optimizer.lr=", []),
        ("train nowhere.yaml model.", []),
        ("resume log/", ["dir:log/"]),
        ("resume log/tumours_20261120-210301 hooks.StopO", ["hooks.StopOnNaN.", "hooks.StopOnPlateau."]),
        ("eval log/tumours_20261120-210301 ", ["train", "valid"]),
        ("eval log/tumours_20261120-210301 valid model.module.d", ["model.module.dropout="]),
        ("init new --from tok", ["token_windows"]),
        ("show savel", []),
        ("show SaveL", ["SaveLatest"]),
        ("completion f", ["fish"]),
    ],
)  # fmt: skip
def test_a_word_is_completed(line, expected, project):
    assert completed(line) == expected


def test_a_broken_config_is_completed_with_nothing(project, capfd):
    (project / "config.yaml").write_text("model: {class: [")
    assert completed("train config.yaml model.") == []
    assert capfd.readouterr() == ("", "")


def test_keys_that_need_quotes_are_not_offered(project):
    (project / "config.yaml").write_text('vars: {good: 1, "bad, key": 2, "\\e[31m": 3}\ndataset: {}\n')
    assert completed("train config.yaml vars.") == ["vars.good="]


def test_completion_imports_neither_torch_nor_user_code(project):
    (project / "my_model.py").write_text((project / "my_model.py").read_text() + "\nraise SystemExit('imported')\n")
    code = (
        "import sys; sys.argv = ['emrun']; from emrun.cli import main\n"
        "try: main()\n"
        "finally: print(sorted({m.split('.')[0] for m in sys.modules}), file=sys.stderr)"
    )
    words = {"COMP_WORDS": "emrun train config.yaml model.module.", "COMP_CWORD": "3"}
    env = {"_EMRUN_COMPLETE": "bash_complete", "PATH": "", **words}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=project, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == [f"partial,model.module.{each}" for each in ("dropout=", "hidden=", "class=")]
    loaded = set(ast.literal_eval(done.stderr))
    assert not loaded & {"torch", "numpy", "tqdm", "safetensors", "sklearn", "my_model"}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_a_shell_knows_the_kinds_of_items(shell):
    done = CliRunner().invoke(commands, ["completion", shell])
    assert done.exit_code == 0
    assert f"_EMRUN_COMPLETE={shell}_complete" in done.output
    assert "partial" in done.output
    found = shutil.which(shell)
    if found is not None:
        check = "--no-execute" if shell == "fish" else "-n"
        subprocess.run([found, check], input=done.output, text=True, timeout=60, check=True)


def test_bash_completes_by_its_script(project):
    of_bash = CliRunner().invoke(commands, ["completion", "bash"]).output
    script = (
        f'PATH="{EMRUN.parent}:$PATH"\n{of_bash}\ncompopt() {{ echo "compopt $*"; }}\n'
        "COMP_WORDS=(emrun train config.yaml model.module.h); COMP_CWORD=3; _emrun_completion emrun\n"
        'echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", script], cwd=project, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("compopt -o\nnospace\nmodel.module.hidden=\n", "")
