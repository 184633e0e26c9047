"""PlotLines: the files that it writes, what it draws, and what it refuses."""

import sys

import numpy as np
import pytest
import torch
from campaign import thinned
from PIL import Image

from emrun import MainLoop
from emrun.base.errors import ArgumentError, HookError, MissingExtra, StreamError
from emrun.hooks import PlotLines
from emrun.hooks._shared.figures import png
from emrun.shown import Picture
from emrun.training.create import create_training

ROWS, LENGTH = 5, 6
PIXEL = png(np.zeros((1, 1, 3), np.uint8))


class Batches:
    """Three batches of five examples."""

    def __init__(self, **sources):
        self.sources = {"x": [1.0] * ROWS, **sources}

    def valid_stream(self):
        return iter([self.sources] * 3)

    train_stream = valid_stream


SOURCES = {
    "target": np.linspace(0, 1, ROWS * LENGTH).reshape(ROWS, LENGTH),
    "cost": np.ones(ROWS),
    "multi": torch.rand(ROWS, LENGTH, 3, generator=torch.Generator().manual_seed(0)),
    "many": np.random.default_rng(0).random((ROWS, LENGTH, 12)),
    "ragged": [[1.0], [], [float("nan"), float("inf")], [1.0, 2.0], [3]],
    "id": ["a", "b/../c", "c", "d", "e"],
    "same": ["a", "b", "a", "d", "e"],
    "mask": np.arange(LENGTH)[None] < np.array([[1], [2], [3], [6], [0]]),
    "image": np.zeros((ROWS, 1, 2, 2)),
    "words": list("abcde"),
}


@pytest.fixture
def plot(tmp_path, scripted):
    """Evaluate a stream and return the names of the files."""

    def run(variables, root="visual", **arguments):
        hook = PlotLines(variables, output_dir=tmp_path, root_dir=root, **arguments)
        MainLoop(scripted(), Batches(**SOURCES), [hook], on_unused_sources="ignore").run_evaluation("valid")
        return sorted(path.name for path in (tmp_path / root / "epoch_0" / "valid").glob("*"))

    return run


@pytest.fixture
def undrawn(monkeypatch):
    """Write files without a figure, which takes longest, where their names and number are the subject."""
    monkeypatch.setattr(PlotLines, "_drawn", lambda hook, lines, title: (b"a file", PIXEL))


@pytest.mark.usefixtures("undrawn")
def test_files_have_the_id_the_batch_and_the_variables_in_their_names(plot):
    assert plot(["target", "cost"]) == [
        "a_batch_1_plot-target-vs-cost.png",
        "b_.._c-b1d481e7_batch_1_plot-target-vs-cost.png",
        "c_batch_1_plot-target-vs-cost.png",
        "d_batch_1_plot-target-vs-cost.png",
    ]


@pytest.mark.usefixtures("undrawn")
def test_the_counts_limit_examples_and_batches(plot):
    found = plot(["target"], example_count=1, batch_count=2)
    assert found == ["a_batch_1_plot-target.png", "a_batch_2_plot-target.png"]
    assert len(plot(["target"], "examples", example_count=None, batch_count=1)) == ROWS
    assert len(plot(["target"], "batches", example_count=1, batch_count=None)) == 3


@pytest.mark.parametrize("kind", thinned(["png", "svg", "pdf"], ["svg"]))
def test_each_format_has_the_same_bytes_each_time(plot, tmp_path, kind):
    (name,) = plot(["target"], "one", example_count=1, out_format=kind)
    assert plot(["target"], "other", example_count=1, out_format=kind) == [name]
    assert name.endswith(kind)
    one, other = ((tmp_path / root / "epoch_0" / "valid" / name).read_bytes() for root in ("one", "other"))
    assert one == other
    assert one.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind])


def drawn_lines(plot, monkeypatch, variables, **arguments):
    """Return what the axes of the first picture have: label -> values."""
    from matplotlib.figure import Figure

    found = []
    real = Figure.legend
    monkeypatch.setattr(Figure, "legend", lambda self, *args, **more: found.append(self) or real(self, *args, **more))
    plot(variables, example_count=1, **arguments)
    (axes,) = found[0].axes
    return axes, {line.get_label(): np.asarray(line.get_ydata()) for line in axes.lines}


def test_a_line_has_the_values_without_padding(plot, monkeypatch):
    axes, lines = drawn_lines(plot, monkeypatch, ["target", "cost", "multi"], pad_mask_variable="mask", ymin=-1, ymax=2)
    assert list(lines) == ["target", "cost", "multi.0", "multi.1", "multi.2"]
    assert lines["target"].tolist() == SOURCES["target"][0, :1].tolist()
    assert lines["multi.1"].tolist() == SOURCES["multi"][0, :1, 1].tolist()
    assert lines["cost"].tolist() == [1, 1]
    assert axes.get_ylim() == (-1, 2)


def test_padding_in_the_middle_is_a_gap(plot, monkeypatch):
    monkeypatch.setitem(SOURCES, "mask", np.array([[1, 0, 1, 1, 0, 0]] * ROWS))
    _, lines = drawn_lines(plot, monkeypatch, ["target"], pad_mask_variable="mask")
    assert np.isnan(lines["target"]).tolist() == [False, True, False, False]


