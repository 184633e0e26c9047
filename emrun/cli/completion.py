"""`emrun completion`, and the scripts that ask emrun for completions, click's with one more kind of items."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete, add_completion_class


class _Bash(BashComplete):
    source_template = BashComplete.source_template.replace(
        "        elif [[ $type == 'plain' ]]; then\n",
        "        elif [[ $type == 'partial' ]]; then\n"
        "            COMPREPLY+=($value)\n"
        "            compopt -o nospace\n"
        "        elif [[ $type == 'plain' ]]; then\n",
    )


class _Zsh(ZshComplete):
    source_template = ZshComplete.source_template.replace(
        '        elif [[ "$type" == "dir" ]]; then\n',
        '        elif [[ "$type" == "partial" ]]; then\n'
        "            compadd -U -S '' -V unsorted -- \"$key\"\n"
        '        elif [[ "$type" == "dir" ]]; then\n',
    )


class _Fish(FishComplete):
    source_template = FishComplete.source_template.replace(
        '        else if test $metadata[1] = "plain";\n',
        '        else if contains $metadata[1] "partial" "plain";\n',
    )


_SHELLS: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}


def register() -> None:
    """Let click answer the shells with these scripts."""
    for name, script in _SHELLS.items():
        add_completion_class(script, name)


@click.command()
@click.argument("shell", type=click.Choice(list(_SHELLS)))
def completion(shell: str) -> None:
    """Print the script that lets a shell complete emrun's commands, options, configs, override keys, runs and streams.

    \b
    bash: echo 'eval "$(emrun completion bash)"' >> ~/.bashrc
    zsh:  echo 'eval "$(emrun completion zsh)"' >> ~/.zshrc    (after compinit)
    fish: emrun completion fish > ~/.config/fish/completions/emrun.fish
    """
    root = click.get_current_context().find_root().command
    click.echo(_SHELLS[shell](root, {}, "emrun", "_EMRUN_COMPLETE").source(), nl=False)
