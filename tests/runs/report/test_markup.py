"""Whatever a text is, it is text in HTML."""

from html.parser import HTMLParser

from hypothesis import given, settings, strategies as st

from emrun.runs.report.markup import escaped, facts, table, tag


class Parser(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], ""

    def handle_starttag(self, name, attributes):
        self.tags.append((name, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def parsed(html):
    parser = Parser()
    parser.feed(html)
    parser.close()
    return parser


@settings(deadline=None)
@given(text=st.text())
def test_a_text_is_neither_a_tag_nor_the_end_of_an_attribute(text):
    found = parsed(tag("p", text, title=text))
    assert [name for name, _ in found.tags] == ["p"]
    if text.isprintable():
        assert (found.text, found.tags[0][1]["title"]) == (text, text)
    tag("p", text).encode()  # no lone surrogates


def test_control_characters_are_seen():
    assert escaped("a\x1b[31m\u202eb\nc\td\ud800") == "a\\x1b[31m\\u202eb\nc\td\\ud800"


def test_html_is_not_escaped_again():
    assert tag("p", tag("b", "<"), None, ["&", 1]) == "<p><b>&lt;</b>&amp;1</p>"


def test_attributes():
    assert (
        tag("a", class_="x", data_run="1", hidden=True, id=None, open=False) == '<a class="x" data-run="1" hidden></a>'
    )


def test_numbers_in_tables_have_six_digits_and_their_exact_value_to_sort_by():
    found = table(["a", "b"], [["x", 1.23456789]], numeric=[1], label="t", is_sortable=True)
    assert '<td class="number" data-value="1.23456789">1.23457</td>' in found
    assert table(["a"], [], label="t") == ""
    assert facts([("a", None), ("b", "")]) == ""
