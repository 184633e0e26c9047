"""sample_configs/language_model: the mLSTM is that of the paper; tests/test_sample_configs.py trains the sample."""

import runpy

import numpy as np
import pytest
import torch
from samples import SAMPLES

MODEL = runpy.run_path(str(SAMPLES / "language_model" / "my_model.py"))


def recurrent(query, key, value, enter, forget):
    """Return the outputs of the recurrent form of one head, step by step, with the stabilizer state of the paper."""
    size = query.shape[1]
    memory, normalizer, most = np.zeros((size, size)), np.zeros(size), -np.inf
    found = []
    for q, k, v, i, f in zip(query, key / np.sqrt(size), value, enter, forget, strict=True):
        kept = -np.log1p(np.exp(-f))
        new = max(kept + most, i)
        keeps, takes = np.exp(kept + most - new), np.exp(i - new)
        memory, normalizer, most = keeps * memory + takes * np.outer(v, k), keeps * normalizer + takes * k, new
        found.append(memory @ q / max(abs(normalizer @ q), np.exp(-most)))
    return np.array(found)


def test_the_parallel_form_is_the_recurrent_one():
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(3, 2, 3, 7, 4, generator=generator, dtype=torch.double)  # (B, heads, T, size)
    gates = 4 * torch.randn(2, 2, 3, 7, generator=generator, dtype=torch.double)
    found = MODEL["parallel_mlstm"](*vectors, *gates)
    for row in range(2):
        for head in range(3):
            parts = [each[row, head].numpy() for each in (*vectors, *gates)]
            np.testing.assert_allclose(found[row, head].numpy(), recurrent(*parts), rtol=1e-9)


@pytest.mark.parametrize("mixer", ["MLSTM", "Attention"])
def test_no_character_knows_a_later_one(mixer):
    torch.manual_seed(0)
    model = MODEL["LanguageModel"](MODEL[mixer], window=8, width=8, layers=2, heads=2)
    tokens = torch.randint(128, (1, 8))
    other = tokens.clone()
    other[0, 5] += 1
    before, after = (model(each)["logits"][0] for each in (tokens, other))
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5], after[:, 5])
