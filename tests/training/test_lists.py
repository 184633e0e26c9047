"""Sources that are lists: pictures of several sizes, dicts of boxes, graphs, strings."""

import json
import logging
import signal
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from campaign import thinned
from in_ranks import in_ranks

from emrun import AbstractHook, create_training, resume_training
from emrun.base.encoding import digest
from emrun.base.errors import ConfigError, StreamError
from emrun.config.config import read_config
from emrun.diagnosis.data_check import look_at_data
from emrun.diagnosis.replay import replay
from emrun.diagnosis.tryout import try_out
from emrun.training.predict import predict

PARTS = '''
import numpy as np
import torch


class Graph:
    """As those of torch_geometric: a text that does not tell the values, `to`, and a part that knows the whole."""

    def __init__(self, values):
        self.values, self.owner = values, self

    def __repr__(self):
        return f"Graph({len(self.values)})"

    def to(self, device):
        if self.values.isnan().any():
            raise TypeError("NaN cannot move")
        self.values = self.values.to(device)
        return self


class Pictures:
    def __init__(self, lost=None, gap=None, immovable=None):
        self.lost, self.gap, self.immovable = lost, gap, immovable

    def example(self, index):
        rng = np.random.default_rng(index)
        picture = rng.normal(size=(1, 3 + index % 3, 4)).astype(np.float32)
        boxes = torch.from_numpy(rng.normal(size=(index % 4, 4)).astype(np.float32))
        if index == self.gap:
            picture[0, 0, 0] = np.nan
        graph = Graph(torch.full((1 + index % 2,), np.nan if index == self.immovable else float(index % 5)))
        return picture, {"boxes": boxes, "kind": f"kind {index % 2}"}, graph, f"text {index}"

    def read(self, rows):
        names = ("picture", "target", "graph", "text")
        batch = {name: list(values) for name, values in zip(names, zip(*map(self.example, rows)))}
        if self.lost in rows:
            del batch["target"][0]
        return {**batch, "size": np.array([each.shape[1] for each in batch["picture"]])}

    def train_stream(self, ctx):
        for rows in ctx.batches(18, 4, shuffle=True):
            yield self.read(rows.tolist())

    def valid_stream(self, ctx):
        for rows in ctx.batches(6, 4):
            yield self.read(rows.tolist())


class Detector(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.5, 0.1, 0.2]))

    def forward(self, pictures, graphs=None):
        assert all(isinstance(each, torch.Tensor) for each in pictures)
        sums = torch.zeros(len(pictures)) if graphs is None else [each.values.sum() for each in graphs]
        found = [each.mean() * self.weight[0] + total * self.weight[1] for each, total in zip(pictures, sums)]
        return {"score": torch.stack(found), "detections": [{"boxes": each.expand(2, 4)} for each in found]}


def loss(score, targets, size):
    wanted = torch.stack([each["boxes"].sum() * 0.1 for each in targets])
    found = (score - wanted) ** 2 + size.float() * 0
    assert not found.isnan().any(), "the loss is not a number"
    return found


class Lengths:
    """A metric of a stream that reads strings, and whose result has entries that are not numbers."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.texts = []

    def update(self, detections, texts, targets):
        assert all(isinstance(each, str) for each in texts)
        assert len(detections) == len(texts) == len(targets)
        self.texts += texts

    def state_dict(self):
        return {"texts": self.texts}

    def load_state_dict(self, state):
        self.texts = state["texts"]

    def compute(self):
        return {"characters": sum(map(len, self.texts)), "texts": self.texts}
'''
CONFIG = {
    "seed": 3,
    "dataset": {"class": "parts_of_lists.Pictures"},
    "model": {
        "module": {"class": "parts_of_lists.Detector"},
        "inputs": {
            "pictures": {"source": "picture", "stack": False},
            "graphs": {"source": "graph", "stack": False},
            "target": {"stack": False},
        },
        "loss": {"import": "parts_of_lists.loss", "inputs": ["score", "target", "size"]},
        "metrics": {"lengths": {"class": "parts_of_lists.Lengths", "inputs": ["detections", "text", "target"]}},
        "optimizer": {"class": "Adam", "lr": 0.1},
        "device": "cpu",
    },
    "main_loop": {"extra_streams": ["valid"], "buffer": 2, "report": False},
    "hooks": ["ComputeStats", {"StopAfter": {"epochs": 2}}],
}


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    (tmp_path / "parts_of_lists.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def no_bar(*_):
    yield lambda: None


class Stops(AbstractHook):
    """Interrupts the run in the middle of its second epoch."""

    def after_batch(self):
        if self.main_loop.iterations_done == 7:
            signal.raise_signal(signal.SIGTERM)


def trained(place, *hooks, config=CONFIG, overrides=()):
    training = create_training(config, output_dir=place, overrides=overrides)
    training.main_loop.change_hooks([*training.hooks, *hooks])
    training.main_loop.run_training()
    return weights_of(training)


def without_metrics():
    return {**CONFIG, "model": {name: each for name, each in CONFIG["model"].items() if name != "metrics"}}


def weights_of(training):
    return training.model.module.weight.detach().numpy()


def test_a_run_on_lists_resumes_to_the_same_bits(project, caplog):
    caplog.set_level(logging.INFO, logger="emrun")
    expected = trained("straight")
    trained("stopped", Stops())
    resumed = resume_training("stopped")
    resumed.main_loop.run_training()
    assert np.array_equal(weights_of(resumed), expected)
    assert "not exact" not in caplog.text
    assert "model.metrics.lengths: texts are left out, which are not numbers" in caplog.text
    (*_, last) = map(json.loads, (project / "stopped/metrics.jsonl").read_text().splitlines())
    assert last["streams"]["train"]["lengths"] == {"characters": sum(len(f"text {each}") for each in range(18))}
    found = predict("stopped", "valid", "valid.jsonl", checkpoint_name="latest")
    assert found.columns == ("position", "score", "detections.boxes", "loss")
    first = json.loads((project / "valid.jsonl").read_text().splitlines()[0])
    assert first["detections.boxes"] == [[first["score"]] * 4] * 2


@pytest.mark.parametrize("way", thinned(["parts", "ranks"], ["parts"]))
def test_parts_of_a_batch_and_ranks_train_on_lists_as_one_process(project, way):
    config = without_metrics()
    expected = trained("one", config=config)
    if way == "parts":
        every = [trained("parts", config=config, overrides=["model.micro_batch_size=3"])]
    else:
        every = in_ranks(2, trained, "two", config=config)
    for found in every:
        assert found == pytest.approx(expected, abs=1e-5)


def test_check_shows_lists_and_says_what_a_failed_step_would_lack(project):
    report = try_out(read_config(CONFIG))
    sources = report["streams"]["train"]["sources"]
    assert sources["picture"] | {"range": ""} == {
        "dtype": "float32",
        "shape": "ragged",
        "range": "",
        "used_by": ["model"],
    }
    assert sources["graph"]["dtype"] == "list of Graph"
    assert sources["target.boxes"]["used_by"] == ["model"]
    assert [note for note in report["notes"] if "graph" in note] == [
        "stream 'train': if a step fails, its batch is saved without source 'graph': source 'graph'[0] is Graph, which "
        "cannot be saved; use plain types, tensors and arrays of numbers"
    ]


def test_checks_of_data_and_replay_look_into_lists(project):
    config = {**CONFIG, "dataset": {**CONFIG["dataset"], "gap": 3}}
    found = look_at_data(read_config(config), no_bar)["findings"]
    gap = next(each for each in found if each["kind"] == "not_finite" and each["streams"] == ["valid"])
    assert (gap["source"], gap["examples"]) == ("picture", [["3"]])
    leak = next(each for each in found if each["kind"] == "leak")
    assert leak["count"] == 6
    inputs = {name: each for name, each in CONFIG["model"]["inputs"].items() if name != "graphs"}
    config["model"] = {**CONFIG["model"], "inputs": inputs}
    with pytest.raises(AssertionError, match="the loss is not a number"):
        trained("failed", config={**config, "main_loop": {"skip_zeroth_epoch": True}})
    repeated = replay("failed")
    assert repeated.reproduced
    why = "source 'graph'[0] is Graph, which cannot be saved; use plain types, tensors and arrays of numbers"
    assert repeated.notes == [f"not saved in the capsule: graph: {why}"]
    (cause,) = repeated.causes
    assert repeated.not_finite == {"picture": cause}


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"lost": 2}, r"stream 'train', batch 0 of the epoch: sources of unequal length: picture 4, target.boxes 3, "),
        ({"immovable": 2}, r"source 'graph': entry \d, a Graph, cannot be moved to cpu: NaN cannot move"),
    ],
)
def test_a_wrong_list_is_an_error_with_its_place(dataset, message):
    config = {**CONFIG, "dataset": {**CONFIG["dataset"], **dataset}}
    with pytest.raises(StreamError, match=message):
        trained("run", config=config, overrides=["main_loop.fixed_epoch_size=5"])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"stack": False, "dtype": "float32"}, "graphs: dtype cannot be used with `stack: false`"),
        ({"stack": "no"}, "graphs.stack: 'no' is neither true nor false"),
        ({"source": "pictures", "stack": True}, "forward has no parameter 'targets'"),
    ],
)
def test_a_wrong_form_of_a_list_is_an_error(entry, message):
    name = "targets" if "forward" in message else "graphs"
    inputs = {**CONFIG["model"]["inputs"], name: entry}
    with pytest.raises(ConfigError, match=message):
        create_training({**CONFIG, "model": {**CONFIG["model"], "inputs": inputs}}, output_dir="run")


def test_checksums_of_objects_tell_their_content():
    from parts_of_lists import Graph

    one, same, other = Graph(torch.ones(2)), Graph(torch.ones(2)), Graph(torch.zeros(2))
    assert digest([one]) == digest([same]) != digest([other])
    assert digest([{"a": print}]) == digest([{"a": print}])