@pytest.mark.parametrize(("mask", "kept"), [([0, 1, 1, 1, 1], 0), ([2, 0, 0, 0, 0], LENGTH)])
def test_a_mask_may_have_one_number_for_each_example(plot, monkeypatch, mask, kept):
    monkeypatch.setitem(SOURCES, "mask", np.array(mask))
    _, lines = drawn_lines(plot, monkeypatch, ["target"], pad_mask_variable="mask")
    assert len(lines["target"]) == kept


@pytest.mark.parametrize(("variable", "count"), [("ragged", 3), ("many", 1)])
def test_empty_and_many_lines_can_be_drawn(plot, variable, count):
    assert len(plot([variable], example_count=count)) == count


@pytest.mark.parametrize(
    ("variables", "arguments", "message"),
    [
        (["not-there"], {}, "'not-there'"),
        (["target"], {"id_variable": "not-there"}, "'not-there'"),
        (["target"], {"pad_mask_variable": "not-there"}, "'not-there'"),
        (["target"], {"streams": ["valid"], "pad_mask_variable": "not-there"}, "no output or source 'not-there'"),
        (["loss"], {}, "'loss' has one value for the whole batch"),
        (["image"], {}, r"'image' is not a sequence of numbers for each example: an example has the shape \(1, 2, 2\)"),
        (["words"], {}, "'words' is not a sequence of numbers for each example: an example has str"),
        (["target"], {"id_variable": "same"}, "two examples have the id 'a'"),
        (["ragged"], {"pad_mask_variable": "mask"}, r"mask of an example has the shape \(6,\), and 'ragged' \(1,\)"),
    ],
)
def test_wrong_batches(plot, variables, arguments, message):
    with pytest.raises(StreamError, match=message) as caught:
        plot(variables, **arguments)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    ("variables", "arguments", "message"),
    [
        ([], {}, "variables: name at least one"),
        ("target", {}, "variables: 'target' is not a list"),
        (["target"], {"out_format": "gif"}, "out_format: 'gif' is not one of png, svg, pdf"),
        (["target"], {"example_count": 0}, "example_count: 0 is not a whole number"),
        (["target"], {"ymin": 1, "ymax": 0}, "ymax: 0 is not above ymin"),
        (["target"], {"ymin": float("nan")}, "ymin: nan is not a number"),
        (["target"], {"root_dir": ".."}, "root_dir: '..' is not a folder"),
    ],
)
def test_wrong_arguments(variables, arguments, message):
    with pytest.raises(ArgumentError, match=message):
        PlotLines(variables, **arguments)


def test_a_stream_that_is_not_there_is_an_error(scripted, tmp_path):
    with pytest.raises(HookError, match=r"stream 'vaild'.*did you mean 'valid'"):
        MainLoop(scripted(), Batches(), [PlotLines(["x"], ["vaild"], output_dir=tmp_path)])


@pytest.mark.campaign
def test_two_hooks_may_share_a_folder_if_their_files_differ(scripted, tmp_path):
    def loop(*variables):
        hooks = [PlotLines([each], output_dir=tmp_path) for each in variables]
        return MainLoop(scripted(), Batches(**SOURCES), hooks, on_unused_sources="ignore")

    loop("target", "multi").run_evaluation("valid")
    assert len(list((tmp_path / "visual/epoch_0/valid").iterdir())) == 8
    with pytest.raises(HookError, match="two hooks PlotLines write to visual"):
        loop("target", "target")


def test_without_matplotlib_the_message_has_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"PlotLines needs matplotlib.*'emrun\[plots\]'"):
        PlotLines(["x"])


def test_in_a_run_evaluations_are_plotted_and_trackers_get_the_first_picture(tmp_path, digits_config, monkeypatch):
    plot = {"PlotLines": {"variables": ["logits"], "every": "2 epochs", "example_count": 1}}
    config = digits_config([plot, {"StopAfter": {"epochs": 3}}], batch_size=500)
    training = create_training(config, output_dir=tmp_path / "run")
    shown = []
    monkeypatch.setattr(type(training.main_loop), "show", lambda self, name, value: shown.append((name, type(value))))
    assert training.main_loop.run_training().status == "finished"
    files = sorted(str(path.relative_to(tmp_path / "run/visual")) for path in (tmp_path / "run").rglob("*.png"))
    assert files == [f"epoch_{epoch}/valid/{n}_batch_1_plot-logits.png" for epoch in (0, 2) for n in (0,)]
    assert shown == [("valid/logits", Picture)] * 2
    with Image.open(tmp_path / "run/visual" / files[0]) as image:
        assert image.size == (640, 400)


@pytest.mark.usefixtures("undrawn")
def test_the_yaml_in_its_docstring_evaluates(tmp_path, scripted, in_docstring):
    (entry,) = in_docstring(PlotLines)
    dataset = Batches(target=SOURCES["target"], output=SOURCES["multi"])
    loop = MainLoop(scripted(), dataset, [PlotLines(**entry["PlotLines"], output_dir=tmp_path)])
    loop.run_evaluation("valid")
    assert len(list((tmp_path / "visual/epoch_0/valid").glob("*_batch_1_plot-target-vs-output.png"))) == 4
