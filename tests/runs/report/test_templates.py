"""Whatever a text is, it is text in HTML."""

from html.parser import HTMLParser

import pytest
from hypothesis import given, settings, strategies as st
from jinja2 import UndefinedError

from emrun.runs.report.templates import environment, rendered, visible


class Parser(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], ""

    def handle_starttag(self, name, attributes):
        self.tags.append((name, dict(attributes)))

    def handle_data(self, data):
        self.text += data


@settings(deadline=None)
@given(text=st.text())
def test_a_text_is_neither_a_tag_nor_the_end_of_an_attribute(text):
    html = environment().from_string('<p title="{{ text }}">{{ text }}</p>').render(text=text)
    found = Parser()
    found.feed(html)
    found.close()
    assert [name for name, _ in found.tags] == ["p"]
    if text.isprintable():
        assert (found.text, found.tags[0][1]["title"]) == (text, text)
    html.encode()  # no lone surrogates


def test_control_characters_are_seen():
    assert visible("a\x1b[31m\u202eb\nc\td\ud800") == "a\\x1b[31m\\u202eb\nc\td\\ud800"
    assert visible(None) == ""


def test_a_name_that_a_template_lacks_is_an_error():
    with pytest.raises(UndefinedError):
        rendered("page.html", title="x")


def test_numbers_in_tables_have_six_digits_and_their_exact_value_to_sort_by():
    source = (
        '{% from "parts.html" import facts, table %}{{ table("t", ["a", "b"], rows, [1], true) }}{{ facts(pairs) }}'
    )
    show = environment().from_string(source).render
    found = show(rows=[["x", 1.23456789]], pairs=[("seed", 0), ("b", None), ("c", "")])
    assert '<td class="number" data-value="1.23456789">1.23457</td>' in found
    assert "<dt>seed</dt><dd>0</dd>" in found
    assert found.count("<dt>") == 1
    assert show(rows=[], pairs=[("a", None)]).strip() == ""
