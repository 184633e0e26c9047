"""What callables take, read from the living object."""

import inspect

from emrun.hook import AbstractHook
from emrun.signatures import parameters_of


class Base(AbstractHook):
    def __init__(self, needed, limit=1, **kwargs):
        super().__init__(**kwargs)


class Closed(Base):
    def __init__(self, own):
        super().__init__(own)


class Open(Base):
    def __init__(self, own, limit, **kwargs):
        super().__init__(own, **kwargs)


def test_a_hook_that_takes_keyword_arguments_has_the_parameters_of_its_base():
    parameters = parameters_of(Open)
    assert list(parameters.named) == ["own", "limit", "needed", "model", "dataset", "output_dir"]
    assert not parameters.takes_any


def test_what_the_base_needs_the_hook_may_supply_itself():
    parameters = parameters_of(Open)
    needed = [name for name, parameter in parameters.named.items() if parameter.default is inspect.Parameter.empty]
    assert needed == ["own", "limit"]


def test_a_hook_that_takes_none_has_only_its_own_parameters():
    assert list(parameters_of(Closed).named) == ["own"]


def test_any_other_class_with_keyword_arguments_takes_all():
    class Free:
        def __init__(self, a, *rest, **kwargs):
            pass

    parameters = parameters_of(Free)
    assert list(parameters.named) == ["a"]
    assert parameters.takes_any
    assert parameters.takes_more


def test_what_is_written_in_c_may_have_no_signature():
    assert parameters_of(iter) is None


def test_types_are_those_that_the_annotations_mean():
    def made(a: "int", b: "Nowhere" = 1, c=2):  # noqa: F821
        pass

    named = parameters_of(made).named
    assert [named[name].annotation for name in "abc"] == [int, None, None]
