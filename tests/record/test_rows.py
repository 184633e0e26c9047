"""The reader of rows: their order, damage, and reading while they are written."""

import json
import math

import pytest

from emrun.record.metrics_log import MetricsLog
from emrun.record.rows import Reader, newest_shown
from emrun.shown import Counts, Histogram, Picture, Text
from emrun.storage.run import METRICS, ROWS

PNG = b"\x89PNG\r\n\x1a\n" + bytes(16)


class Loop:
    train_stream_name = "train"
    training_epochs_done = 0

    def __init__(self, iteration):
        self.iterations_done = self.updates_done = iteration


def write(record, epochs=2):
    """Write two rows of means and a row of an epoch for each epoch."""
    for epoch in range(epochs):
        for step in (1, 2):
            record._add_means("1 updates", {"loss": 1 / (2 * epoch + step)}, Loop(2 * epoch + step))
        record.add_epoch(epoch + 1, 2 * epoch + 2, 2 * epoch + 2, 0.5, {"valid": {"loss": {"mean": float("nan")}}})


def places(rows):
    return [(row.iteration, row.every is None) for row in rows]


def test_rows_come_in_the_order_in_which_they_arose(tmp_path):
    write(MetricsLog(tmp_path))
    rows = list(Reader(tmp_path).rows())
    assert places(rows) == [(1, False), (2, False), (2, True), (3, False), (4, False), (4, True)]
    assert rows[0].values == {"steps/loss": 1.0}
    assert rows[2].streams["valid"]["loss"]["mean"] != rows[2].streams["valid"]["loss"]["mean"]  # NaN


def test_whole_numbers_of_any_size_are_values_and_infinite_where_a_float_ends(tmp_path):
    record = MetricsLog(tmp_path)
    record.add_epoch(1, 1, 1, 0.5, {"valid": {"a": 2**62 + 1, "b": 10**30, "c": {"max": 10**400, "min": -(10**400)}}})
    (row,) = Reader(tmp_path).rows()
    assert row.values == {"valid/a": 2.0**62, "valid/b": 1e30, "valid/c/max": math.inf, "valid/c/min": -math.inf}
    assert row.streams["valid"]["a"] == 2**62 + 1
    with (tmp_path / METRICS).open("a") as file:
        file.write(json.dumps({**record.epochs[0], "epoch": 2, "streams": {"valid": {"a": -(10**400)}}}) + "\n")
    *_, by_hand = Reader(tmp_path).rows()
    assert by_hand.values == {"valid/a": -math.inf}


def test_new_rows_are_read_while_they_are_written(tmp_path):
    record, reader = MetricsLog(tmp_path), Reader(tmp_path)
    assert list(reader.rows()) == []
    write(record, 1)
    assert places(reader.rows()) == [(1, False), (2, False), (2, True)]
    record._add_means("1 updates", {"loss": 1.0}, Loop(3))
    record.flush()
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"epoch": 2, "iter')  # half a line
    assert places(reader.rows()) == [(3, False)]


