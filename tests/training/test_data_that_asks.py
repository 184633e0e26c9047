"""A dataset that takes the model: it gets the model, is not read ahead, and a resume is exact."""

import json
import signal

import pytest
from campaign import thinned

from emrun import AbstractHook, create_dataset, create_model, create_training, resume_training
from emrun.base.errors import ConfigError, StreamError
from emrun.diagnosis.stream_bench import bench
from emrun.hooks._time_shares import Times, verdict
from emrun.training.evaluate import evaluate

PARTS = '''
import numpy as np
import torch


class Walk:
    """Goes where the weights of the model lead; begins again where the last pass has ended."""

    def __init__(self, model, has_state=True):
        self.model, self.random, self.place, self.steps = model, np.random.default_rng(7), np.zeros(2, np.float32), 0
        if not has_state:
            self.train_stream = lambda: iter(self)

    def train_stream(self):
        return self

    def valid_stream(self):
        yield {"x": np.ones((2, 2), np.float32) * self.model.module.weight.item()}

    def __iter__(self):
        while self.steps < 4:
            self.steps += 1
            self.place = self.place * self.model.module.weight.item() + self.random.random(2, np.float32)
            yield {"x": self.place[None] + self.random.random((3, 1), np.float32)}
        self.steps = 0

    def state_dict(self):
        return {"random": self.random, "place": self.place, "steps": self.steps}

    def load_state_dict(self, state):
        vars(self).update(state)


class Generated:
    def __init__(self, model):
        self.model = model

    def train_stream(self):
        yield {"x": np.ones((2, 2), np.float32)}


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.5]))

    def forward(self, x):
        return {"loss": ((x * self.weight - 1) ** 2).mean(1)}


class Endless(Walk):
    def __iter__(self):
        while True:
            yield from super().__iter__()


class Asking(Module):
    def __init__(self, dataset):
        super().__init__()


class Holder:
    def __init__(self, inner):
        self.inner = inner

    def train_stream(self):
        return self.inner.train_stream()


class Named:
    def __init__(self, model):
        self.model = model

    def train_stream(self):
        yield {"x": np.ones((2, 2), np.float32)}
'''


@pytest.fixture(autouse=True)
def parts(tmp_path, monkeypatch):
    (tmp_path / "my_walk.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def config(dataset="my_walk.Walk", module="my_walk.Module", **main_loop):
    return {
        "seed": 3,
        "dataset": {"class": dataset} if isinstance(dataset, str) else dataset,
        "model": {"module": {"class": module}, "optimizer": {"class": "SGD", "lr": 0.05, "momentum": 0.9}},
        "main_loop": {"extra_streams": ["valid"], "skip_zeroth_epoch": True, "report": False, **main_loop},
        "hooks": ["ComputeStats", {"StopAfter": {"epochs": 3}}],
    }


class EndsIn(AbstractHook):
    """Sends a signal in a batch."""

    def __init__(self, iteration):
        super().__init__()
        self.iteration = iteration

    def after_batch(self):
        if self.main_loop.iterations_done == self.iteration and self.main_loop.training:
            signal.raise_signal(signal.SIGINT)


def trained(training, *hooks):
    training.main_loop.change_hooks([*training.hooks, *hooks])
    training.main_loop.run_training()
    file = training.output_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["streams"] for line in lines], training.model.module.weight.tolist()


@pytest.mark.parametrize("iteration", thinned([1, 4, 8], [4]))
def test_the_dataset_has_the_model_and_a_resume_at_each_batch_gives_the_same_bits(tmp_path, iteration):
    training = create_training(config(), output_dir="whole")
    assert training.dataset.model is training.model
    expected = trained(training)
    trained(create_training(config(), output_dir="run"), EndsIn(iteration))
    found = trained(resume_training("run"), EndsIn(iteration + 2))  # a resume of a resume
    again = resume_training("run")
    assert (found if again is None else trained(again)) == expected
    assert "not exact" not in (tmp_path / "run" / "train.log").read_text()


def test_alone_the_dataset_gets_a_model_that_is_built_or_given():
    model = create_model(config())
    assert create_dataset(config(), model=model).model is model
    assert create_dataset(config()).model.module.weight.item() == 0.5
    with pytest.raises(ConfigError, match="missing section 'model'"):
        create_dataset({"dataset": {"class": "my_walk.Walk"}})


@pytest.mark.parametrize(("key", "value"), [("workers", 2), ("buffer", 3)])
def test_reading_ahead_is_refused_with_the_reason(key, value):
    with pytest.raises(ConfigError) as caught:
        create_training(config(**{key: value}))
    assert (
        f"main_loop.{key}: Walk takes the model: a batch depends on the updates before it, so it cannot be read ahead; "
        "remove the key"
    ) in str(caught.value)
    create_training(config(buffer=0, workers=0), output_dir="none")


def test_overfit_is_refused():
    with pytest.raises(ConfigError, match=r"main_loop\.overfit: Walk takes the model: no batches can be kept"):
        create_training(config(overfit=2))


def test_a_circle_is_an_error_in_a_whole_config_and_in_a_part():
    for build in (create_training, create_dataset, create_model):
        with pytest.raises(
            ConfigError, match="Walk takes the model, and a part of the model takes the dataset; one must"
        ):
            build(config(module="my_walk.Asking"))


def test_parts_of_a_dataset_have_an_argument_model_of_their_own():
    found = create_dataset(
        {"dataset": {"class": "my_walk.Holder", "inner": {"class": "my_walk.Named", "model": "big"}}}
    )
    assert found.inner.model == "big"
    with pytest.raises(ConfigError, match=r"'model' is supplied by emrun; remove it; if your class means .* rename"):
        create_dataset(config({"class": "my_walk.Named", "model": "big"}))


def test_a_train_stream_without_a_state_is_an_error():
    training = create_training(config("my_walk.Generated", extra_streams=[]))
    with pytest.raises(
        StreamError, match="'train' of a dataset that takes the model cannot be read again after updates"
    ):
        training.main_loop.run_training()


def test_neither_the_profile_nor_bench_advises_to_read_ahead():
    subject, text = verdict(Times(10.0, reading={"train": 8.0}, trained={"train"}), None, [], 8)
    assert (subject, text) == (
        "reading",
        "waits for data 80% of the time: a batch depends on the updates before it, so it cannot be read ahead; "
        "make the dataset faster",
    )
    found = bench(config(), seconds=0.01, step=0.001)
    assert [len(each.readings) for each in found.streams] == [1, 1]


def test_an_evaluation_of_the_train_stream_ends_with_its_epoch(tmp_path):
    training = create_training(config("my_walk.Endless", fixed_epoch_size=3), output_dir=tmp_path / "run")
    training.main_loop.run_training()
    assert evaluate(tmp_path / "run", "train")["train"]["loss"]["mean"] > 0
