"""Hooks that act on gradients and weights: a run that is interrupted and resumed equals an uninterrupted one."""

import json
import shutil

import pytest
from campaign import thinned
from training.resuming import FEW_HOOKS, config_of, interrupted, result, resumed, straight

HOOKS = {
    "spikes": {"SkipSpike": {"factor": 1.1, "window": 2}},
    "norms": {"LogNorms": {"match": ["^layers.0", "bias"], "every": "2 updates"}},
    "clip": {"ClipGradients": {"norm": 0.5}},
    "freeze": {"Freeze": {"match": "^layers.[01]", "until": "4 updates"}},
}


SEVERAL = {
    "first": {"class": "AdamW", "lr": 0.05, "match": r"layers\.[01]"},
    "last": {"class": "SGD", "lr": 0.1, "momentum": 0.9, "match": r"layers\.3"},
}


def config_with(hooks, **model):
    config = config_of(hooks=FEW_HOOKS)
    config["model"] |= model
    config["model"]["accumulate"] = 2  # windows of 2, 2 and 1 batches
    config["hooks"] = [*hooks, *config["hooks"]]
    return config


def check(project, hooks, every, **model):
    """Compare runs that are interrupted at every n-th event, and resumed, with one that is not."""
    config = config_with(hooks, **model)
    events = interrupted(config, project / "straight", None)
    expected = result(project / "straight")
    for at in range(events.index("before_epoch 1"), len(events), every):
        interrupted(config, project / "run", at + 1)
        resumed(project / "run")
        assert result(project / "run") == expected, events[at]
        shutil.rmtree(project / "run")
    return expected


@pytest.mark.parametrize("every", thinned([60, 7], [60]))
def test_a_resume_is_exact_with_all_of_them(project, every):
    decay = {"SetOverTime": {"target": "optimizer.weight_decay", "end": 0.5, "schedule": {"class": "Linear"}}}
    expected = check(project, [decay, *HOOKS.values()], every, optimizer={"class": "AdamW", "lr": 0.05})
    assert 0 < expected["model"]["skipped_updates"]["total"] < 4


def test_with_several_optimizers_each_has_its_norms(project):
    config = config_with(list(HOOKS.values()), optimizer=SEVERAL, scheduler=None)
    straight(project, config)
    line = json.loads((project / "straight" / "metrics.jsonl").read_text().splitlines()[-1])
    found = {name for name in line["streams"]["train"] if "norm" in name}
    ends = ["first", "first(^layers.0)", "first(bias)", "last", "last(bias)"]
    assert found == {f"{kind}_norm_{end}" for kind in ("gradient", "weight") for end in ends}


@pytest.mark.campaign
@pytest.mark.parametrize("name", HOOKS)
def test_a_resume_is_exact_from_every_event_with_one(project, name):
    check(project, [HOOKS[name]], every=3)
