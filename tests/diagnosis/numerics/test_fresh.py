"""A fresh process evaluates a checkpoint as the training has done, or the row names the statistic."""

import pytest
from campaign import thinned
from faulty_models import FRESH, LOADED, row_of, rows_of

RESULTS = [
    ("same", "checkpoint latest, 1 statistic to the last bit", ("same", None, "")),
    ("differs", "checkpoint latest, valid/loss: 1 recorded, 2 now", ("differs", "valid/loss", "all")),
    ("left out", "no statistic was recorded", ("not applicable", None, "all")),
]


@pytest.mark.parametrize(("result", "text", "expected"), thinned(RESULTS, RESULTS[:2]))
def test_the_row_is_what_the_comparison_has_found(monkeypatch, result, text, expected):
    """Without the new process, which imports PyTorch: the comparison is that of `emrun verify-run`."""
    monkeypatch.setattr("emrun.diagnosis.numerics.fresh.evaluated", lambda run, *others: (result, text, {}))
    result, name, told = row_of({"module": {"class": "faulty_models.Net"}}, FRESH)
    assert (result, name, told) == (*expected[:2], text if expected[2] == "all" else "")


@pytest.mark.campaign
def test_a_model_that_uses_what_only_its_process_knows_differs():
    found = rows_of({"module": {"class": "faulty_models.Remembering"}}, FRESH, LOADED)
    assert (found[FRESH]["result"], found[FRESH]["name"]) == ("differs", "valid/loss")
    assert " recorded, " in found[FRESH]["text"]
    assert found[LOADED]["result"] == "differs"


def test_without_an_evaluated_stream_nothing_is_compared():
    result, _, text = row_of(
        {"module": {"class": "faulty_models.Net"}}, FRESH, main_loop={"on_unused_sources": "ignore"}
    )
    assert (result, text) == ("not applicable", "main_loop.extra_streams names no stream")
