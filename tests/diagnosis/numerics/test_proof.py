"""The table: what it leaves behind, and what it leaves out."""

from pathlib import Path

import pytest
from faulty_models import AGAIN, COMPILED, HALVES, LOADED, rows_of

from emrun.base.encoding import random_state
from emrun.base.errors import ConfigError


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    before = repr(random_state())
    found = rows_of({"module": {"class": "faulty_models.Net", "rate": 0.5}}, HALVES, LOADED, AGAIN)
    assert {what: row["result"] for what, row in found.items()} == dict.fromkeys([HALVES, LOADED, AGAIN], "same")
    assert repr(random_state()) == before
    assert [path for path in Path().rglob("*") if path.name != "temporary"] == []


def test_gradients_of_another_model_are_left_out():
    model = {"class": "faulty_models.Mean", **dict.fromkeys(("inputs", "outputs", "loss", "optimizer"))}
    found = rows_of(model, HALVES, COMPILED, LOADED, AGAIN)
    assert {row["text"] for row in (found[HALVES], found[COMPILED])} == {"Mean is not a TorchModel"}
    assert (found[LOADED]["result"], found[AGAIN]["result"]) == ("same", "same")


def test_an_error_of_the_users_code_leaves_its_rows_out():
    found = rows_of({"module": {"class": "faulty_models.OnlyOnce"}}, HALVES, AGAIN)
    assert found[HALVES]["text"].startswith("RuntimeError: it runs only once")
    assert found[AGAIN]["result"] == "not applicable"


def test_a_wrong_config_is_an_error():
    with pytest.raises(ConfigError):
        rows_of({"module": {"class": "faulty_models.Nothing"}})
