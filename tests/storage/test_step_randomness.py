"""The random states before a step."""

import random

import numpy as np
import pytest
import torch

from emrun.base.encoding import set_random_state
from emrun.storage.step_randomness import StepRandomness

DRAWING = {
    "python": random.random,
    "numpy": np.random.rand,
    "torch": lambda: torch.rand(1),
}


@pytest.mark.parametrize("name", DRAWING)
def test_the_state_of_a_generator_that_steps_draw_from_is_the_one_before_the_step(name):
    randomness = StepRandomness()
    randomness.take_all()
    DRAWING[name]()
    take = randomness.watch()
    assert take is not None
    take()
    value = DRAWING[name]()
    states, exact = randomness.before_step()
    assert exact == [name]
    set_random_state(states)
    assert DRAWING[name]() == value


def test_of_hooks_that_change_batches_and_of_the_model_only_what_each_draws_from_is_taken():
    randomness = StepRandomness()
    randomness.take_all()
    for is_first in (True, False):
        randomness.before_hook()
        hook = randomness.before_step()
        of_hook = DRAWING["numpy"]()
        randomness.before_model()
        model = randomness.before_step()
        of_model = DRAWING["torch"]()
        if is_first:
            assert randomness.watch(of_whole_steps=False) is None
    assert (hook[1], model[1]) == (["numpy"], ["torch"])
    set_random_state(hook[0])
    assert DRAWING["numpy"]() == of_hook
    set_random_state(model[0])
    assert DRAWING["torch"]() == of_model


def test_steps_that_draw_nothing_cost_nothing():
    randomness = StepRandomness()
    randomness.take_all()
    assert randomness.watch() is None
    assert randomness.before_step()[1] == []


def test_in_the_first_step_all_states_are_known():
    randomness = StepRandomness()
    randomness.take_all()
    assert sorted(randomness.before_step()[1]) == ["cuda", "numpy", "python", "torch"]
