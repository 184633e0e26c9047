"""The pages of the site, without MkDocs: links, navigation, what the reference is made of, and names in messages.

`make docs` builds the site, which needs the extra `docs`; it makes the same pages, by `docs/_site/site_pages.py`.
"""

import fnmatch
import importlib
import json
import posixpath
import re
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML
from sentences import LONGEST, MEAN, longest, mean
from site_docstrings import parameters
from site_pages import DOCS, EXAMPLES, FROM_ROOT, GROUPS, ROOT, errors_text, pages, quoted, schema_text

import emrun
from emrun.cli import emrun as commands
from emrun.config.catalogue import listing
from emrun.config.config import load_config
from emrun.config.import_finder import locate
from emrun.config.names import built_ins
from emrun.config.plan import check_statically
from emrun.hook import EVENTS

WRITTEN = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
IN_REPOSITORY = [*FROM_ROOT, *(f"docs/{name}" for name in WRITTEN)]
SETTINGS = YAML(typ="safe").load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
_CODE = re.compile(r"^```.*?^```$|`[^`]*`", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def links(text):
    found = re.findall(r"""\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)\"""", _CODE.sub("", text))
    return [target for target in map("".join, found) if "://" not in target]


def anchors(text):
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_of_the_site_leads_somewhere():
    known = WRITTEN | pages()
    wrong = []
    for name, text in known.items():
        for target in links(text):
            file, _, anchor = target.partition("#")
            path = posixpath.normpath(posixpath.join(posixpath.dirname(name), file)) if file else name
            there = known.get(path) or path.removeprefix("../") in FROM_ROOT or (DOCS / path).is_file()
            if not there or (anchor and anchor not in anchors(there)):
                wrong.append((name, target))
    assert not wrong


def test_no_sentence_is_long():
    read = {name: (ROOT / name).read_text(encoding="utf-8") for name in FROM_ROOT}
    long = {name: longest(text) for name, text in (WRITTEN | read | pages()).items()}
    assert {name: words for name, words in long.items() if words > LONGEST} == {}
    means = {name: mean(text) for name, text in (WRITTEN | read).items()}
    assert {name: words for name, words in means.items() if words > MEAN} == {}


@pytest.mark.parametrize("name", FROM_ROOT)
def test_every_link_beside_the_readme_leads_to_a_file(name):
    for target in links((ROOT / name).read_text(encoding="utf-8")):
        file, _, anchor = target.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), target


def test_no_page_is_written_by_hand_and_made():
    assert WRITTEN.keys().isdisjoint(pages())


def named(entries):
    for entry in entries:
        for inner in [entry] if isinstance(entry, str) else entry.values():
            yield from [inner] if isinstance(inner, str) else named(inner)


def test_every_page_is_in_the_navigation_and_everything_there_is_a_page():
    patterns = list(named(SETTINGS["nav"]))
    known = {*WRITTEN, *pages()}
    assert {name for pattern in patterns for name in fnmatch.filter(known, pattern)} == known
    assert {pattern for pattern in patterns if "*" not in pattern} <= known


def test_every_built_in_hook_is_in_one_group():
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(name for name, _ in listing("hooks"))


def test_every_class_command_and_base_has_a_page():
    for kind in ("hooks", "datasets", "models"):
        assert {f"reference/{kind}/{name.lower()}.md" for name, _ in listing(kind)} <= pages().keys()
    assert {f"reference/commands/{name}.md" for name in commands.commands} <= pages().keys()
    assert all(f"## {name}\n" in pages()["reference/bases.md"] for name, _ in listing("bases"))


def test_every_public_name_is_on_a_page_and_can_be_imported():
    index = pages()["reference/python/index.md"]
    found = {}
    for name, text in pages().items():
        if path := name.startswith("reference/python/") and re.match(r"# \w+\n\n`([\w.]+)`\n", text):
            found[path[1]] = name
    assert {f"emrun.{name}" for name in dir(emrun) if not name.startswith("_")} <= found.keys()
    for path, name in found.items():
        module, _, attribute = path.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), path
        assert f"]({posixpath.basename(name)})" in index, path