def test_means_are_written_together_once_a_second_and_before_anything_counts_on_them(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("emrun.record.metrics_log.monotonic", lambda: now[0])
    record, reader, heard, told = MetricsLog(tmp_path), Reader(tmp_path), [], []
    record.listeners.append(lambda row: heard.append(row.iteration))
    record.sinks.append(lambda rows: told.append([row.iteration for row in rows]))

    def add(iteration, time):
        now[0] = time
        record._add_means("1 updates", {"loss": 0.5}, Loop(iteration))
        assert heard[-1] == iteration
        return [row.iteration for row in reader.rows()]

    assert [add(1, 100.0), add(2, 100.5), add(3, 100.9), add(4, 101.1), add(5, 101.2)] == [[1], [], [], [2, 3, 4], []]
    assert told == [[1], [2, 3, 4]]
    length, _ = record.state_dict()["rows"]
    assert length == (tmp_path / ROWS).stat().st_size
    assert [row.iteration for row in reader.rows()] == [5]
    add(6, 101.3)
    record.add_epoch(1, 6, 6, 0.5, {})
    assert [row.every for row in reader.rows()] == ["1 updates", None]
    add(7, 101.4)
    record.add_left_out(2, 7, "train", {"a": "b"})
    assert [row.iteration for row in reader.rows()] == [7]
    assert told == [[1], [2, 3, 4], [5], [6], [6], [7]]
    add(8, 101.5)
    record.rewind_to_start()
    assert (record.state_dict()["rows"][0], told[-1]) == (0, [7])


def test_the_types_of_values_that_are_not_numbers_are_part_of_the_row(tmp_path):
    record, told = MetricsLog(tmp_path), []
    record.sinks.append(told.extend)
    record.add_epoch(0, 0, 0, 0.5, {"valid": {"a": "x", "b": {"mean": 1.0, "list": [1]}, "c": 1}})
    (row,) = Reader(tmp_path).rows()
    assert row.unknown == told[0].unknown == {("valid", "a"): "str", ("valid", "b"): "list"}


def test_an_epoch_that_is_written_while_rows_are_read_has_its_own_updates(tmp_path):
    record = MetricsLog(tmp_path)

    class Slow(Reader):
        def _new_lines(self, name):
            yield from super()._new_lines(name)
            if not record.epochs:
                record.add_epoch(0, 0, 0, 0.5, {})

    reader = Slow(tmp_path)
    before = [(row.epoch, row.updates) for row in reader.rows()]
    record.add_epoch(1, 10, 5, 0.5, {})
    assert [*before, *((row.epoch, row.updates) for row in reader.rows())] == [(0, 0), (1, 5)]


def test_what_hooks_show_is_part_of_the_row_of_its_epoch(tmp_path):
    record = MetricsLog(tmp_path)
    told = []
    record.sinks.append(told.extend)
    shown = {"p": Picture(PNG), "t": Text("**t**"), "h": Histogram([0.0, 1.0, 1.0]), "n": Histogram([float("nan")])}
    record.add_epoch(0, 0, 0, 0.5, {}, shown)
    record.add_epoch(1, 2, 2, 0.5, {}, {})
    first, second = Reader(tmp_path).rows()
    assert first.shown == told[0].shown
    assert (first.shown["p"], first.shown["t"], second.shown) == (Picture(PNG), Text("**t**"), {})
    counts = first.shown["h"]
    assert isinstance(counts, Counts)
    assert (sum(counts.counts), counts.total, counts.squares) == (3, 2.0, 2.0)


def test_texts_and_pictures_are_kept_without_a_sink_unless_the_run_has_a_file_of_them(tmp_path):
    record = MetricsLog(tmp_path)
    assert newest_shown(tmp_path / ROWS) == {}
    shown = {"h": Histogram([0.0]), "f": Picture(PNG, has_file=True), "p": Picture(PNG), "t": Text("first")}
    record.add_epoch(0, 0, 0, 0.5, {}, shown)
    record.add_epoch(1, 2, 2, 0.5, {}, {"t": Text("second")})
    with (tmp_path / ROWS).open("a") as file:
        file.writelines(f'{{"epochs": 2, {line}}}\n' for line in ('"shown": [], "a": {"shown": "b"}', '"shown": "c"'))
    assert newest_shown(tmp_path / ROWS) == {"p": Picture(PNG), "t": Text("second")}
    first, second = Reader(tmp_path).rows()
    assert (first.shown["t"], second.shown) == (Text("first"), {"t": Text("second")})


@pytest.mark.parametrize("line", ["{", "[]", '{"epochs": "x"}', '{"epochs": 0, "every": 1}', '{"format": 9}'])
def test_a_damaged_line_or_one_of_another_format_is_left_out(tmp_path, line):
    write(MetricsLog(tmp_path), 1)
    lines = (tmp_path / ROWS).read_text().splitlines()
    (tmp_path / ROWS).write_text("\n".join([lines[0], line, *lines[1:]]) + "\n")
    assert places(Reader(tmp_path).rows()) == [(1, False), (2, False), (2, True)]


def test_rows_go_back_to_a_checkpoint_and_are_the_same_again(tmp_path):
    record = MetricsLog(tmp_path)
    write(record, 1)
    state, before = record.state_dict(), [(tmp_path / name).read_bytes() for name in (METRICS, ROWS)]
    write(record, 1)
    again = MetricsLog(tmp_path)
    again.load_state_dict(state, 1, 2)
    assert [(tmp_path / name).read_bytes() for name in (METRICS, ROWS)] == before
    again._add_means("1 updates", {"loss": 0.0}, Loop(3))
    assert json.loads((tmp_path / ROWS).read_text().splitlines()[-1])["epochs"] == 1


def test_rows_after_a_damaged_line_with_a_carriage_return_are_those_of_their_epochs(tmp_path):
    record = MetricsLog(tmp_path)
    write(record, 1)
    state = record.state_dict()
    (tmp_path / METRICS).write_bytes((tmp_path / METRICS).read_bytes().replace(b"epoch", b"e\roch"))
    again = MetricsLog(tmp_path)
    again.load_state_dict(state, 1, 2)
    for epoch in (2, 3):
        again._add_means("1 updates", {"loss": 0.5}, Loop(epoch + 1))
        again.add_epoch(epoch, epoch + 1, epoch, 0.5, {})
    rows = list(Reader(tmp_path).rows())
    assert places(rows) == [(1, False), (2, False), (3, False), (3, True), (4, False), (4, True)]
    assert [row.updates for row in rows if row.every is None] == [2, 3]


def test_a_line_that_other_code_appends_moves_no_row_to_another_epoch(tmp_path):
    record = MetricsLog(tmp_path)
    write(record, 1)
    with (tmp_path / METRICS).open("a") as file:
        file.write("other\n")
    for epoch in (2, 3):
        record._add_means("1 updates", {"loss": 0.5}, Loop(epoch + 1))
        record.add_epoch(epoch, epoch + 1, epoch, 0.5, {})
    rows = list(Reader(tmp_path).rows())
    assert places(rows) == [(1, False), (2, False), (2, True), (3, False), (3, True), (4, False), (4, True)]
    assert [row.updates for row in rows if row.every is None] == [2, 2, 3]


@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.parametrize("with_means", [True, False])
def test_rows_after_epochs_that_other_code_has_removed_are_those_of_their_epochs(tmp_path, kept, with_means):
    def add(epoch):
        if with_means:
            record._add_means("1 updates", {"loss": 0.5}, Loop(epoch))
        record.add_epoch(epoch, epoch, epoch, 0.5, {}, {f"text {epoch}": Text("a")})

    record = MetricsLog(tmp_path)
    for epoch in (1, 2, 3):
        add(epoch)
    lines = (tmp_path / METRICS).read_bytes().splitlines(keepends=True)
    (tmp_path / METRICS).unlink()
    if kept:
        (tmp_path / METRICS).write_bytes(b"".join(lines[:kept]))
    for epoch in (4, 5):
        add(epoch)
    rows = list(Reader(tmp_path).rows())
    epochs = [row for row in rows if row.every is None]
    left = [*range(1, kept + 1), 4, 5]
    assert [(row.epoch, row.updates, list(row.shown)) for row in epochs] == [(n, n, [f"text {n}"]) for n in left]
    assert [row.iteration for row in rows if row.every] == ([1, 2, 3, 4, 5] if with_means else [])
    assert [row.iteration for row in rows] == sorted(row.iteration for row in rows)
