"""The command line: the only place that prints and exits."""

from __future__ import annotations

import sys
from typing import Any

import click

from emrun import __version__
from emrun.censor import censored_standard_error
from emrun.cli.bench import bench
from emrun.cli.check import check
from emrun.cli.config import show_config
from emrun.cli.dataset import dataset
from emrun.cli.eval import evaluate
from emrun.cli.failures import UsersCodeFailed, fail
from emrun.cli.replay import replay
from emrun.cli.resume import resume
from emrun.cli.show import show
from emrun.cli.signals import end_by_signal
from emrun.cli.train import train
from emrun.cli.verify_resume import verify_resume

_OLD_WORDS = {("dataset", "bench"): "bench", ("hooks",): "show"}
"""What commands were once called -> what they are called now."""


class _Commands(click.Group):
    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find a command, also by what it was once called, which no help shows."""
        for words, name in _OLD_WORDS.items():
            if tuple(args[: len(words)]) == words:
                args = [name, *args[len(words) :]]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; what click and Python would end the process with is a failure of the user's code."""
        try:
            return super().invoke(ctx)
        except UsersCodeFailed as failed:
            return fail(failed.error)
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            return fail(error)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="emrun")
def emrun() -> None:
    """Train PyTorch models from one YAML file."""


for _command in (train, resume, evaluate, check, show_config, dataset, bench, show, verify_resume, replay):
    emrun.add_command(_command)


def main() -> int:
    """Run the command line and return its exit status; after a signal the process ends by that signal."""
    with censored_standard_error():
        try:
            status = emrun.main(standalone_mode=False)
        except click.ClickException as error:
            error.show()
            return error.exit_code
        except (KeyboardInterrupt, click.Abort):
            end_by_signal(2)
        except BrokenPipeError:  # whoever read the output has gone
            sys.stderr.close()
            return 1
        except Exception as error:
            return fail(error)
    return status if isinstance(status, int) else 0
