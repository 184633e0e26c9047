"""`window`: examples are rows that follow each other in time, as NumPy's sliding windows; a window lies in one part."""

import numpy as np
import pytest
from doubles import stream_of
from numpy.lib.stride_tricks import sliding_window_view
from sklearn.preprocessing import StandardScaler

from emrun.base.errors import ArgumentError, StreamError
from emrun.datasets import Table
from emrun.stream_context import StreamContext

HOURS = 30
LOAD = {"a": np.sin(np.arange(HOURS)) * 5 + 20, "b": np.cos(np.arange(HOURS)) + 3}
COLUMNS = {"x": ["load", "heat"]}
FORM = {"past": 4, "future": 2, "order": "time", "group": "house", "future_of": ["load"]}


def write(path, hours=HOURS, leave_out=(), houses="ab", shuffled=True):
    lines = [
        f"2026-01-{1 + hour // 24:02d} {hour % 24:02d}:00:00,{house},{LOAD[house][hour]},{hour},{hour % 3},"
        f"{house}{hour}"
        for house in houses
        for hour in range(hours)
        if (house, hour) not in leave_out
    ]
    if shuffled:
        lines = [lines[index] for index in np.random.default_rng(0).permutation(len(lines))]
    path.write_text("\n".join(["time,house,load,heat,kind,name", *lines]) + "\n")
    return path


def whole(dataset, stream, **options):
    with stream_of(dataset, stream, training=False, **options) as opened:
        batches = list(opened)
    return {name: np.concatenate([np.asarray(batch[name]) for batch in batches]) for name in batches[0]}


def without(key):
    return {name: each for name, each in FORM.items() if name != key}


def expected(house, begin, end, stride=1):
    """Return the pasts and futures of a house whose rows are from `begin` to `end`."""
    both = np.stack([LOAD[house], np.arange(HOURS, dtype=float)], axis=1)[begin:end]
    windows = sliding_window_view(both, 6, axis=0)[::stride].transpose(0, 2, 1)
    return windows[:, :4], windows[:, 4:, :1]


def test_windows_are_those_of_numpy_in_the_order_of_time_within_groups(tmp_path):
    table = write(tmp_path / "t.csv")
    for stride in (1, 3):
        dataset = Table(table, columns=COLUMNS, window={**FORM, "stride": stride}, id="name", batch_size=7)
        found = whole(dataset, "train")
        past, future = (
            np.concatenate(each) for each in zip(*(expected(h, 0, HOURS, stride) for h in "ab"), strict=True)
        )
        np.testing.assert_allclose(found["x"], past, rtol=1e-6)
        np.testing.assert_allclose(found["future"], future, rtol=1e-6)
        assert found["x"].shape[1:] == (4, 2)
        assert found["future"].shape[1:] == (2, 1)
        assert found["id"].tolist() == [
            f"{house}{3 + start}" for house in "ab" for start in range(0, HOURS - 5, stride)
        ]
    workers = whole(dataset, "train", workers=2)
    assert all(np.array_equal(found[name], workers[name]) for name in found)


def test_a_window_lies_in_one_part_unless_its_past_may_be_in_another(tmp_path):
    table = write(tmp_path / "t.csv")
    split = {"valid": 0.3, "time": "time"}  # the last 9 hours
    for across, first in ((False, 21), (True, 17)):
        window = {**FORM, "past_across": across}
        dataset = Table(table, columns=COLUMNS, window=window, split=split, id="name", batch_size=50)
        assert whole(dataset, "train")["id"].tolist() == [f"{h}{3 + s}" for h in "ab" for s in range(16)]
        found = whole(dataset, "valid")
        past, future = (np.concatenate(each) for each in zip(*(expected(h, first, HOURS) for h in "ab"), strict=True))
        np.testing.assert_allclose(found["x"], past, rtol=1e-6)
        np.testing.assert_allclose(found["future"], future, rtol=1e-6)
    again = Table(
        table, columns=COLUMNS, window=window, split=split, id="name", batch_size=50, preparation=dataset.preparation
    )
    assert again.num_batches == dataset.num_batches
    assert np.array_equal(whole(again, "valid")["x"], found["x"])


