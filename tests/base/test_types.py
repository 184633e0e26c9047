"""What contracts, configs and hooks share: choices, counts, intervals, factories."""

import pytest
from doubles import loop_of

from emrun import AbstractHook
from emrun.base.errors import ArgumentError
from emrun.base.types import Factory, Interval

UNITS = ("epochs", "passes", "iterations", "minutes")


@pytest.mark.parametrize(
    "value, count, unit",
    [
        ("5 epochs", 5, "epochs"),
        ("1 epoch", 1, "epochs"),
        (" 500iterations ", 500, "iterations"),
        ("30 minutes", 30, "minutes"),
        ("0.5 minutes", 0.5, "minutes"),
        ("7", 7, "epochs"),
        (7, 7, "epochs"),
        ("2.0 epochs", 2, "epochs"),
        ("1 pass", 1, "passes"),
        ("3 passes", 3, "passes"),
    ],
)
def test_an_interval_is_a_number_and_a_unit(value, count, unit):
    assert Interval.parse("every", value, UNITS) == Interval(count, unit)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "epochs",
        "-1 epochs",
        "0 epochs",
        "5 apples",
        "5 5",
        True,
        None,
        [5],
        "1e3",
        "5 Epochs",
        "5 pas",
    ],
)
def test_any_other_interval_is_an_error_with_an_example(value):
    with pytest.raises(ArgumentError, match="is not an interval; write for example '5 epochs'"):
        Interval.parse("every", value, UNITS)


def test_an_interval_of_nothing_is_an_error_in_its_unit():
    with pytest.raises(ArgumentError, match=r"'0 iterations' is not an .* '5 iterations', a number above 0"):
        Interval.parse("every", "0 iterations", UNITS)


def test_a_part_of_an_epoch_is_not_an_interval():
    with pytest.raises(ArgumentError, match=r"'1\.5 epochs' is not an interval; write a whole number of epochs"):
        Interval.parse("every", "1.5 epochs", UNITS)


def test_a_unit_must_make_sense_where_it_stands():
    with pytest.raises(ArgumentError, match="'5 minutes' is not an interval"):
        Interval.parse("every", "5 minutes", ("epochs",))


def test_an_interval_is_shown_as_it_is_written():
    intervals = [Interval(5, "epochs"), Interval(1, "passes"), Interval(0.5, "minutes"), Interval(1, "updates")]
    assert [str(each) for each in intervals] == ["5 epochs", "1 pass", "0.5 minutes", "1 update"]


def target(*args, **kwargs):
    return args, kwargs


def test_a_factory_puts_the_owners_arguments_first():
    assert Factory(target, 3, lr=0.1)(1, 2) == ((1, 2, 3), {"lr": 0.1})


def test_a_factory_can_be_called_again():
    factory = Factory(target, x=[])
    assert factory(1) == factory(1)


def test_a_factory_keeps_the_owners_options_apart():
    factory = Factory(target, options={"inputs": ["a"]}, lr=1)
    assert factory.options == {"inputs": ["a"]}
    assert factory() == ((), {"lr": 1})


def test_an_argument_named_target_is_the_targets():
    assert Factory(target, target=5)() == ((), {"target": 5})


def test_a_factory_of_an_import_returns_the_target_uncalled():
    assert Factory(target, is_import=True)(1, 2) is target


def test_a_factory_shows_what_it_makes():
    assert repr(Factory(target)) == "Factory(target)"
    assert repr(Factory(5)) == "Factory(5)"


class Due(AbstractHook):
    """Notes when intervals are due."""

    def __init__(self):
        super().__init__()
        units = ("epochs", "updates", "iterations")
        self.every = [Interval.parse("every", each, units) for each in ("2 epochs", "3 updates", "4 iterations")]
        self.found = []

    def note(self, event):
        due = [str(each) for each in self.every if each.due(self.main_loop)]
        self.found += [(event, self.main_loop.iterations_done, *due)] if due else []

    def after_batch(self, stream_name):
        self.note(stream_name)

    def after_epoch(self, epoch_id):
        self.note(epoch_id)


def test_an_interval_is_due_in_batches_of_training_or_after_epochs():
    hook = Due()
    loop = loop_of(hook, extra_streams=["valid"])
    with loop:
        for _ in range(2):
            loop.epoch(["train"], ["valid"])
    count = loop.iterations_done // 2
    batches = {
        done: [f"{n} {unit}" for n, unit in ((3, "updates"), (4, "iterations")) if done % n == 0]
        for done in range(1, 2 * count + 1)
    }
    assert hook.found == [*(("train", done, *due) for done, due in batches.items() if due), (2, 2 * count, "2 epochs")]
    with pytest.raises(ValueError, match="an interval of minutes is not counted: 5 minutes"):
        Interval(5, "minutes").due(loop)
