"""How long a run becomes, and with which overrides; tests/cli/test_verify_resume.py has real runs."""

import pytest

from emrun.base.errors import UsageError
from emrun.diagnosis.longer_run import Length, _changes, verify_extension
from emrun.diagnosis.recorded_trainings import Job, Recording


@pytest.mark.parametrize(
    ("text", "now", "longer"),
    [
        ("2x", {"epochs": 10}, {"epochs": 20}),
        ("1.5x", {"epochs": 10, "updates": 44}, {"epochs": 15, "updates": 66}),
        ("1.1x", {"updates": 10}, {"updates": 11}),
        ("40 epochs", {"epochs": 10}, {"epochs": 40}),
        ("3 passes", {"updates": 44}, {"passes": 3}),
        ("1 pass", {"updates": 4}, {"passes": 1}),
        ("200 updates", {"updates": 100, "epochs": 2}, {"updates": 200}),
    ],
)
def test_a_length_is_a_factor_or_a_new_end(text, now, longer):
    assert Length.parse(text).limits(now) == longer


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2", "'2' has no unit; write a factor such as 2x, or a new end such as '40 epochs'"),
        ("twice", "'twice' is not a length"),
        ("-2x", "'-2x' is not a length"),
        ("1x", "'1x' does not make the run longer"),
        ("0.5x", "'0.5x' does not make the run longer"),
        ("1.5 epochs", "'1.5 epochs' is not a whole number"),
        ("1.25x", "1.25 times 10 epochs is 12.5, not a whole number; write for example '13 epochs'"),
        ("10 epochs", "10 epochs are not more than the 10 of StopAfter"),
    ],
)
def test_other_lengths_are_wrong_usage(text, message):
    with pytest.raises(UsageError, match="--extend: ") as caught:
        Length.parse(text).limits({"epochs": 10})
    assert message in str(caught.value)


def test_the_limits_of_every_stop_after_are_changed():
    hooks = ["SaveLatest", {"StopAfter": {"epochs": 4, "minutes": 9}}, {"emrun.hooks.StopAfter": {"updates": 30}}]
    factor, end = ["hooks.1.StopAfter.epochs=8", "hooks.2.emrun.hooks.StopAfter.updates=60"], "hooks.1.StopAfter"
    assert _changes(hooks[:2], Length.parse("2x")) == factor[:1]
    assert _changes(hooks[:2], Length.parse("90 updates")) == [f"{end}.updates=90", f"~{end}.epochs"]
    with pytest.raises(UsageError, match="no StopAfter of the config has a limit of epochs, passes, updates, iterat"):
        _changes([{"StopAfter": {"minutes": 9}}, "SaveLatest"], Length.parse("2x"))


def test_a_run_that_something_else_ends_is_not_extended(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("seed: 1\nhooks: [StopAfter: {epochs: 2}]\n")
    events = [{"kind": "batch", "training": True, "iteration": 5}]
    monkeypatch.setattr(Job, "run", lambda job: Recording(events, 0))
    with pytest.raises(UsageError, match="ends after 5 iterations too; something else than StopAfter ends it"):
        verify_extension(tmp_path / "config.yaml", (), "2x")
