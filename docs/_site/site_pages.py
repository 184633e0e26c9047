"""The pages that are made of the code and of the files beside the README; `pages` returns all of them.

The built site has them, `docs/` has not: what they say is written once, in the docstring or the command that has it.
`mkdocs_hooks.py` gives them to MkDocs; `tests/test_site.py` follows the links to them, without MkDocs.
"""

import functools
import inspect
import json
import os
import posixpath
import re
import sys
import tomllib
from pathlib import Path

import click
from site_docstrings import arguments, member_page, prose, sections_of, summary

import emrun
from emrun import cli
from emrun.base.lazy import homes
from emrun.config.catalogue import listing
from emrun.config.import_finder import locate
from emrun.config.json_schema import config_schema
from emrun.config.names import SUPPLIED, bases, built_ins
from emrun.config.sections import REQUIRED, SUPPLIED_TO_LOOP

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FROM_ROOT = {
    "README.md": "index.md",
    "CHANGELOG.md": "about/changelog.md",
    "CONTRIBUTING.md": "about/contributing.md",
    "SECURITY.md": "about/security.md",
    "benchmarks/README.md": "about/benchmarks.md",
}
"""File in the repository -> its page in the site."""
EXAMPLES = tomllib.loads(Path(__file__).with_name("examples.toml").read_text(encoding="utf-8"))
"""Section of a config -> key -> YAML with this key; `tests/test_site.py` checks each."""
_GROUP = re.compile(r"^# (.*)\n((?:from .*\n)+)", re.MULTILINE)
GROUPS = {
    group: re.findall(r" as (\w+)$", block, re.MULTILINE)
    for group, block in _GROUP.findall((ROOT / "hooks" / "__init__.pyi").read_text(encoding="utf-8"))
}
"""What a group of hooks is for -> their names."""
ELSEWHERE = {
    "MainLoop": "The keys of [main_loop](../config/main_loop.md), and `model`, `dataset`, `hooks`, `run`, `seed`.",
    "TorchModel": "Those of the section `model`: [TorchModel](../models/torchmodel.md).",
}
"""Class -> where its arguments are described."""
_HIDDEN = "DownloadableDataset"  # a base of datasets
_OF_LOOP = "emrun.loop.main_loop.MainLoop"
_OF_SWEEP = "emrun.launch.settings.Sweep"
_DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+"  # no number and no version
_VALUE = r"[\w./-]*\w"
_LITERAL = re.compile(
    rf"(?<![\w`'./-])('[^'\s]+[=<>][^']*'|--[\w-]+|(?!e\.g\b)~?{_DOTTED}(?:={_VALUE})?|~\w+)(?![\w`])"
)
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


@functools.cache
def pages():
    """Return the path of each page, relative to docs/, with its Markdown."""
    made = {place: from_root(name) for name, place in FROM_ROOT.items()}
    made |= classes("hooks", "hook", "Hooks", "called in the order of the section `hooks`", GROUPS)
    made |= classes("datasets", "dataset", "Datasets", "named by `dataset.class`")
    made |= classes("models", "model", "Models", "named by `model.class`; without this key, it is `TorchModel`")
    made |= classes("modules", "", "Modules", "modules of emrun, named by `model.module.class`")
    made |= schedules() | bases_page() | functions() | config() | commands() | python()
    return {path: text if path in FROM_ROOT.values() else linked(path, text) for path, text in made.items()}


def from_root(name):
    """Return a file of the repository as a page."""
    return within_site(FROM_ROOT[name], (ROOT / name).read_text(encoding="utf-8"), name)


def within_site(own, text, name=""):
    """Return a page whose links to files of the repository lead to their pages, or are text where there is none.

    Args:
        own: the page, relative to docs/.
        text: its Markdown.
        name: the file that it is made of, relative to the repository, if that is not the page in docs/.
    """
    folder = posixpath.dirname(name or f"docs/{own}")

    def link(found):
        path, _, anchor = found[2].partition("#")
        if not path or re.match(r"https?:|mailto:", path):
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, path))
        page = FROM_ROOT.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else "")
        end = f"#{anchor}" if anchor else ""
        return f"{found[1]}({relative(page, own)}{end})" if page else found[1][1:-1]

    parts = _FENCE.split(text.replace('="docs/pictures/', '="pictures/'))
    parts[::2] = [re.sub(r"(\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)", link, part) for part in parts[::2]]
    return "".join(parts)


def relative(page, own):
    """Return a link to a page from another one."""
    return os.path.relpath(page, posixpath.dirname(own) or ".")


