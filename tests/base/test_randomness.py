"""Seeds and random states of the process."""

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from emrun.base.randomness import derived_seed, draw_seed, preserved_randomness, seed_everything


def draws():
    """Draw from the global generators of Python, NumPy and torch."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_derived_seed_is_the_same_number_on_every_machine():
    assert derived_seed(42, "train", "order", 1) == 199954507611345127162898359577671338084


def test_a_derived_seed_does_not_depend_on_the_global_generators():
    random.seed(1)
    first = derived_seed(1, "a")
    random.seed(2)
    assert derived_seed(1, "a") == first


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param([(0,), (1,), (-1,)], id="seed"),
        pytest.param([(0, "a"), (0, "b"), (0, "A"), (0, "")], id="names"),
        pytest.param([(0, "ab", "c"), (0, "a", "bc"), (0, "abc"), (0, "a', 'bc")], id="boundaries"),
        pytest.param([(0, 1), (0, "1"), (0, 1, 1), (0, 11)], id="numbers and names"),
        pytest.param([(0, "a", 1), (0, 1, "a"), (1, "a", 0)], id="order"),
    ],
)
def test_different_keys_give_different_seeds(keys):
    assert len({derived_seed(*key) for key in keys}) == len(keys)


def test_neighbouring_keys_give_independent_generators():
    rows = np.stack([np.random.default_rng(derived_seed(0, "batch", i)).normal(size=2000) for i in range(8)])
    correlations = np.corrcoef(rows) - np.eye(8)
    assert np.abs(correlations).max() < 0.12  # five standard deviations


def test_a_drawn_seed_is_small_enough_to_be_typed_and_not_always_the_same():
    seeds = [draw_seed() for _ in range(20)]
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert len(set(seeds)) > 1


@pytest.mark.parametrize("devices", [True, False])
def test_seeding_everything_repeats_python_numpy_and_torch(devices):
    with preserved_randomness():
        seed_everything(7, "model")
        first = draws()
        draws()
        seed_everything(7, "model", devices=devices)
        assert draws() == first


@pytest.mark.parametrize("other", [(8, "model"), (7, "dataset"), (7,)], ids=str)
def test_seeding_with_another_key_changes_python_numpy_and_torch(other):
    with preserved_randomness():
        seed_everything(7, "model")
        first = draws()
        seed_everything(*other)
        assert all(a != b for a, b in zip(draws(), first, strict=True))


@pytest.mark.parametrize("seed", [0, 2**31 - 1, 2**63, -5])
def test_any_whole_number_is_a_seed(seed):
    with preserved_randomness():
        seed_everything(seed)
        first = draws()
        seed_everything(seed)
        assert draws() == first


def test_preserved_randomness_continues_as_if_there_had_been_no_block():
    with preserved_randomness():
        seed_everything(1)
        draws()
        expected = [draws() for _ in range(3)]
        seed_everything(1)
        draws()
        with preserved_randomness():
            seed_everything(2)
            draws()
        assert [draws() for _ in range(3)] == expected


def test_preserved_randomness_restores_after_an_error():
    with preserved_randomness():
        seed_everything(1)
        expected = draws()
        seed_everything(1)
        with pytest.raises(KeyError), preserved_randomness():
            draws()
            raise KeyError
        assert draws() == expected


def test_preserved_randomness_restores_an_odd_number_of_gaussians():
    with preserved_randomness():
        for generator in (random.gauss, np.random.normal):  # both keep the second of a pair
            seed_everything(1)
            expected = [generator(0, 1) for _ in range(3)]
            seed_everything(1)
            found = [generator(0, 1)]
            with preserved_randomness():
                generator(0, 1)
            found += [generator(0, 1), generator(0, 1)]
            assert found == expected


def test_seeding_works_where_torch_raises_for_the_lack_of_an_accelerator(monkeypatch):
    def current_accelerator():
        raise RuntimeError("Cannot access accelerator device when none is available.")  # torch 2.6

    with preserved_randomness():
        seed_everything(1)
        expected = draws()
        monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
        seed_everything(1)
        assert draws() == expected


def test_seeding_and_preserving_do_not_import_torch():
    code = (
        "import sys; from emrun.base.randomness import *\n"
        "with preserved_randomness(): seed_everything(1)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
