"""Hooks that act on gradients and weights: a run that is interrupted and resumed equals an uninterrupted one."""

import shutil

import pytest
from training.resuming import config_of, interrupted, result, resumed

HOOKS = {
    "norms": {"LogNorms": {"match": ["^layers.0", "bias"], "every": "2 updates"}},
    "clip": {"ClipGradients": {"norm": 0.5}},
    "freeze": {"Freeze": {"match": "^layers.[01]", "until": "4 updates"}},
}


def check(project, hooks, every):
    """Compare runs that are interrupted at every n-th event, and resumed, with one that is not."""
    config = config_of()
    config["model"]["accumulate"] = 2  # windows of 2, 2 and 1 batches
    config["hooks"] = [*hooks, *config["hooks"]]
    events = interrupted(config, project / "straight", None)
    expected = result(project / "straight")
    for at in range(events.index("before_epoch 1"), len(events), every):
        interrupted(config, project / "run", at + 1)
        resumed(project / "run")
        assert result(project / "run") == expected, events[at]
        shutil.rmtree(project / "run")


def test_a_resume_is_exact_with_all_of_them(project):
    check(project, list(HOOKS.values()), every=7)


@pytest.mark.campaign
@pytest.mark.parametrize("name", HOOKS)
def test_a_resume_is_exact_from_every_event_with_one(project, name):
    check(project, [HOOKS[name]], every=3)
