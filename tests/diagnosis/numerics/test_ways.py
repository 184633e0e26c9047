"""Compiled, in 16 bits, in micro batches and recomputed, a step has the gradients of the plain one."""

import pytest
import torch
from campaign import thinned
from faulty_models import COMPILED, PARTS, PRECISION, RECOMPUTED, TOKENS, row_of, rows_of

EAGER = {"backend": "eager"}  # a backend that compiles the backward pass too takes seconds to import
NORM = {"class": "torch.nn.BatchNorm1d", "num_features": 5}


def net(**more):
    return {"module": {"class": "faulty_models.Net", "rate": 0.5}, **more}


@pytest.mark.parametrize("backend", thinned(["eager", "aot_eager"], ["eager"]))
def test_all_ways_at_once_are_the_same(backend):
    model = net(compile={"backend": backend}, precision="bf16", micro_batch_size=2, recompute="first")
    found = rows_of(model, COMPILED, PRECISION, PARTS, RECOMPUTED)
    assert {what: (row["result"], row["text"]) for what, row in found.items()} == dict.fromkeys(found, ("same", ""))
    assert len(found) == 4


def test_what_the_config_does_not_have_is_left_out():
    found = rows_of(net(), COMPILED, PRECISION, PARTS, RECOMPUTED)
    assert {row["result"] for row in found.values()} == {"not applicable"}
    assert found[COMPILED]["text"] == "the config does not have model.compile"


def test_a_compiled_backward_with_other_gradients_differs():
    torch.compiler.reset()  # what other tests of the process have compiled
    model = net(module={"class": "faulty_models.Doubled"}, compile=EAGER)
    result, name, text = row_of(model, COMPILED)
    assert (result, name) == ("differs", "first.weight")
    assert text == "first.weight by 0.5"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_that_compute_another_thing_differ(precision):
    assert row_of(net(precision=precision), PRECISION)[0] == "same"
    result, _, text = row_of(net(module={"class": "faulty_models.WrongInAutocast"}, precision=precision), PRECISION)
    assert result == "differs", text


def test_parts_of_a_batch_depend_on_it_as_halves_do():
    model = net(module={"class": "faulty_models.Net", "part": NORM}, micro_batch_size=2)
    assert row_of(model, PARTS)[:2] == ("depends on the batch", "part")


def test_parts_of_a_batch_without_the_weights_of_tokens_differ():
    model = {"module": {"class": "faulty_models.Tokens", "how": "mean"}, **TOKENS, "micro_batch_size": 2}
    assert row_of(model, PARTS)[:2] == ("differs", "table.weight")


def test_another_value_when_an_activation_is_computed_again_differs():
    result, name, _ = row_of(net(module={"class": "faulty_models.Forgetful"}, recompute="part"), RECOMPUTED)
    assert result == "differs"
    assert name.startswith("first.")


def test_recomputed_noise_is_the_same_noise():
    model = net(module={"class": "faulty_models.FunctionalDropout"}, recompute="first")
    assert row_of(model, RECOMPUTED)[0] == "same"
