"""A fresh process evaluates a checkpoint as the training has done, or the row names the statistic."""

from faulty_models import FRESH, LOADED, row_of, rows_of


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
