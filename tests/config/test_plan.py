"""A config is checked as a whole before anything is built."""

from collections import Counter

import pytest
from projects import linear_on_digits

from emrun.base.errors import ConfigError
from emrun.config import planner
from emrun.config.config import load_config
from emrun.config.plan import Plan, defaults_of, with_statistics
from emrun.config.source_finder import Unimported

CONFIG = linear_on_digits(hooks=[{"StopAfter": {"epochs": 3}}])


@pytest.fixture
def checked(monkeypatch):
    """The keys of all calls that are checked, each with how often."""
    found = Counter()
    check = planner.check_call

    def counted(*arguments, **named):
        found[named["key"]] += 1
        return check(*arguments, **named)

    monkeypatch.setattr(planner, "check_call", counted)
    return found


def test_a_config_is_planned_in_one_go(checked):
    plan = Plan.of(load_config(CONFIG), Unimported())
    assert [recipe.key for recipe in plan.hooks] == ["hooks[0].StopAfter", "hooks[1].SaveLatest"]
    assert set(checked.values()) == {1}


def test_mistakes_of_a_stream_are_reported_under_its_key_and_other_mistakes_once():
    overlays = {"valid": {"seed": -1, "dataset": {"batch": 5}}}
    with pytest.raises(ConfigError) as caught:
        Plan.with_evaluations(load_config({**CONFIG, "sede": 3, "eval": overlays}), Unimported())
    assert {problem.key for problem in caught.value.problems} == {"", "eval.valid.seed", "eval.valid.dataset"}


@pytest.mark.parametrize("key", ["xyz", "main_loop.bufer", "dataset.batch"])
def test_an_unknown_key_of_a_stream_in_an_override_is_reported_once(key):
    config = load_config(CONFIG).overridden([f"eval.valid.{key}=1"])
    with pytest.raises(ConfigError) as caught:
        Plan.with_evaluations(config, Unimported())
    assert len(caught.value.problems) == 1


def test_defaults_are_named_as_overrides_write_them():
    found = {key: (value, kind) for key, value, kind in defaults_of(load_config(CONFIG))}
    assert found["hooks.0.StopAfter.minutes"] == (None, "StopAfter")
    assert found["dataset.batch_size"][1] == "Digits"
    assert found["main_loop.extra_streams"][1] == "MainLoop"
    assert "hooks.0.StopAfter.epochs" not in found


def test_an_overlay_whose_value_is_only_equal_is_checked():
    config = {
        "vars": {"n": 1},
        "dataset": {"class": "Digits", "batch_size": "${vars.n}"},
        "model": {"module": {"class": "torch.nn.ReLU"}},
        "eval": {"valid": {"vars": {"n": True}}},
    }
    with pytest.raises(ConfigError, match=r"eval\.valid\.dataset\.batch_size.*True"):
        Plan.with_evaluations(load_config(config), Unimported())


@pytest.mark.parametrize(
    ("model", "hooks", "is_wrong"),
    [
        ({}, [], True),
        ({"optimizer": None, "class": "torch_model"}, ["StopAfter"], True),
        ({"class": "no_optimizer.Own"}, [], False),
        ({}, ["no_optimizer.Sets"], False),
    ],
)
def test_a_model_without_optimizer_is_wrong_unless_a_class_of_the_user_may_make_one(
    tmp_path, monkeypatch, model, hooks, is_wrong
):
    (tmp_path / "no_optimizer.py").write_text(
        "import emrun\nclass Own(emrun.TorchModel): ...\n"
        "class Sets(emrun.AbstractHook):\n    def __init__(self, model): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    own = {key: value for key, value in CONFIG["model"].items() if key != "optimizer"}
    config = load_config({**CONFIG, "model": {**own, **model}, "hooks": hooks})
    if is_wrong:
        with pytest.raises(ConfigError, match=r"model\.optimizer: training needs an optimizer"):
            Plan.with_evaluations(config, Unimported())
    else:
        Plan.with_evaluations(config, Unimported())


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("name=plain", ["ComputeStats", "StopAfter"]),
        ("hooks=null", ["ComputeStats"]),
        ("model.class=emrun.TorchModel", ["ComputeStats", "StopAfter"]),
        ("model.class=my_models.Mine", ["StopAfter"]),  # may have no loss
        ("hooks.ComputeStats.variables=[accuracy]", ["StopAfter", "ComputeStats"]),
        ("hooks=[emrun.hooks.ComputeStats]", ["emrun.hooks.ComputeStats"]),
        ("hooks=none", None),  # is reported where the hooks are read
    ],
)
def test_compute_stats_is_added_in_front_unless_it_is_listed(override, names):
    hooks = with_statistics(load_config(CONFIG, [override])).root.get("hooks").plain()
    assert (hooks if names is None else [each if isinstance(each, str) else next(iter(each)) for each in hooks]) == (
        "none" if names is None else names
    )
