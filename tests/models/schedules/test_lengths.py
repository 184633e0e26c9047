"""Lengths of parts of a schedule: shares of the run, updates, passes."""

import pytest

from emrun.base.errors import ArgumentError
from emrun.base.types import Horizon
from emrun.models.schedules.lengths import Length


@pytest.mark.parametrize(
    ("text", "updates"),
    [
        ("5%", 10),
        (" 12.5 % ", 25),
        ("0.3%", 1),
        ("0.2%", 0),
        ("100%", 200),
        ("500 updates", 500),
        ("1 update", 1),
        ("2 passes", 80),
        ("1 pass", 40),
        ("0.5 passes", 20),
    ],
)
def test_a_length_is_a_number_of_updates(text, updates):
    assert Length.parse("warmup", text).updates(Horizon(200, 40)) == updates


def test_a_share_is_not_off_by_one_from_rounding():
    assert all(Length.parse("warmup", f"{share}%").updates(Horizon(100)) == share for share in range(101))


@pytest.mark.parametrize("text", ["5%", "500 updates", "1 pass", "2.5 passes"])
def test_a_length_is_shown_as_it_is_written(text):
    assert str(Length.parse("warmup", text)) == text


WAYS = "write a share of the run such as '5%', or '500 updates', or '2 passes'"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (500, f"500 is not a length with a unit; {WAYS}"),
        (0.05, f"0.05 is not a length with a unit; {WAYS}"),
        ("500", f"'500' is not a length with a unit; {WAYS}"),
        ("1e3", f"'1e3' is not a length with a unit; {WAYS}"),
        ("3 epochs", f"'3 epochs' is not a length with a unit; {WAYS}"),
        ("-5%", f"'-5%' is not a length with a unit; {WAYS}"),
        ("", f"'' is not a length with a unit; {WAYS}"),
        (f"{10**400} passes", f"'{10**400} passes' is not a length with a unit; {WAYS}"),
        (True, f"True is not a length with a unit; {WAYS}"),
        (["5%"], f"['5%'] is not a length with a unit; {WAYS}"),
        ("101%", "'101%' is more than the whole run"),
        ("1.5 updates", "'1.5 updates' is not a whole number of updates"),
    ],
    ids=str,
)
def test_what_is_not_a_length_is_an_error_that_shows_the_three_ways(value, message):
    with pytest.raises(ArgumentError) as caught:
        Length.parse("warmup", value)
    assert (caught.value.argument, caught.value.message) == ("warmup", message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5%", "5%, but the number of updates of the run is not known: limit it"),
        ("2 passes", "2 passes, but the number of updates of a pass is not known: add num_batches to the dataset"),
    ],
)
def test_a_length_of_something_unknown_is_an_error(text, message):
    with pytest.raises(ArgumentError) as caught:
        Length.parse("cooldown", text).updates(Horizon(None, missing="limit it"))
    assert caught.value.argument == "scheduler.cooldown"
    assert message in caught.value.message
