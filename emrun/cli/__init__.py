"""The command line: the only place that prints and exits."""

from __future__ import annotations

from emrun.cli import early

# isort: split

import os
import signal
import sys
from typing import Any

import click

from emrun import __version__
from emrun.base.censor import censored_standard_error
from emrun.cli.as_json import errors_as_json, print_json
from emrun.cli.bench import bench
from emrun.cli.check import check
from emrun.cli.compare import compare
from emrun.cli.completion import completion, register
from emrun.cli.config import show_config
from emrun.cli.dataset import dataset
from emrun.cli.diff import diff
from emrun.cli.eval import evaluate
from emrun.cli.failures import UsersCodeFailed
from emrun.cli.habits import answer
from emrun.cli.init import init
from emrun.cli.ls import ls
from emrun.cli.predict import predict
from emrun.cli.problems import problems_of
from emrun.cli.prune import prune
from emrun.cli.ranks import tell_failure
from emrun.cli.replay import replay
from emrun.cli.report import write_report
from emrun.cli.resume import resume
from emrun.cli.show import show
from emrun.cli.signals import report_and_end_by_signal
from emrun.cli.sweep import sweep
from emrun.cli.trace import trace
from emrun.cli.train import train
from emrun.cli.verify_resume import verify_resume
from emrun.cli.verify_run import verify_run
from emrun.ranks.group import end_process

GROUPS = {
    "Train": (init, train, resume, evaluate, predict, sweep),
    "Look": (check, show_config, show, bench, dataset, completion),
    "Compare": (compare, ls, diff, trace, write_report, prune),
    "Prove": (verify_resume, verify_run, replay),
}
"""The commands in the groups and the order in which the help shows them."""


class _Commands(click.Group):
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in groups; the names are padded, so that the descriptions begin in one column."""
        width = max(map(len, self.commands))
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{each.name:{width}}", each.get_short_help_str(200)) for each in commands])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an exception that would end the process silently is a failure of the user's code."""
        try:
            return super().invoke(ctx)
        except UsersCodeFailed as failed:
            return tell_failure(failed.error)
        except (click.ClickException, click.exceptions.Exit, click.Abort, KeyboardInterrupt, BrokenPipeError):
            raise
        except BaseException as error:
            return tell_failure(error)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="emrun")
def emrun() -> None:
    """Train PyTorch models from one YAML file."""


for _commands in GROUPS.values():
    for _command in _commands:
        if all("--json" not in each.opts for each in _command.params):
            errors_as_json(_command)
        emrun.add_command(_command)
early.end()


def main() -> int:
    """Run the command line and return its exit status; after a signal the process ends by that signal."""
    status = _run()
    end_process(status)
    return status


def _run() -> int:
    with censored_standard_error():
        if "_EMRUN_COMPLETE" in os.environ:
            register()
        try:
            status = emrun.main(standalone_mode=False)
        except click.ClickException as error:
            answer(error)
            error.show()
            if "--json" in sys.argv[1:]:
                print_json({"status": "failed", "exit_status": error.exit_code, "problems": problems_of(error)})
            return error.exit_code
        except (KeyboardInterrupt, click.Abort):
            report_and_end_by_signal(signal.SIGINT)
    return status if isinstance(status, int) else 0