def test_scales_are_those_of_the_train_rows_and_the_future_has_that_of_its_column(tmp_path):
    table = write(tmp_path / "t.csv")
    arguments = {"columns": {**COLUMNS, "kind": "kind"}, "categories": ["kind"], "window": FORM, "id": "name"}
    dataset = Table(
        table, **arguments, normalize={"x": "standard"}, split={"valid": 0.3, "time": "time"}, batch_size=50
    )
    both = {house: np.stack([LOAD[house], np.arange(HOURS)], axis=1) for house in "ab"}
    scaler = StandardScaler().fit(np.concatenate([both["a"][:21], both["b"][:21]]))
    found = whole(dataset, "valid")
    np.testing.assert_allclose(found["x"][0], scaler.transform(both["a"][21:25]), atol=1e-5)
    np.testing.assert_allclose(found["future"][0, :, 0], scaler.transform(both["a"][25:27])[:, 0], atol=1e-5)
    scale = dataset.scale_of("future")
    assert [scale["by"], *scale["shift"]] == ["standard", pytest.approx(scaler.mean_[0])]
    assert found["kind"].shape == (len(found["x"]), 4)


def test_a_prediction_needs_only_the_past(tmp_path):
    table = write(tmp_path / "t.csv")
    dataset = Table(table, columns=COLUMNS, window=FORM, id="name", normalize={"x": "minmax"})
    short = write(tmp_path / "new.csv", hours=5, shuffled=False)
    arguments = {"columns": COLUMNS, "window": FORM, "id": "name", "normalize": {"x": "minmax"}}
    again = Table("gone.csv", test=short, **arguments, preparation=dataset.preparation)
    (found,) = again.test_stream(StreamContext("test", seed=0, in_order=True))
    assert found["id"] == ["a3", "a4", "b3", "b4"]
    assert "future" not in found
    with pytest.raises(
        StreamError, match=r"dataset\.window: .*new\.csv: test has no 6 rows that follow each other with l"
    ):
        whole(again, "test")


@pytest.mark.parametrize(
    ("form", "argument", "message"),
    [
        (3, "window", "3 is not a mapping such as {past: 48, future: 24, future_of: [load]}"),
        ({**FORM, "past": 0}, "window.past", "0 is not a whole number of at least 1"),
        ({**FORM, "stride": 0}, "window.stride", "0 is not a whole number of at least 1"),
        ({**FORM, "futre": 2}, "window.futre", "did you mean 'future'"),
        ({**FORM, "future_of": "load"}, "window.future_of", "is not a list of"),
        ({**FORM, "future_of": ["lod"]}, "columns", "has no column 'lod'; did you mean 'load'?"),
        ({**FORM, "order": "tim"}, "window.order", "has no column 'tim'; did you mean 'time'?"),
        ({**FORM, "past": 29}, "window", "train has no 31 rows that follow each other with load; write a smaller past"),
    ],
)
def test_a_wrong_form_is_an_error_of_its_key(form, argument, message, tmp_path):
    with pytest.raises(ArgumentError) as told:
        Table(write(tmp_path / "t.csv"), columns=COLUMNS, window=form)
    assert told.value.argument == argument
    assert message in told.value.message


def test_gaps_in_time_and_in_targets_are_errors_with_the_row(tmp_path):
    table = write(tmp_path / "t.csv", leave_out={("a", 7)}, shuffled=False)
    gap = r"^window\.order: .*t\.csv, Row #9: column 'time' goes from 2026-01-01T06.* to 2026-01-01T08.*, but rows are"
    with pytest.raises(ArgumentError, match=gap):
        Table(table, columns=COLUMNS, window=FORM)
    Table(table, columns=COLUMNS, window=without("order"))  # as it says
    with pytest.raises(ArgumentError, match=r"^window\.order: .* goes from .* to"):
        Table(
            write(tmp_path / "t.csv"),
            columns=COLUMNS,
            window=without("group"),
        )
    text = write(tmp_path / "t.csv", shuffled=False).read_text().splitlines()
    text[5] = text[5].replace(str(LOAD["a"][4]), "")
    table.write_text("\n".join(text) + "\n")
    target = r"^window\.future_of: .*t\.csv, Row #6: column 'load' is a target and has a gap; write the value, or begin"
    with pytest.raises(ArgumentError, match=target):
        Table(table, columns=COLUMNS, window=FORM, fill={"load": {"by": "median"}})
    with pytest.raises(ArgumentError, match=r"^columns: `window` adds the source 'future'; choose another name"):
        Table(table, columns={"future": "load"}, window=FORM)
    with pytest.raises(ArgumentError, match=r"^window: set `columns` to the sources of the past"):
        Table(table, window=FORM)


def test_months_differ_in_length(tmp_path):
    rows = [f"{2024 + month // 12}-{1 + month % 12:02d}-01,{month}" for month in range(24)]
    (tmp_path / "m.csv").write_text("\n".join(["day,load", *rows]) + "\n")
    form = {"past": 12, "future": 3, "order": "day", "future_of": ["load"]}
    dataset = Table(tmp_path / "m.csv", columns={"load": "load"}, window=form)
    batch = next(iter(stream_of(dataset, "train", training=False)))
    assert batch["load"].shape == (10, 12, 1)
