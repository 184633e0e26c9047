"""A second pass of an evaluated stream, and a model that is saved and loaded: what differs is named."""

import pytest
from faulty_models import AGAIN, LOADED, row_of

NET = {"module": {"class": "faulty_models.Net", "rate": 0.5}}


def of(module):
    return {"module": {"class": f"faulty_models.{module}"}}


def test_the_same_twice():
    assert row_of(NET, AGAIN) == ("same", None, "")
    assert row_of(NET, AGAIN, dataset={"fault": "ctx"})[0] == "same"
    assert row_of(NET, LOADED) == ("same", None, "")


@pytest.mark.parametrize(
    ("fault", "result", "why"),
    [("unseeded", "differs", "is another each time"), ("global", "random", "depends on global random numbers")],
)
def test_a_random_crop_in_an_evaluated_stream_is_named(fault, result, why):
    found, name, text = row_of(NET, AGAIN, dataset={"fault": fault})
    assert (found, name) == (result, "x")
    assert text.startswith("source 'x' of stream 'valid' by 0.")
    assert why in text


@pytest.mark.parametrize("streams", [["valid"], []])
def test_a_source_that_is_changed_in_place_is_named(streams):
    main_loop = {"extra_streams": streams, "on_unused_sources": "ignore"}
    found, name, text = row_of(of("InPlace"), AGAIN, dataset={"fault": "view"}, main_loop=main_loop)
    assert (found, name) == ("differs", "x")
    assert "the model changes it in place" in text
    result, _, text = row_of(of("InPlace"), AGAIN, main_loop=main_loop)  # each pass has a copy
    assert result == "same"
    assert text.startswith("the model changes x in place, which is made anew for each batch: a second pass cannot")


def test_dropout_that_is_on_in_evaluation_is_named():
    found, name, text = row_of({"module": {"class": "faulty_models.AlwaysDropping", "rate": 0.5}}, AGAIN)
    assert (found, name) == ("differs", "logits")
    assert "in evaluation mode, drop (Dropout) drops" in text


def test_noise_in_evaluation_is_random():
    assert row_of(of("Noisy"), AGAIN)[:2] == ("random", "logits")


def test_a_metric_that_keeps_state_is_named():
    metrics = {"listed": {"class": "faulty_models.ListedMean", "inputs": ["logits"]}}
    found, name, text = row_of({**NET, "metrics": metrics}, AGAIN)
    assert (found, name) == ("differs", "listed")
    assert "which its reset() leaves" in text


def test_without_an_evaluated_stream_nothing_is_compared():
    result, _, text = row_of(NET, AGAIN, main_loop={"on_unused_sources": "ignore"})
    assert (result, text) == ("not applicable", "main_loop.extra_streams names no stream")


def test_a_buffer_that_no_checkpoint_has_is_found():
    found, name, text = row_of(of("LostBuffer"), LOADED)
    assert (found, name) == ("differs", "logits")
    assert "a checkpoint does not have all state" in text
