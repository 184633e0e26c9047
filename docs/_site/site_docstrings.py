"""Docstrings as Markdown: what a class or a function of emrun is, with its arguments, their types and defaults."""

import ast
import functools
import inspect
import json
import re
import textwrap
import typing

from emrun.config.catalogue import argument_texts
from emrun.config.import_finder import Imported
from emrun.config.type_hints import describe

_SECTIONS = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+)(?: \(.*?\))?:(.*)")


def sections_of(target):
    """Return the text of a docstring before its sections, and name of a section -> its text."""
    first, *rest = _SECTIONS.split(inspect.cleandoc(target.__doc__ or ""))
    return first.strip(), {name: text.strip("\n") for name, text in zip(rest[::2], rest[1::2], strict=True)}


def summary(target):
    """Return the first sentence of a docstring, in one line."""
    text = " ".join(sections_of(target)[0].partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?:]) (?=[A-Z`])", text)[0]


def prose(text):
    """Return a docstring's text as Markdown: indented blocks are fenced, as YAML if they look like a config."""
    return "\n\n".join(fenced(block) if block.startswith("    ") else block for block in blocks(text))


def blocks(text):
    """Return the paragraphs of a text; the parts of an indented block that has empty lines stay together."""
    parts = []
    for block in filter(None, text.strip("\n").split("\n\n")):
        if parts and block.startswith("    ") and parts[-1].startswith("    "):
            parts[-1] += f"\n\n{block}"
        else:
            parts.append(block)
    return parts


def fenced(block):
    """Return an indented block in a fence."""
    code = textwrap.dedent(block).rstrip()
    if code.startswith("- "):
        code = f"hooks:\n{textwrap.indent(code, '  ')}"
    return f"```{'yaml' if re.match(r'^[a-z_]+:', code) else 'text'}\n{code}\n```"


def entries(text):
    """Return name -> description of the entries of a section such as `Args`."""
    found = {}
    for line in text.split("\n"):
        entry = _ENTRY.match(line)
        if entry and line[4:5] != " ":
            name = entry[1]
            found[name] = entry[2].strip()
        elif found:
            found[name] += f"\n{line.strip()}"
    return found


def parameters(target):
    """Return name -> parameter of a class or function that a config calls."""
    return Imported().parameters(target).named


def arguments(target, supplied=(), *, level="##", examples=None):
    """Return the arguments of a class, each under a heading of its own, with type, default, meaning and example.

    Args:
        target: the class.
        supplied: the arguments that emrun supplies, which are left out.
        level: the heading.
        examples: name -> YAML with the argument.
    """
    texts = argument_texts(target) | entries(sections_of(target)[1].get("Args", ""))
    parts = []
    for name, parameter in parameters(target).items():
        if name in supplied:
            continue
        parts.append(f"{level} `{name}`")
        parts.append(f"{kind_of(parameter.annotation)}; {default_of(parameter)}.")
        if name in texts:
            parts.append(sentence(texts[name]))
        if name in (examples or {}):
            parts.append(f"```yaml\n{examples[name]}\n```")
    return "\n\n".join(parts)


def sentence(text):
    """Return a description with a capital letter at its begin."""
    return text[:1].upper() + text[1:]


def kind_of(hint):
    """Return what a config can write for a type hint."""
    if hint in (None, typing.Any, inspect.Parameter.empty):
        return "Anything"
    words = re.sub(r" or null$", "", describe(hint))
    return sentence(re.sub(r"\bFactory\b", "an object, written as `{class: NAME, ...}`", words))


def default_of(parameter):
    """Return the default of a parameter as YAML."""
    value = parameter.default
    if value is parameter.empty:
        return "required"
    if value is None:
        return "default `null`"
    if callable(value):
        return "optional"
    is_word = isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w./-]*", value)
    return f"default `{value if is_word else json.dumps(value, default=str)}`"


def member_page(target, elsewhere=""):
    """Return the docstring of a class or a function for programmers: its signature, attributes and methods.

    Args:
        target: the class or the function.
        elsewhere: where the arguments of the constructor are described, if it is on another page.
    """
    text, sections = sections_of(target)
    if elsewhere:
        sections["Args"] = elsewhere
    parts = [f"```python\n{signature(target)}\n```", prose(text)]
    parts += [listed(name, sections[name]) for name in sections]
    for name, about in (attributes(target) if inspect.isclass(target) else {}).items():
        parts += [f"## {name}", prose(about)]
    for name, member in members(target):
        about, more = sections_of(member)
        is_called = callable(member)
        parts += [f"## {name}{'()' if is_called else ''}"]
        parts += [f"```python\n{signature(member, name)}\n```"] if is_called else []
        parts += [prose(about), *(listed(section, more[section]) for section in more)]
    return "\n\n".join(filter(None, parts))


def listed(name, text):
    """Return a section of a docstring as a list."""
    title = {"Args": "Arguments", "Raises": "Errors"}.get(name, name)
    found = entries(text)
    lines = [f"- `{key}`: " + about.replace("\n", "\n  ") for key, about in found.items()]
    return f"**{title}**\n\n" + ("\n".join(lines) if found else textwrap.dedent(text))


class _AsWritten(str):
    """An annotation that is printed without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def signature(target, name=""):
    """Return the call of a function or a class, with the annotations as they are written."""
    found = inspect.signature(target)
    shown = [
        parameter.replace(annotation=_AsWritten(parameter.annotation))
        if isinstance(parameter.annotation, str)
        else parameter
        for parameter in found.parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    returned = found.return_annotation
    is_text = isinstance(returned, str) and not inspect.isclass(target)
    returned = _AsWritten(returned) if is_text else inspect.Signature.empty
    call = f"{name or target.__name__}{found.replace(parameters=shown, return_annotation=returned)}"
    return call if len(call) <= 100 else broken(call)


def broken(call):
    """Return a call with an argument in each line."""
    depth = 0
    out = []
    for letter in call:
        depth -= letter in ")]}"
        if letter == ")" and depth == 0:
            out.append(",\n")
        out.append(letter)
        if letter == "(" and depth == 0:
            out.append("\n    ")
        depth += letter in "([{"
        if letter == "," and depth == 1:
            out.append("\n   ")
    return "".join(out)


def members(target):
    """Return the public methods and properties that a class has itself and that have a docstring, in their order."""
    own = vars(target).items() if inspect.isclass(target) else ()
    found = [(name, getattr(member, "__func__", member)) for name, member in own if name[0] != "_"]
    return [(name, member) for name, member in found if inspect.isfunction(member) or isinstance(member, property)]


@functools.cache
def attributes(target):
    """Return name -> docstring of the attributes that the body of a class describes."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(target))).body
    found = {}
    for one, after in zip(tree.body, tree.body[1:], strict=False):
        named = one.target if isinstance(one, ast.AnnAssign) else getattr(one, "targets", [None])[0]
        is_text = isinstance(after, ast.Expr) and isinstance(getattr(after.value, "value", None), str)
        if isinstance(named, ast.Name) and is_text:
            found[named.id] = inspect.cleandoc(after.value.value)
    return found
