"""The plan of the learning rates, as it is shown."""

import pytest

from emrun.schedule_plan import SchedulePlan, at, curve


def test_a_plan_is_a_line_about_the_schedule_and_one_with_the_rates():
    plan = SchedulePlan("Cosine, warm-up 10 updates", 200, rates=[[index / 100 for index in range(101)]])
    first, second = plan.lines()
    assert first == "learning rate over 200 updates: Cosine, warm-up 10 updates"
    assert second.startswith("  0% 0, 25% 0.25, 50% 0.5, 75% 0.75, 100% 1  ▁▁▁")
    assert len(second.rpartition("  ")[2]) == 30


def test_groups_with_the_same_rates_have_one_line():
    plan = SchedulePlan("StepLR", 100, 5, rates=[[1.0, 0.1], [2.0, 0.2], [1.0, 0.1]])
    assert plan.lines() == [
        "learning rate over 100 updates, 5 epochs: StepLR",
        "  groups 0, 2: 0% 1, 25% 1, 50% 1, 75% 0.1, 100% 0.1  █▁",
        "  group 1: 0% 2, 25% 2, 50% 2, 75% 0.2, 100% 0.2  █▁",
    ]


def test_a_run_without_updates_has_no_rates():
    assert SchedulePlan("Cosine", 0, rates=[[0.1]]).lines() == ["learning rate over 0 updates: Cosine"]
    assert SchedulePlan("StepLR", 1, 1).lines() == ["learning rate over 1 update, 1 epoch: StepLR"]


def test_what_is_not_known_is_noted_instead():
    assert SchedulePlan("Linear", note="why").lines() == ["learning rate: Linear; why"]


@pytest.mark.parametrize(
    ("rates", "expected"),
    [([0.0, 0.5, 1.0], "▁▅█"), ([0.3], "█"), ([0.0, 0.0], "▁▁"), ([0.1] * 500, "█" * 30)],
)
def test_a_curve_goes_from_0_to_the_highest_rate(rates, expected):
    assert curve(rates) == expected


def test_rates_at_shares_are_those_of_the_first_and_the_last_update_and_between():
    assert [at([1.0, 2.0, 3.0, 4.0, 5.0], share) for share in (0, 0.25, 0.5, 0.75, 1)] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert at([7.0], 0.5) == 7.0


def test_as_plain_values_a_plan_has_its_rates_and_its_text():
    plan = SchedulePlan("Linear", 5, rates=[[1.0, 0.8, 0.6, 0.4, 0.2]]).as_dict()
    assert plan["rates"] == [[1.0, 0.8, 0.6, 0.4, 0.2]]
    assert plan["updates"] == 5
    assert plan["lines"][0] == "learning rate over 5 updates: Linear"
