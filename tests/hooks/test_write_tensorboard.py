"""What TensorBoard reads; tests/training/test_everything.py has runs that are interrupted and killed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from campaign import thinned
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from emrun import AbstractHook, create_training, read_steps, resume_training
from emrun.base.errors import ArgumentError, HookError
from emrun.hooks import WriteTensorBoard
from emrun.hooks._shared.figures import png
from emrun.record.metrics_log import MetricsLog
from emrun.shown import Histogram, Picture, Text
from emrun.training.create import train

KINDS = ("scalars", "images", "tensors", "histograms")
STATS = {"ComputeStats": {"variables": [{"loss": ["mean", "std"]}]}}


def read(run):
    events = EventAccumulator(str(run / "tensorboard"), size_guidance=dict.fromkeys(KINDS, 0))
    events.Reload()
    return events


def points(run, tag):
    return [(each.step, each.value) for each in read(run).Scalars(tag)]


class Shows(AbstractHook):
    """Shows a picture, a text and a histogram after each epoch."""

    def after_epoch(self, epoch_id):
        self.main_loop.show("look/picture", Picture(png(np.full((5, 7, 3), epoch_id, dtype=np.uint8))))
        self.main_loop.show("look/text", Text(f"**epoch** {epoch_id}"))
        self.main_loop.show("look/values", Histogram(torch.tensor([0.0, 1.0, float("nan"), 1.0])))
        self.main_loop.show("look/nothing", Histogram(torch.tensor([float("nan")])))


@pytest.fixture
def run_with(tmp_path, digits_config):
    """Train with these hooks; return the run directory and the main loop. An epoch has 15 updates."""

    def run(*hooks, more=(), epochs=2, **main_loop):
        config = digits_config([*hooks, {"StopAfter": {"epochs": epochs}}], **main_loop)
        training = create_training(config, output_dir=tmp_path / "run")
        training.main_loop.change_hooks([*training.main_loop.hooks, *more])
        train(training)
        return tmp_path / "run", training.main_loop

    return run


def test_the_points_are_the_statistics_and_the_means_between_epochs(run_with):
    run, loop = run_with(STATS, {"WriteTensorBoard": {"every": "4 updates"}})
    streams = [(line["iteration"], line["streams"]) for line in loop.metrics]
    assert points(run, "valid/loss/std") == [(it, np.float32(each["valid"]["loss"]["std"])) for it, each in streams]
    assert points(run, "valid/loss") == [(it, np.float32(each["valid"]["loss"]["mean"])) for it, each in streams]
    steps = read_steps(run)
    due = [4, 8, 12, 16, 20, 24, 28]
    assert points(run, "steps/learning_rate") == [(step, np.float32(0.5)) for step in due]
    assert [step for step, _ in points(run, "steps/loss")] == due
    assert points(run, "steps/loss")[0][1] == pytest.approx(steps["loss"][:4].mean(), rel=1e-6)


def test_the_last_step_of_the_run_is_written_if_it_is_due(run_with):
    run, _ = run_with(STATS, {"WriteTensorBoard": {"every": "3 updates"}}, batch_size=500)
    assert [step for step, _ in points(run, "steps/loss")] == [3, 6]


def test_what_hooks_show_is_written_wherever_they_stand(run_with):
    run, _ = run_with(STATS, "WriteTensorBoard", more=[Shows()], batch_size=500)
    events = read(run)
    pictures = events.Images("look/picture")
    assert [(each.step, each.width, each.height) for each in pictures] == [(0, 7, 5), (3, 7, 5), (6, 7, 5)]
    assert pictures[1].encoded_image_string == png(np.full((5, 7, 3), 1, dtype=np.uint8))
    texts = [each.tensor_proto.string_val[0].decode() for each in events.Tensors("look/text/text_summary")]
    assert texts == ["**epoch** 0", "**epoch** 1", "**epoch** 2"]
    assert [each.histogram_value.num for each in events.Histograms("look/values")] == [3, 3, 3]
    assert "look/nothing" not in events.Tags()["histograms"]


def test_the_config_and_the_metrics_are_on_the_page_of_hyperparameters(run_with):
    run, _ = run_with(STATS, "WriteTensorBoard", epochs=1, batch_size=500)
    again = resume_training(run, ["hooks.StopAfter.epochs=2"])
    train(again)
    metadata = read(run).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    values = plugin_data_pb2.HParamsPluginData.FromString(metadata).session_start_info.hparams
    assert values["model.optimizer.lr"].number_value == 0.5
    assert values["model.module.class"].string_value == "torch.nn.Linear"
    (text,) = read(run).Tensors("run/text_summary")  # a resume does not write it again
    assert "- seed: `0`" in text.tensor_proto.string_val[0].decode()


def test_a_resume_makes_the_points_that_a_file_has_lost_again_in_a_file_of_a_new_name_and_removes_the_old_one(run_with):
    run, _ = run_with(STATS, "WriteTensorBoard", epochs=1, batch_size=500)
    (old,) = (run / "tensorboard").iterdir()
    old.write_bytes(old.read_bytes()[:-20])
    train(resume_training(run, ["hooks.StopAfter.epochs=2"]))
    (new,) = (run / "tensorboard").iterdir()
    assert new.name > old.name
    assert [step for step, _ in points(run, "train/loss")] == [0, 3, 6]
    assert [step for step, _ in points(run, "valid/loss/std")] == [0, 3, 6]  # one was the end of the file


def test_a_directory_that_exists_is_an_error(tmp_path):
    foreign = tmp_path / "tensorboard" / "events.out.tfevents.1.host.2.0"
    foreign.parent.mkdir()
    foreign.write_bytes(b"theirs")
    hook = WriteTensorBoard(output_dir=tmp_path)
    with pytest.raises(HookError, match="tensorboard exists; move it elsewhere, or choose another name or directory"):
        hook.register_mainloop(SimpleNamespace(rows=MetricsLog(None), has_run=False))
    assert foreign.read_bytes() == b"theirs"


class Writes(AbstractHook):
    """Adds a value that is not a number."""

    writes = ("words",)

    def after_epoch(self, epoch_data):
        epoch_data["valid"]["words"] = "many"


@pytest.mark.parametrize("policy", thinned(["warn", "ignore", "error"], ["warn", "error"]))
def test_a_value_that_is_not_a_number_follows_the_policy(run_with, caplog, policy):
    hooks = STATS, {"WriteTensorBoard": {"on_unknown_type": policy}}
    if policy == "error":
        with pytest.raises(HookError, match="valid/words is str, not a number; to leave it out, set on_unknown_type"):
            run_with(*hooks, more=[Writes()], batch_size=500)
        return
    run_with(*hooks, more=[Writes()], epochs=1, batch_size=500)
    warnings = [each.getMessage() for each in caplog.records if "words" in each.getMessage()]
    assert warnings == ["WriteTensorBoard: valid/words is str, not a number; it is left out"] * (policy == "warn")


@pytest.mark.parametrize(("arguments", "argument"), [
    ({"every": "2 epochs"}, "every"), ({"every": 5}, "every"), ({"on_unknown_type": "no"}, "on_unknown_type"),
])  # fmt: skip
def test_a_wrong_argument_is_an_error(arguments, argument):
    with pytest.raises(ArgumentError) as caught:
        WriteTensorBoard(**arguments)
    assert caught.value.argument == argument


def test_without_tensorboard_the_message_says_what_to_install(tmp_path, warm):
    (tmp_path / "without.py").write_text(
        "import sys; sys.modules['tensorboard'] = None\n"
        "from emrun.base.errors import MissingExtra\n"
        "from emrun.hooks import WriteTensorBoard\n"
        "try: WriteTensorBoard()\n"
        "except MissingExtra as error: print(error)"
    )
    done = warm.run([str(tmp_path / "without.py")], tmp_path, timeout=60)
    assert done.stdout == (
        "WriteTensorBoard needs tensorboard, which is not installed: pip install 'emrun[tensorboard]'\n"
    )
