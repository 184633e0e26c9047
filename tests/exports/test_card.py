"""The model card."""

import pytest

from emrun.exports.card import escaped
from emrun.exports.measured import interval_of_share


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<script>", "&lt;script&gt;"),
        ("a|b", "a\\|b"),
        ("`code` *bold* _i_", "\\`code\\` \\*bold\\* \\_i\\_"),
        ("---", "&#8203;---"),
        ("1. item", "&#8203;1. item"),
        ("one\ntwo\x1b[2J", "one two \\[2J"),
        ("https://a.b @you", "https:&#47;&#47;a.b &#64;you"),
        ("# head", "\\# head"),
        ("![x](y)", "\\!\\[x\\](y)"),
        ("&amp;", "&amp;amp;"),
        ("a" * 300, "a" * 200 + "..."),
    ],
)
def test_markup_of_others_is_shown_and_not_read(text, shown):
    assert escaped(text) == shown


def test_the_interval_of_a_share_is_that_of_wilson():
    low, high = interval_of_share(0.9, 10)
    assert (round(low, 4), round(high, 4)) == (0.5958, 0.9821)  # R: prop.test(9, 10, correct = FALSE)
    assert interval_of_share(1.0, 10)[1] == pytest.approx(1.0)
