"""docs/reference/hooks.md is what tests/hooks_page.py writes, and lists every built-in hook."""

from hooks_page import GROUPS, PAGE, page

from emrun.config.catalogue import listing


def test_every_built_in_hook_is_in_one_group():
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(name for name, _ in listing("hooks"))


def test_the_page_is_that_of_the_docstrings():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python tests/hooks_page.py --write`"