def test_what_a_page_imports_from_emrun_is_there():
    found = set()
    for text in (WRITTEN | pages()).values():
        for module, names in re.findall(r"^ *(?:>>> )?from (emrun[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
            found |= {(module, name.split(" as ")[0].strip()) for name in names.split(",")}
    assert len(found) > 10
    assert [(module, name) for module, name in found if not hasattr(importlib.import_module(module), name)] == []


def test_a_page_says_of_each_argument_what_it_is():
    without = []
    for name, text in pages().items():
        if re.match("reference/(hooks|datasets|models)/", name):
            described = text.partition("## Arguments\n")[2].partition("\n## ")[0]
            for part in re.split("^### ", described, flags=re.MULTILINE)[1:]:
                without += [(name, part)] * (part.count("\n\n") < 2)
    assert not without


def test_a_page_of_a_class_begins_with_an_example_and_says_the_type_and_the_default_of_each_argument():
    without = []
    classes = "reference/(hooks|datasets|models|modules|schedules)/(?!index)"
    for name in filter(re.compile(classes).match, pages()):
        text, _, described = pages()[name].partition("## Arguments\n")
        title = re.match("# (.*)", text)[1].replace("TorchModel", "module")  # which is the class without a name
        without += [name] * (not re.search(rf"^```yaml\n[^`]*\b{title}\b", text, re.MULTILINE))
        for part in re.split("^### ", described.partition("\n## ")[0], flags=re.MULTILINE)[1:]:
            kind = part.split("\n\n")[1]
            without += [(name, part)] * (not re.fullmatch(r"[A-Z].+; (required|optional|default `.*`)\.", kind))
    assert not without


@pytest.mark.parametrize("name", [f"reference/modules/{name.lower()}.md" for name in built_ins("")])
def test_the_example_of_a_module_has_its_arguments(name):
    (example,) = re.findall(r"^```yaml\n(.*?)^```", pages()[name], re.MULTILINE | re.DOTALL)
    module = YAML(typ="safe").load(example)["model"]["module"]
    named = parameters(locate(built_ins("")[module.pop("class")]))
    required = {key for key, parameter in named.items() if parameter.default is parameter.empty}
    assert required <= module.keys() <= named.keys()


@pytest.mark.whole
@pytest.mark.parametrize("section", ["config", "main_loop", "model", "sweep"])
def test_every_key_has_an_example_that_is_valid(section, tmp_path, monkeypatch):
    place = {"config": "config/index", "model": "models/torchmodel"}.get(section, f"config/{section}")
    keys = set(re.findall(r"^#+ `(\w+)`$", pages()[f"reference/{place}.md"], re.MULTILINE))
    assert keys == EXAMPLES[section].keys()
    monkeypatch.chdir(ROOT / "sample_configs" / "my_project")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for key, text in EXAMPLES[section].items():
        assert re.search(rf"\b{key}:", text)
        if key != "extends":
            (tmp_path / "part.yaml").write_text(f"extends: {Path.cwd()}/config.yaml\n{text}\n")
            check_statically(load_config(str(tmp_path / "part.yaml")), evaluations=True)


def test_the_docstring_of_hooks_has_every_event():
    shown = dict(re.findall(r"(\w+)\(([\w, ]*)\)", pages()["reference/python/events.md"]))
    assert {name: tuple(filter(None, shown[name].split(", "))) for name in EVENTS} == EVENTS


def test_the_files_for_programs_are_those_of_the_commands():
    Draft202012Validator.check_schema(json.loads(schema_text()))
    codes = [row["code"] for row in json.loads(errors_text())]
    assert len(codes) == len(set(codes)) > 30
    assert all(row["cause"] and row["cure"] for row in json.loads(errors_text()))


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("such as sweep.objective=valid/loss/mean.", "such as `sweep.objective=valid/loss/mean`."),
        ("{low: 1.0e-5, high: 1.0e-2}", "{low: 1.0e-5, high: 1.0e-2}"),
        ("such as apache-2.0", "such as apache-2.0"),
    ],
)
def test_the_help_of_a_command_has_whole_overrides_as_code_and_no_numbers(text, marked):
    assert quoted(text) == marked


def test_every_page_that_code_or_a_message_names_exists():
    found = set()
    for folder in ("emrun", "hooks", "datasets", "sample_configs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".toml", ".yaml", ".md", ".txt", ".js") and path.is_file():
                found |= set(re.findall(r"docs/[\w./]+\.md(?:#[\w-]+)?", path.read_text(encoding="utf-8")))
    assert found
    for target in found:
        name, _, anchor = target.partition("#")
        assert (ROOT / name).exists(), target
        assert not anchor or anchor in anchors((ROOT / name).read_text(encoding="utf-8")), target


def test_the_page_of_exit_statuses_has_all_that_errors_have():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "emrun").rglob("*.py")]
    used = {status for text in sources for status in re.findall(r"^    exit_status = (\d+)", text, re.MULTILINE)}
    rows = re.findall(r"^\| ([\d, ]+) \|", WRITTEN["reference/exit_status.md"], re.MULTILINE)
    assert used <= {status for row in rows for status in row.split(", ")} | {
        "78"
    }  # 78 is between a sweep and its trials
