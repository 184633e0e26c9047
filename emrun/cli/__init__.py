"""The command line: the only place that prints and exits."""

from __future__ import annotations

import sys
from typing import Any

import click

from emrun import __version__
from emrun.censor import censored_standard_error
from emrun.cli.check import check
from emrun.cli.config import show_config
from emrun.cli.console import UsersCodeFailed, end_by_signal, fail
from emrun.cli.dataset import dataset
from emrun.cli.eval import evaluate
from emrun.cli.hooks import hooks
from emrun.cli.replay import replay
from emrun.cli.resume import resume
from emrun.cli.train import train
from emrun.cli.verify_resume import verify_resume


class _Commands(click.Group):
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


emrun.add_command(train)
emrun.add_command(resume)
emrun.add_command(evaluate)
emrun.add_command(check)
emrun.add_command(show_config, "config")
emrun.add_command(dataset)
emrun.add_command(hooks)
emrun.add_command(verify_resume)
emrun.add_command(replay)


def main() -> int:
    """Run the command line and return its exit status; after a signal the process ends by that signal."""
    with censored_standard_error():
        return _main()


def _main() -> int:
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
