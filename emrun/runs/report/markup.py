"""HTML from values that may be anybody's: every text is escaped, and control characters are shown as their escapes."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

_VOID = ("meta", "img", "input")
_SHOWN = frozenset("\n\t")


class Html(str):
    """Text that is HTML already, so that it is not escaped again."""

    __slots__ = ()


def escaped(content: Any) -> Html:
    """Return a text, or another plain value, as HTML; `Html` stays as it is, None is nothing."""
    if isinstance(content, Html):
        return content
    return Html("" if content is None else html.escape(visible(str(content))))


def visible(text: str) -> str:
    """Return a text in which characters that are not printable, except ends of lines and tabs, are escapes."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(each if each.isprintable() or each in _SHOWN else ascii(each)[1:-1] for each in text)


def tag(name: str, *content: Any, **attributes: Any) -> Html:
    """Return an element.

    Args:
        name: its name.
        content: what is in it, one after another; lists are taken apart.
        attributes: its attributes; `class_` is the attribute class, `data_x` is data-x. True is an attribute without a
            value; those that are None or False are left out.
    """
    shown = []
    for key, value in attributes.items():
        if value is not None and value is not False:
            attribute = key.rstrip("_").replace("_", "-")
            shown.append(f" {attribute}" if value is True else f' {attribute}="{escaped(str(value))}"')
    begin = f"<{name}{''.join(shown)}>"
    return Html(begin if name in _VOID else f"{begin}{joined(content)}</{name}>")


def joined(content: Iterable[Any]) -> Html:
    """Return contents one after another."""
    return Html("".join(joined(each) if isinstance(each, list | tuple) else escaped(each) for each in content))


def section(title: str, *content: Any, id_: str | None = None) -> Html:
    """Return a section with a heading; nothing if all its contents are empty."""
    inside = joined(content)
    return tag("section", tag("h2", title), inside, id=id_) if inside else Html("")


def folded(title: Any, *content: Any, is_open: bool = False) -> Html:
    """Return content that is shown when its title is clicked; nothing without content."""
    inside = joined(content)
    return tag("details", tag("summary", title), inside, open=is_open) if inside else Html("")


def facts(pairs: Iterable[tuple[str, Any]]) -> Html:
    """Return pairs of a name and a value as a list; those without a value are left out."""
    shown = [(tag("dt", name), tag("dd", value)) for name, value in pairs if value not in (None, "")]
    return tag("dl", shown) if shown else Html("")


def table(
    headers: Sequence[str], rows: Sequence[Sequence[Any]], *, numeric: Sequence[int] = (), label: str,
    is_sortable: bool = False,
) -> Html:  # fmt: skip
    """Return a table; nothing without rows.

    Args:
        headers: a heading for each column.
        rows: the cells of each row: values, `Html`, or numbers, which are shown with six digits. The first cell of a
            row is its heading.
        numeric: the columns that are aligned to the right.
        label: what the table is, for a screen reader.
        is_sortable: whether a click at a heading sorts the rows.
    """
    if not rows:
        return Html("")
    right = set(numeric)

    def cell(index: int, value: Any) -> Html:
        exact = repr(value) if is_sortable and isinstance(value, int | float) else None
        attributes = {"class_": "number" if index in right else None, "data_value": exact}
        if index == 0:
            return tag("th", shown(value), scope="row", **attributes)
        return tag("td", shown(value), **attributes)

    heading = [tag("th", each, scope="col", class_="number" if i in right else None) for i, each in enumerate(headers)]
    body = [tag("tr", [cell(index, value) for index, value in enumerate(row)]) for row in rows]
    inside = tag(
        "table",
        tag("caption", label, class_="unseen"),
        tag("thead", tag("tr", heading)),
        tag("tbody", body),
        class_="sortable" if is_sortable else None,
    )
    return tag("div", inside, class_="scroll", tabindex="0", role="group", aria_label=label)


def shown(value: Any) -> Any:
    """Return a number with six digits, and any other value as it is."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else value


def listing(text: str) -> Html:
    """Return a text of several lines as it is; nothing without text."""
    return tag("pre", text, tabindex="0") if text else Html("")


def cut(text: str, most: int) -> str:
    """Return a text that is not longer than `most` characters, with what is left out said at its end."""
    return text if len(text) <= most else f"{text[:most]}\n... {len(text) - most:,} more characters"
