"""What is measured for streams, and which setting is recommended; the tests do not depend on real times."""

import importlib
import itertools
import os
import tempfile
from pathlib import Path

import numpy as np
import psutil
import pytest
from campaign import thinned
from PIL import Image

from emrun.base.encoding import random_digest
from emrun.base.errors import ArgumentError, ConfigError, UsageError
from emrun.base.randomness import seed_everything
from emrun.diagnosis.stream_bench import Setting, Speed, StreamBench, bench, settings

SECONDS = 0.002
SETTINGS = ["no read-ahead", "buffer: 4", "workers: 1", "workers: 2"]
MODEL = {
    "module": {"class": "torch.nn.Linear", "in_features": 64, "out_features": 10},
    "inputs": ["image"],
    "outputs": ["logits"],
    "loss": {"class": "torch.nn.CrossEntropyLoss", "inputs": ["logits", "label"]},
    "optimizer": {"class": "SGD", "lr": 0.1},
}
DIGITS = {
    "dataset": {"class": "Digits", "flat": True},
    "model": MODEL,
    "main_loop": {"extra_streams": [{"valid": "5 epochs"}]},
}


class Drawn:
    """A stream whose rows do not come from `ctx.batches`, and that draws from global random states."""

    def train_stream(self, ctx):
        for _ in range(30):
            yield {"x": np.random.rand(4)}

    def valid_stream(self):
        return ()


class Failing:
    def train_stream(self, ctx):
        for rows in ctx.batches(10, 1):
            yield {"x": rows}
            raise RuntimeError("the disk is on fire")


class Noted:
    """Writes the number of each pass into a file, in whichever process it is read."""

    def __init__(self, path):
        self.path = path

    def train_stream(self, ctx):
        with Path(self.path).open("a") as file:
            print(ctx.epoch, file=file)
        yield {"x": [ctx.epoch]}
        yield {"x": [ctx.epoch]}


class OtherDtype:
    """Has an argument `dtype` that is not one of bytes."""

    def __init__(self, dtype="whole", reads=False):
        self.is_known = dtype == "whole"
        if not self.is_known and not reads:
            raise LookupError(dtype)

    def train_stream(self, ctx):
        for rows in ctx.batches(10, 1):
            yield {"x": rows if self.is_known else 1 / 0}


@pytest.fixture
def one_setting(monkeypatch):
    """Read streams in one setting only, where the step is the subject."""
    monkeypatch.setattr("emrun.diagnosis.stream_bench.settings", lambda *words: settings(*words)[:1])


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr("emrun.diagnosis.stream_bench.cores", lambda: 2)


def of(dataset, **rest):
    return {"dataset": {"class": f"{__name__}.{dataset}"}, **rest}


def measured(*seconds_per_batch, first=0.0, length=None):
    readings = [
        Speed(setting, first if setting.workers else 0.0, each)
        for setting, each in zip(settings(4), seconds_per_batch, strict=False)
    ]
    return StreamBench("train", True, True, length, readings)


def choice(stream, step):
    return str(stream.chosen(step).setting)


def test_workers_are_tried_up_to_the_number_of_cores():
    assert [str(setting) for setting in settings(1)] == SETTINGS
    assert [setting.workers for setting in settings(2)] == [0, 0, 1, 2]
    assert [setting.workers for setting in settings(12)] == [0, 0, 1, 2, 4, 8, 12]


