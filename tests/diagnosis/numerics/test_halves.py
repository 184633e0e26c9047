"""The gradient of a batch against those of its halves: what is the same, what differs, what depends on the batch."""

import pytest
from faulty_models import HALVES, TOKENS, row_of


def test_halves_of_a_mean_over_examples_are_the_same_with_dropout_off():
    part = {"class": "torch.nn.LayerNorm", "normalized_shape": 5}
    assert row_of({"module": {"class": "faulty_models.Net", "part": part, "rate": 0.5}}, HALVES) == ("same", None, "")
    assert row_of({"module": {"class": "faulty_models.DropRate"}}, HALVES) == ("same", None, "")


def test_weights_of_examples_are_weights_of_halves():
    model = {"module": {"class": "faulty_models.Tokens", "how": "weighted"}, **TOKENS}
    assert row_of(model, HALVES)[0] == "same"


def test_a_mean_over_tokens_differs_and_the_weights_are_named():
    model = {"module": {"class": "faulty_models.Tokens", "how": "mean"}, **TOKENS}
    result, name, text = row_of(model, HALVES)
    assert (result, name) == ("differs", "table.weight")
    assert "the loss weighs the halves 28.6 : 71.4, and emrun 50 : 50" in text  # 1 + 2 + 3 and 4 + 5 + 6 tokens
    assert "`loss_weight`" in text


def test_a_sum_over_examples_differs():
    model = {"module": {"class": "faulty_models.Tokens", "how": "sum"}, **TOKENS}
    result, _, text = row_of(model, HALVES)
    assert result == "differs"
    assert "the loss is a sum over the examples" in text


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ({"class": "faulty_models.Net", "part": {"class": "torch.nn.BatchNorm1d", "num_features": 5}}, "part"),
        ({"class": "faulty_models.Centred"}, "Centred"),
        ({"class": "faulty_models.ByName"}, "ByName"),
    ],
)
def test_a_part_that_looks_at_the_batch_is_named(module, name):
    assert row_of({"module": module}, HALVES)[:2] == ("depends on the batch", name)


@pytest.mark.parametrize(
    ("loss", "name"),
    [({"import": "faulty_models.contrastive"}, "contrastive"), ({"class": "faulty_models.Hardest"}, "Hardest")],
)
def test_a_loss_that_looks_at_the_batch_is_named(loss, name):
    model = {"module": {"class": "faulty_models.Net"}, "loss": {**loss, "inputs": ["logits", "y"]}}
    assert row_of(model, HALVES)[:2] == ("depends on the batch", name)


def test_a_batch_of_one_example_is_left_out():
    result, _, text = row_of({"module": {"class": "faulty_models.Net"}}, HALVES, dataset={"batch_size": 1})
    assert (result, text) == ("not applicable", "the batch has one example")