def table(heading, rows):
    """Return a table of names and what they are."""
    lines = [f"| {heading} | what it is |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)]
    return "\n".join(lines)


def classes(folder, kind, title, how, groups=None):
    """Return a page for each built-in class of a kind, and one that lists them, in groups if there are any."""
    place = f"reference/{folder}"
    paths = {name: path for name, path in built_ins(kind).items() if name != _HIDDEN}
    known = {name: locate(path) for name, path in paths.items()}
    made = {f"{place}/{name.lower()}.md": class_page(name, target, kind) for name, target in known.items()}
    parts = [f"# {title}", f"The built-in {title.lower()} are {how}. `emrun show NAME` prints what a page here says."]
    for group, names in (groups or {"": list(known)}).items():
        rows = [(f"[`{name}`]({name.lower()}.md)", summary(known[name])) for name in names if name in known]
        parts += [f"## {group}"] * bool(group) + [table(title[:-1], rows)]
    return {f"{place}/index.md": "\n\n".join(parts), **made}


def class_page(name, target, kind):
    """Return the page of a class that a config names."""
    text, sections = sections_of(target)
    parts = [f"# {name}", prose(text)]
    examples = EXAMPLES["model"] if name == "TorchModel" else None
    if described := arguments(target, ("self", *SUPPLIED.get(kind, ())), level="###", examples=examples):
        parts += ["## Arguments", described]
    if "Attributes" in sections:
        parts += ["## Attributes", prose(re.sub(r"^ {4}(\w+):", r"- `\1`:", sections["Attributes"], flags=re.M))]
    return "\n\n".join(parts)


def schedules():
    """Return a page for each schedule of emrun."""
    home = "emrun.models.schedules.built_in"
    known = {name: locate(f"{home}.{name}") for name, _ in listing("schedules") if hasattr(locate_module(home), name)}
    rows = [(f"[`{name}`]({name.lower()}.md)", summary(target)) for name, target in known.items()]
    intro = (
        "The schedules of emrun follow the length of the run ([schedules](../../guide/optimizers.md#schedules)). "
        "`model.scheduler.class` names one of them, or any class of `torch.optim.lr_scheduler`."
    )
    made = {"reference/schedules/index.md": "\n\n".join(["# Schedules", intro, table("Schedule", rows)])}
    for name, target in known.items():
        parts = [f"# {name}", prose(sections_of(target)[0]), "## Arguments"]
        parts.append(arguments(target, ("self", "optimizer", "last_epoch", "horizon"), level="###"))
        made[f"reference/schedules/{name.lower()}.md"] = "\n\n".join(parts)
    return made


def locate_module(path):
    """Return a module."""
    __import__(path)
    return sys.modules[path]


def bases_page():
    """Return the page with the text of each base."""
    parts = ["# Bases", "`extends: emrun:NAME` begins a config with one of these ([bases](../guide/config.md#bases))."]
    for name, file in bases().items():
        parts += [f"## {name}", f"```yaml\n{file.read_text(encoding='utf-8').rstrip()}\n```"]
    return {"reference/bases.md": "\n\n".join(parts)}


def functions():
    """Return the page of metrics and losses."""
    parts = ["# Metrics and losses", "Functions for `model.metrics` and `model.loss`; see [losses and metrics]"]
    parts[-1] += "(../guide/models.md#losses-and-metrics). Classes of `torch.nn` and of torchmetrics can be named too."
    for name in [name for kind in ("metrics", "losses") for name, _ in listing(kind)]:
        parts += [f"## {name}", member_page(locate(name))]
    return {"reference/metrics.md": "\n\n".join(parts)}


def config():
    """Return the pages of the sections of a config, of `main_loop` and of `sweep`."""
    schema = config_schema()
    links = {
        "dataset": "[each dataset](../datasets/index.md)",
        "model": "[TorchModel](../models/torchmodel.md)",
        "main_loop": "[main_loop](main_loop.md)",
        "hooks": "[each hook](../hooks/index.md)",
        "sweep": "[sweep](sweep.md)",
    }
    parts = ["# Sections of a config"]
    parts.append("How a config is read is in [the config](../../guide/config.md); this page has its sections.")
    for name, section in schema["properties"].items():
        kind = "A file, a base or a list of these" if name == "extends" else ""
        types = section.get("type") or schema["$defs"].get(name, {}).get("type", "")
        words = {"integer": "a whole number", "boolean": "true or false", "string": "a string", "object": "a mapping"}
        words |= {"array": "a list"}
        kind = kind or words[types if isinstance(types, str) else types[0]].capitalize()
        note = "required" if name in REQUIRED else "optional"
        parts += [f"## `{name}`", f"{kind}; {note}.", section["description"]]
        parts += [f"The keys: {links[name]}."] if name in links else []
        parts.append(f"```yaml\n{EXAMPLES['config'][name]}\n```")
    made = {"reference/config/index.md": "\n\n".join(parts)}
    for name, path in (("main_loop", _OF_LOOP), ("sweep", _OF_SWEEP)):
        target = locate(path)
        supplied = ("self", *SUPPLIED_TO_LOOP)
        body = arguments(target, supplied, examples=EXAMPLES[name])
        parts = [f"# {name}", f"```yaml\n{EXAMPLES['config'][name]}\n```"] if name == "main_loop" else [f"# {name}"]
        made[f"reference/config/{name}.md"] = "\n\n".join([*parts, prose(sections_of(target)[0]), body])
    return made


def commands():
    """Return a page for each command, and one that lists them."""
    parts = ["# Commands", "What a command returns is in [exit status](../exit_status.md)."]
    made = {}
    for group, texts in cli.GROUPS.items():
        rows = [(f"[`emrun {name}`]({name}.md)", text) for name, text in texts.items()]
        parts += [f"## {group}", table("Command", rows)]
        made |= {f"reference/commands/{name}.md": command_page(name) for name in texts}
    return {"reference/commands/index.md": "\n\n".join(parts), **made}


def command_page(name):
    """Return the page of a command: what its help says."""
    command = cli.emrun.commands[name]
    context = click.Context(command, info_name=f"emrun {name}")
    usage = " ".join([f"emrun {name}", *command.collect_usage_pieces(context)])
    texts = [" ".join(block.split()) for block in inspect.cleandoc(command.help or "").split("\n\n")]
    records = [option.get_help_record(context) for option in command.get_params(context)]
    rows = [
        (f"`{names}`".replace("|", r"\|"), quoted(text).replace("|", r"\|"))
        for names, text in filter(None, records)
        if text
    ]
    paragraphs = [quoted(text.removeprefix("\b").strip()) for text in texts]
    return "\n\n".join([f"# emrun {name}", f"```text\n{usage}\n```", *paragraphs, "## Options", table("Option", rows)])


def quoted(text):
    """Return the text of a help with what is written literally as code."""
    return _LITERAL.sub(r"`\1`", text)


def python():
    """Return a page for each public name, for the loop that hooks ask, for streams and for events."""
    names = dict(sorted(homes(Path(emrun.__file__).with_suffix(".pyi")).items()))
    names |= {"Loop": "emrun.hook", "StreamContext": "emrun.stream_context"}
    made = {}
    rows = []
    for name, module in names.items():
        target = getattr(locate_module(module), name)
        is_described = inspect.isclass(target) or inspect.isfunction(target)
        elsewhere = ELSEWHERE.get(name, "")
        text = member_page(target, elsewhere) if is_described else prose(inspect.cleandoc(target.__doc__ or ""))
        where = f"emrun.{name}" if hasattr(emrun, name) else f"{module}.{name}"
        made[f"reference/python/{name.lower()}.md"] = f"# {name}\n\n`{where}`\n\n{text}"
        rows.append((f"[`{name}`]({name.lower()}.md)", summary(target) if is_described else where))
    text = prose(inspect.cleandoc(locate_module("emrun.hook").__doc__))
    made["reference/python/events.md"] = f"# Events\n\n{text}\n\nWhat each means is in [AbstractHook](abstracthook.md)."
    rows.append(("[events](events.md)", "The events in the order of the loop"))
    intro = "The names that Python code imports; [Python](../../guide/python.md) shows how they are used."
    return {"reference/python/index.md": "\n\n".join(["# Python", intro, table("Name", rows)]), **made}


@functools.cache
def places():
    """Return the name of each class that has a page -> the page."""
    kinds = {"hooks": "hook", "datasets": "dataset", "models": "model", "modules": ""}
    known = [(folder, name) for folder, kind in kinds.items() for name in built_ins(kind) if name != _HIDDEN]
    return {name: f"reference/{folder}/{name.lower()}.md" for folder, name in known}


def linked(own, text):
    """Return a page in which the first mention of each class is a link to its page."""
    seen = {own}

    def link(found):
        page = places().get(found[1], own)
        if page in seen:
            return found[0]
        seen.add(page)
        return f"[{found[0]}]({relative(page, own)})"

    parts = _FENCE.split(text)
    for index in range(0, len(parts), 2):
        lines = parts[index].split("\n")
        parts[index] = "\n".join(
            line if line.startswith(("#", "|")) else re.sub(r"(?<!\[)`(\w+)`(?!\])", link, line) for line in lines
        )
    return "".join(parts)


def schema_text():
    """Return the JSON schema of a config."""
    return json.dumps(config_schema(), indent=1)


def errors_text():
    """Return the codes of errors as JSON: those of the page, with cause and cure."""
    page = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z.-]+)` \| (.*) \| (.*) \|$", page, re.MULTILINE)
    return json.dumps([{"code": code, "cause": cause, "cure": cure} for code, cause, cure in rows], indent=1)