@pytest.fixture(scope="module")
def digits_read(tmp_path_factory):
    """Return what is found with digits, and what is left behind: files, processes, and changed random states."""
    importlib.import_module("torch._dynamo")  # the first optimizer would, which makes a directory
    place = tmp_path_factory.mktemp("digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("emrun.diagnosis.stream_bench.cores", lambda: 2)
        patch.chdir(place)
        patch.setattr(tempfile, "tempdir", str(place))
        before, random = children(), random_digest()
        found = bench(DIGITS, seconds=SECONDS)
        return found, [*place.iterdir(), *(children() - before), *["random states"] * (random_digest() != random)]


def children():
    return {child.pid for child in psutil.Process().children()}


def test_every_stream_of_the_loop_is_read_in_every_setting(digits_read):
    found, _ = digits_read
    assert [(stream.name, stream.trains) for stream in found.streams] == [("train", True), ("valid", False)]
    for stream in found.streams:
        assert [str(reading.setting) for reading in stream.readings] == SETTINGS
        assert all(reading.first > 0 and reading.seconds_per_batch > 0 for reading in stream.readings)
        assert stream.shares_rows
        assert stream.length is not None
    assert found.step > 0
    assert found.no_step is None


def test_all_streams_of_the_dataset_are_read_when_asked_for(one_setting):
    found = bench(DIGITS, ["~main_loop"], seconds=SECONDS, all_streams=True, step=0.1)
    assert [stream.name for stream in found.streams] == ["train", "test", "valid"]
    assert found.step == 0.1


def test_a_stream_without_shared_rows_is_not_read_by_several_workers():
    (stream,) = bench(of("Drawn"), seconds=SECONDS).streams
    assert [str(reading.setting) for reading in stream.readings] == SETTINGS[:3]
    assert not stream.shares_rows
    assert stream.length == 30


def test_a_stream_without_batches_has_no_times(one_setting):
    found = bench(of("Drawn", main_loop={"extra_streams": ["valid"]}), seconds=SECONDS)
    empty = found.streams[1]
    assert [(reading.first, reading.seconds_per_batch) for reading in empty.readings] == [(None, None)]
    found = bench(of("Drawn", main_loop={"train_stream_name": "valid"}), seconds=SECONDS, step=0.1)
    assert (found.step, found.no_step) == (None, "stream 'valid' has no batches")


def test_without_a_model_that_can_be_trained_here_there_is_a_reason(one_setting):
    assert bench(of("Drawn"), seconds=SECONDS).no_step == "the config has no model; use --step-ms"
    found = bench(DIGITS, ["model.device=nowhere"], seconds=SECONDS)
    assert found.step is None
    assert found.no_step.startswith("the model cannot be trained here (")
    assert "'nowhere' cannot be used here" in found.no_step


def test_hooks_change_the_batch_that_the_model_gets(one_setting):
    loss = {"class": "torch.nn.CrossEntropyLoss", "inputs": ["logits", "target"]}
    schedule = {"class": "Cosine", "warmup": "5%"}
    hooks = [{"Mixup": {"alpha": 0.2}}, "LogVariables", {"StopAfter": {"epochs": 2}}]
    config = {**DIGITS, "model": {**MODEL, "loss": loss, "scheduler": schedule}, "hooks": hooks}
    found = bench(config, seconds=SECONDS)
    assert (found.step is not None, found.no_step) == (True, None)


def test_a_step_is_timed_without_its_schedule_which_may_need_the_length_of_the_run(one_setting):
    config = {**DIGITS, "model": {**MODEL, "scheduler": {"class": "Cosine", "warmup": "5%"}}}
    assert bench(config, seconds=SECONDS).no_step is None


@pytest.mark.parametrize("buffered", [[], ["main_loop.start_method=spawn"]])
def test_what_a_stream_raises_is_raised(buffered):
    with pytest.raises(RuntimeError, match="the disk is on fire"):
        bench(of("Failing"), buffered, seconds=SECONDS)


def test_workers_that_cannot_read_a_stream_are_skipped_with_a_warning(caplog):
    points = {"class": "torch.utils.data.TensorDataset", "args": [{"class": "torch.ones", "args": [9, 1]}]}
    loader = {"class": "torch.utils.data.DataLoader", "args": [points], "num_workers": 1}
    dataset = {"class": "TorchDataset", "train": loader, "sources": ["x"]}
    (stream,) = bench({"dataset": dataset}, seconds=SECONDS).streams
    assert [str(reading.setting) for reading in stream.readings] == SETTINGS[:2]
    message = "stream 'train' cannot be read with workers: 1: stream 'train' starts processes"
    assert message in caplog.text


class Noise:
    """Its items draw from NumPy's global generator."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return np.random.rand(4)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_stream_that_draws_from_global_generators_is_told(is_own):
    items = {"class": "TorchDataset", "train": {"class": f"{__name__}.Noise"}, "sources": ["x"]}
    config = of("Drawn") if is_own else {"dataset": items}
    assert bench(config, seconds=SECONDS).streams[0].draws == ["numpy"] * is_own


def test_settings_that_items_which_draw_cannot_have_are_skipped(caplog):
    items = {"class": "TorchDataset", "train": {"class": f"{__name__}.Noise"}, "sources": ["x"]}
    (stream,) = bench({"dataset": items}, seconds=SECONDS).streams
    assert [str(reading.setting) for reading in stream.readings] == ["no read-ahead", *SETTINGS[2:]]
    assert "cannot be read with buffer: 4: stream 'train': items of Noise change the global random" in caplog.text


def test_wrong_names_in_the_config_are_reported_before_anything_is_read():
    with pytest.raises(UsageError, match="no method 'trian_stream'; did you mean 'train'"):
        bench(of("Failing"), ["main_loop.extra_streams=[trian]"])
    with pytest.raises(ArgumentError, match=r"main_loop.start_method: 'run' is not one of"):
        bench(of("Failing"), ["main_loop.start_method=run"])
    with pytest.raises(ConfigError, match="main_loop: 5 is not a mapping"):
        bench(of("Failing"), ["main_loop=5"])


def test_nothing_is_left_behind(digits_read, tmp_path, monkeypatch):
    assert digits_read[1] == []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before, random = children(), random_digest()
    with pytest.raises(RuntimeError):
        bench(of("Failing"), seconds=SECONDS)
    assert random_digest() == random
    assert children() <= before
    assert list(tmp_path.iterdir()) == []


def test_every_setting_reads_other_passes(tmp_path):
    bench({"dataset": {"class": f"{__name__}.Noted", "path": str(tmp_path / "passes")}}, seconds=SECONDS)
    numbers = [int(line) for line in (tmp_path / "passes").read_text().split()]
    begun = [number for number, before in zip(numbers, [0, *numbers], strict=False) if number != before]
    assert len(set(numbers)) > len(SETTINGS)
    assert begun == sorted(begun)


def test_what_is_read_does_not_depend_on_random_states(monkeypatch):
    seen = []

    class Seen(Drawn):
        def train_stream(self, ctx):
            for batch in super().train_stream(ctx):
                seen[-1].append(batch["x"].tobytes())
                yield batch

    monkeypatch.setattr(f"{__name__}.Drawn", Seen)
    clock = itertools.count()  # so that each setting reads equally many batches, however busy the machine is
    monkeypatch.setattr("emrun.diagnosis.stream_bench.perf_counter", lambda: next(clock) / 10_000)
    for seed in (1, 2):
        seed_everything(seed)
        seen.append([])
        bench(of("Drawn"), seconds=SECONDS)
    assert seen[0][:30] == seen[1][:30]


def test_no_read_ahead_is_chosen_when_it_does_not_help():
    assert choice(measured(0.001, 0.001, 0.001, 0.001), step=0.1) == "no read-ahead"


def test_a_thread_is_chosen_when_it_hides_the_reading():
    assert choice(measured(0.05, 0.05, 0.05, 0.03), step=0.1) == "buffer: 4"


def test_workers_are_chosen_when_a_thread_is_too_slow():
    assert choice(measured(0.2, 0.2, 0.21, 0.11, 0.06), step=0.1) == "workers: 4"
    assert choice(measured(0.2, 0.2, 0.21, 0.1, 0.06), step=0.1) == "workers: 2"


def test_one_worker_that_gains_nothing_over_a_thread_is_not_chosen():
    assert choice(measured(0.2, 0.2, 0.199), step=0.1) == "buffer: 4"
    assert choice(measured(0.2, 0.2, 0.1), step=0.1) == "workers: 1"


def test_workers_whose_start_takes_longer_than_they_save_are_not_chosen():
    slow = (0.2, 0.2, 0.2, 0.1)
    assert choice(measured(*slow, first=1.0), step=0.1) == "workers: 2"
    assert choice(measured(*slow, first=1.0, length=200), step=0.1) == "workers: 2"
    assert choice(measured(*slow, first=1.0, length=5), step=0.1) == "buffer: 4"


def test_waiting_is_the_part_of_reading_that_training_does_not_hide():
    stream = measured(0.3, 0.3, 0.15, 0.1)
    assert [round(stream.waiting(reading, 0.1), 3) for reading in stream.readings] == [0.75, 0.667, 0.333, 0.0]
    pass_of_one = StreamBench("train", True, True, 1, [Speed(Setting(), 0.1, None)])
    assert pass_of_one.waiting(pass_of_one.readings[0], 0.1) == 0.5


def test_the_change_that_helps_most_is_the_one_with_which_training_waits_least():
    read = measured(0.5, 0.3, 0.3, 0.2)
    read.readings.append(Speed(Setting(buffer=4, dtype="uint8"), 0.0, 0.1))
    best = "buffer: 4, dataset.dtype: uint8"
    now, better = read.change(Setting(buffer=4), 0.05)
    assert (str(now.setting), str(better.setting)) == ("buffer: 4", best)
    assert str(read.chosen(0.05).setting) == "workers: 2"  # of those that are keys of main_loop
    assert read.change(Setting(buffer=4, dtype="uint8"), 0.05)[1] is None
    now, better = read.change(Setting(workers=3), 0.05)  # could not be read
    assert (now, str(better.setting)) == (None, best)


@pytest.mark.parametrize("threads", thinned(["1", "2"], ["1"]))
def test_images_are_also_read_as_bytes_and_by_more_threads(tmp_path, monkeypatch, threads):
    monkeypatch.setenv("EMRUN_THREADS", threads)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / name / "0.png")
    config = {"dataset": {"class": "ImageFolder", "train": str(tmp_path)}, "main_loop": {"workers": 0}}
    found = bench(config, seconds=0.001, step=1.0)
    tried = [str(each.setting) for each in found.streams[0].readings]
    more = ["buffer: 4, EMRUN_THREADS: 2"] * (threads == "1")
    assert tried[-len(more) - 1 :] == [*more, "buffer: 4, dataset.dtype: uint8"]
    assert str(found.present) == "buffer: 4"
    assert os.environ["EMRUN_THREADS"] == threads
    assert str(bench({**config, "main_loop": {"buffer": 3}}, seconds=0.001, step=1.0).present) == "buffer: 3"


@pytest.mark.parametrize("reads", thinned([False, True], [True]))
def test_a_dataset_whose_dtype_is_another_thing_is_read_as_it_is(reads):
    (stream,) = bench(of("OtherDtype"), [f"dataset.reads={reads}"], seconds=0.001, step=1.0).streams
    assert [str(reading.setting) for reading in stream.readings] == SETTINGS


@pytest.mark.campaign
def test_images_that_are_bytes_already_are_not_tried_as_bytes_once_more(tmp_path):
    (tmp_path / "a").mkdir()
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "a" / "0.png")
    dataset = {"class": "ImageFolder", "train": str(tmp_path), "dtype": "uint8"}
    (stream,) = bench({"dataset": dataset}, seconds=0.001, step=1.0).streams
    assert [str(reading.setting) for reading in stream.readings] == SETTINGS
