"""The command line: the only place that prints and exits; what `emrun --help` does not need is imported late.

May import: the root, `base`, `ranks`, `config`, `loop`, `runs`, `training`, `launch`, `diagnosis`,
`exports`.
"""

from __future__ import annotations

from emrun.cli import interrupted_start

# isort: split

import os
import signal
import sys
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from emrun import __version__
from emrun.base.censor import censored_standard_error

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

GROUPS = {
    "Train": {
        "init": "Begin a project as a copy of a sample.",
        "train": "Train from a config.",
        "resume": "Resume a run.",
        "eval": "Evaluate a run on streams.",
        "predict": "Write the outputs for every example of a stream.",
        "export": "Write the model of a run for other programs.",
        "sweep": "Train a config with many combinations of values.",
    },
    "Look": {
        "check": "Check a config or, without a config, this machine.",
        "config": "Print a config as emrun reads it.",
        "show": "List hooks, datasets, models, ..., or explain one of them.",
        "bench": "Measure how fast the streams of a config are read.",
        "dataset": "Call a method of a config's dataset.",
        "completion": "Print the script that completes commands in a shell.",
    },
    "Compare": {
        "compare": "Train two configs on the same seeds; say which is better.",
        "ls": "List runs: how they stand and what they reached.",
        "diff": "Compare two runs, to the first step that differs.",
        "trace": "Print what runs have recorded, by epoch or by step.",
        "report": "Write a page of one or several runs, or of a sweep.",
        "prune": "Remove runs, or only their checkpoints, after showing them.",
    },
    "Prove": {
        "verify-resume": "Prove that an interrupted run resumes exactly.",
        "verify-run": "Prove that a run directory gives what it recorded.",
        "replay": "Repeat the step that made a run fail, and find the cause.",
    },
}
"""The commands in the groups and the order in which the help shows them, each with what it does."""
_TEXTS = ChainMap(*GROUPS.values())


class _Commands(Mapping[str, click.Command]):
    """The commands by name; each is imported when it is asked for, so that no command waits for what others need."""

    def __getitem__(self, name: str) -> click.Command:
        if name not in _TEXTS:
            raise KeyError(name)
        module = vars(__import__(f"emrun.cli.{name.replace('-', '_')}", fromlist=[name]))
        command = next(value for value in module.values() if isinstance(value, click.Command) and value.name == name)
        if all("--json" not in parameter.opts for parameter in command.params):
            from emrun.cli.output import errors_as_json

            errors_as_json(command)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(_TEXTS)

    def __len__(self) -> int:
        return len(_TEXTS)


class _Group(click.Group):
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in groups; the names are padded, so that the descriptions begin in one column."""
        width = max(map(len, self.commands))
        for title, texts in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{width}}", text) for name, text in texts.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a command, without importing any."""
        from click.shell_completion import CompletionItem

        named = [
            CompletionItem(name, help=text) for name, text in sorted(_TEXTS.items()) if name.startswith(incomplete)
        ]
        return [*named, *click.Command.shell_complete(self, ctx, incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command, and return its exit status; an exception that would end the process silently is a failure."""
        try:
            return super().invoke(ctx) or 0
        except (click.ClickException, click.exceptions.Exit, click.Abort, KeyboardInterrupt, BrokenPipeError):
            raise
        except BaseException as error:
            from emrun.cli.failures import UsersCodeFailed, of_storage
            from emrun.cli.ranks import tell_failure

            return tell_failure(error.args[0] if isinstance(error, UsersCodeFailed) else of_storage(error))


@click.group(
    cls=_Group,
    commands=_Commands(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="emrun")
def emrun() -> None:
    """Train PyTorch models from one YAML file."""


interrupted_start.end()


def main() -> int:
    """Run the command line and return its exit status; after a signal the process ends by that signal."""
    status = _run()
    if "torch" in sys.modules:
        from emrun.ranks.process_end import end_process

        end_process(status)
    return status


def _run() -> int:
    with censored_standard_error():
        if "_EMRUN_COMPLETE" in os.environ:
            from emrun.cli.completion import register

            register()
        try:
            return int(emrun.main(standalone_mode=False))
        except click.ClickException as raised:
            error = _with_advice(raised) if isinstance(raised, click.NoSuchOption) else raised
            error.show()
            if "--json" in sys.argv[1:]:
                from emrun.cli.output import print_json
                from emrun.cli.problems import problems_of

                print_json({"status": "failed", "exit_status": error.exit_code, "problems": problems_of(error)})
            return error.exit_code
        except (KeyboardInterrupt, click.Abort):
            from emrun.cli.failures import report_and_end_by_signal

            report_and_end_by_signal(signal.SIGINT)


def _with_advice(error: click.NoSuchOption) -> click.NoSuchOption:
    """Return an error that also says how to set a value of the config, and proposes only options that are nearly right.

    It does not propose to delete a run.
    """
    from emrun.base.wording import sure

    near = sure(
        error.option_name.lstrip("-"), [option.lstrip("-") for option in error.possibilities or () if option != "--rm"]
    )
    parameters = [] if error.ctx is None else error.ctx.command.params
    takes_overrides = any(parameter.name in ("overrides", "arguments") for parameter in parameters)
    advice = " For a value of the config, write KEY=VALUE, such as model.optimizer.lr=0.1." if takes_overrides else ""
    proposed = [option for option in error.possibilities or () if option.lstrip("-") == near]
    return click.NoSuchOption(error.option_name, f"{error.message}{advice}", proposed, error.ctx)
