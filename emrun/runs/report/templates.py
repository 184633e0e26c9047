"""The templates of pages: values may be anybody's, so every text is escaped, and control characters are seen."""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path
from typing import Any

from emrun.base.wording import counted

_STYLE = ("uplot.min.css", "page.css")
_SCRIPT = ("uplot.min.js", "page.js")


def rendered(template: str, **values: Any) -> str:
    """Return a template with values; `style` and `script` are those of all pages.

    Args:
        template: the name of the file.
        values: the values, plain.
    """
    return str(environment().get_template(template).render(style=_asset(_STYLE), script=_asset(_SCRIPT), **values))


@functools.cache
def environment() -> Any:
    """Return what reads the templates, a `jinja2.Environment`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=visible,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    templates.filters.update(counted=counted, digest=_digest, six_digits=_six_digits)
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return templates


@functools.cache
def _asset(names: tuple[str, ...]) -> Any:
    from markupsafe import Markup

    texts = [Path(__file__).with_name(name).read_text(encoding="utf-8").strip() for name in names]
    return Markup("\n".join(texts))


def visible(value: Any) -> Any:
    """Return a value as text in which characters that are not printable, except ends of lines and tabs, are escapes.

    None is nothing, and HTML stays as it is.
    """
    if hasattr(value, "__html__"):
        return value
    text = "" if value is None else str(value)
    if text.replace("\n", "").isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1] for letter in text)


def _six_digits(value: Any) -> Any:
    """Return a number with six digits, and any other value as it is."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else value


def _digest(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
