"""Writes docs/reference/hooks.md, the reference of the built-in hooks, from their docstrings.

    python tests/hooks_page.py [--write]

Prints the page; `--write` puts it into docs/reference/hooks.md. `tests/test_hooks_page.py` compares the two.
"""

import inspect
import json
import re
import sys
import textwrap
from pathlib import Path

from emrun.config.catalogue import argument_texts, listing
from emrun.config.import_finder import Imported, locate
from emrun.config.names import SUPPLIED, built_ins

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "hooks.md"
HEAD = """# Hooks

<!-- written by tests/hooks_page.py from the docstrings of the hooks; do not edit -->

A hook is an object whose methods are called at the events of the run. The section `hooks` of a config lists hooks, and
they are called in this order. This page lists the built-in hooks with all their arguments. [Using and writing
hooks](../guide/hooks.md) has the events, examples, and how to write a hook.
"""
_GROUP = re.compile(r"^# (.*)\n((?:from .*\n)+)", re.MULTILINE)
GROUPS = {
    group: re.findall(r" as (\w+)$", block, re.MULTILINE)
    for group, block in _GROUP.findall((PAGE.parents[2] / "hooks" / "__init__.pyi").read_text())
}
_RAISES = re.compile(r"\n*^Raises:\n(?:[ ]+.*(?:\n|\Z)|\n)*", re.MULTILINE)
_ENTRY = re.compile(r"^    (?P<name>\w+)(?P<note> \((?:default [^\n]*?|required)\))?(?=:|$)(?P<text>.*)")


def page():
    """Return the whole page."""
    rows = dict(listing("hooks"))
    parts = [HEAD, "## Built-in hooks\n"]
    table = ["| hook | does |", "|---|---|"]
    body = []
    for group, names in GROUPS.items():
        body.append(f"## {group}\n")
        for name in names:
            if name in rows:
                table.append(f"| [`{name}`](#{name.lower()}) | {rows[name].rstrip('.')} |")
                body.append(f"### {name}\n\n{as_markdown(described(name))}\n")
    return "\n".join([*parts, *table, "", *body])


def described(name):
    """Return the docstring of a hook with the default of each argument, and without what it raises."""
    found = locate(built_ins("hook")[name])
    before, _, text = ("\n" + _RAISES.sub("\n\n", inspect.cleandoc(found.__doc__))).partition("\nArgs:\n")
    inherited = argument_texts(found)
    for name, parameter in Imported().parameters(found).named.items():
        entry = re.search(rf"^( {{4}}{name})(?: \(.*?\))?:(?P<text>.*)", text, re.MULTILINE)
        if name in SUPPLIED["hook"]:
            continue
        note = default(parameter)
        if entry is None:
            added = f"{name}{note}: {inherited.get(name, '')}".rstrip(": ")
            text = f"{text.rstrip()}\n{textwrap.fill(added, 120, initial_indent=' ' * 4, subsequent_indent=' ' * 8)}"
        elif "default:" not in entry["text"].lower():
            text = f"{text[: entry.end(1)]}{note}{text[entry.end(1) :]}"
    text = text.strip("\n")
    return f"{before.strip()}\n\nArgs:\n{text}" if text else before.strip()


def default(parameter):
    """Return the default of an argument as YAML, in parentheses; null is left out, as is what YAML cannot write."""
    value = parameter.default
    if value is None or value is parameter.empty or callable(value):
        return ""
    is_word = isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w./-]*", value)
    return f" (default {value if is_word else json.dumps(value)})"


def as_markdown(text):
    """Return a docstring as Markdown: blocks of YAML in fences, arguments as a list."""
    before, _, arguments = text.partition("\nArgs:\n")
    blocks = [block if not block.startswith("    ") else fenced(block) for block in before.strip("\n").split("\n\n")]
    return "\n\n".join([*blocks, *([entries(arguments)] if arguments else [])])


def fenced(block):
    """Return an indented block in a fence; it is YAML if it looks like a config."""
    code = textwrap.dedent(block)
    if code.startswith("- "):
        code = f"hooks:\n{textwrap.indent(code, '  ')}"
    return f"```{'yaml' if re.match(r'^[a-z_]+:', code) else 'text'}\n{code.rstrip()}\n```"


def entries(arguments):
    """Return the section `Args` as a list."""
    lines = ["Arguments:", ""]
    for line in arguments.split("\n"):
        found = _ENTRY.match(line)
        if found and line[4:5] != " ":
            note = re.sub(r"^ \(default (.*)\)$", r" (default `\1`)", found["note"] or "")
            lines.append(f"- `{found['name']}`{note}{found['text']}")
        elif re.fullmatch(r"\w+:", line):  # another section, such as Attributes
            lines += ["", line, ""]
        elif line.strip():
            lines.append(f"  {line.strip()}")
    return "\n".join(lines)


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page())
