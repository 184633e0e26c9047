"""The forecast of a check is kept for the run of the same config, whose page has it beside what happened."""

import html
import json
import re
from datetime import UTC, datetime

import pytest
from training.tiny import CONFIG, trace, trained

from emrun.base.wording import size_of
from emrun.config.config import load_config
from emrun.config.yaml_text import dump
from emrun.config.yaml_tree import Position, node_of
from emrun.training.forecasts import keep_forecast, kept_forecast

FORECAST = {"training": {"seconds": 5400.0, "how": "estimated"}, "checkpoint": {"bytes": 2_000, "how": "measured"}}


def clock():
    return datetime(2026, 11, 27, 21, 3, 1, tzinfo=UTC)


KEPT = {"made": "2026-11-27T21:03:01+00:00", "values": FORECAST}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The file of the forecasts, in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "emrun" / "forecasts.json"


def rows_of(directory):
    """Return the rows of the table of forecasts on a page: their cells."""
    page = (directory / "report.html").read_text()
    found = re.search(r'<caption class="unseen">Forecast</caption>.*?</table>', page, re.DOTALL)
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", found[0])[1:]]
    return {row[0]: list(map(html.unescape, row[1:])) for row in rows}


def test_the_page_of_a_run_has_the_forecast_of_its_check_beside_what_happened(emrun, tmp_path):
    config = {**CONFIG, "hooks": [*CONFIG["hooks"], "LogProfile"]}
    (tmp_path / "c.yaml").write_text(dump(node_of(config, Position("c.yaml"))))
    forecast = json.loads(emrun("check", "c.yaml", "--json").stdout)["contract"]["forecast"]
    for name, overrides in (("run", ["seed=4"]), ("other", ["model.optimizer.lr=0.25"])):
        assert emrun("train", "-q", "c.yaml", "--output-dir", name, *overrides).returncode == 0
    assert trace(tmp_path / "run")["forecast"]["values"] == forecast
    rows = rows_of(tmp_path / "run")
    assert list(rows) == ["training", "tensors of a step", "checkpoint", "kept checkpoints", "record"]
    assert {what: row[1] for what, row in rows.items()} == {what: each["how"] for what, each in forecast.items()}
    size = sum(each.stat().st_size for each in (tmp_path / "run" / "checkpoints" / "latest").resolve().iterdir())
    assert rows["checkpoint"][2:] == [size_of(size), "exact: the newest one"]
    assert rows["record"][3] == "exact"
    assert rows["training"][3] == "measured: the time in epochs"
    assert all(row[0] and row[2] for row in rows.values())
    assert "forecast" not in trace(tmp_path / "other")
    assert ">Forecast<" not in (tmp_path / "other" / "report.html").read_text()


def test_a_forecast_is_that_of_the_last_check_of_the_same_config_in_the_same_directory(tmp_path, monkeypatch):
    keep_forecast(load_config(CONFIG), {}, clock)
    keep_forecast(load_config(CONFIG), FORECAST, clock)
    assert kept_forecast(load_config(CONFIG, ["seed=9", "sweep.trials=3"])) == KEPT
    assert kept_forecast(load_config(CONFIG, ["main_loop.buffer=3"])) is None
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert kept_forecast(load_config(CONFIG)) is None
    assert kept_forecast(load_config(CONFIG, [f"code_directory={tmp_path}"])) == KEPT


def test_the_newest_hundred_forecasts_are_kept(cache):
    configs = [load_config({"number": number}) for number in (*range(100), 0, 100)]
    for config in configs:
        keep_forecast(config, FORECAST, clock)
    assert len(json.loads(cache.read_text())) == 100
    assert kept_forecast(configs[0]) == kept_forecast(configs[-1]) == KEPT
    assert kept_forecast(configs[1]) is None
    assert list(cache.parent.iterdir()) == [cache]


@pytest.mark.parametrize("text", ["", "[1]", '{"a": {"made": 3, "values": {}}}', "[" * 100_000])
def test_a_damaged_cache_has_no_forecast_and_is_replaced(cache, text):
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    assert kept_forecast(load_config(CONFIG)) is None
    keep_forecast(load_config(CONFIG), FORECAST, clock)
    assert kept_forecast(load_config(CONFIG)) == KEPT


def test_without_a_cache_nothing_is_kept(cache):
    cache.parent.parent.write_text("a file")
    keep_forecast(load_config(CONFIG), FORECAST, clock)
    assert kept_forecast(load_config(CONFIG)) is None


def test_a_run_that_is_resumed_with_changes_has_no_forecast_any_more(emrun, tmp_path):
    keep_forecast(load_config(CONFIG), FORECAST, clock)
    run = trained(tmp_path).output_dir
    assert trace(run)["forecast"] == KEPT
    assert rows_of(run)["training"][0] == "1.5 h"
    assert emrun("resume", "-q", run, "--checkpoint", "best").returncode == 0
    assert trace(run)["forecast"] == KEPT
    assert emrun("resume", "-q", run, "hooks.StopAfter.epochs=3").returncode == 0
    assert "forecast" not in trace(run)
