"""What tests of datasets share: passes over a stream, the rules that every stream keeps, the YAML of a docstring."""

import inspect
import pickle
from functools import cache

import numpy as np
import pytest
from doubles import stream_of
from ruamel.yaml import YAML

from emrun import create_training


@pytest.fixture(scope="module", autouse=True)
def cores_are_counted_once():
    """Ask the control groups of the process how many cores it has only once, instead of in each pass."""
    from emrun.base import cores

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cores, "allowed_cores", cache(cores.allowed_cores))
        yield


def _passes(dataset, name, n=1, **options):
    stream = stream_of(dataset, name, **options)
    with stream:
        return [list(stream) for _ in range(n)]


def _bits(batches):
    return [
        {
            source: (str(np.asarray(v).dtype), np.asarray(v).shape, np.asarray(v).tobytes())
            for source, v in batch.items()
        }
        for batch in batches
    ]


@pytest.fixture
def passes():
    """Return the batches of each of the first passes over a stream."""
    return _passes


@pytest.fixture
def bits():
    """Return what tells batches apart: sources with dtype, shape and bytes."""
    return _bits


@pytest.fixture
def check_training_stream():
    """Check that a train stream is shuffled in each pass, and the same however it is read.

    `make` builds the dataset; what it builds is checked whole, with a buffer, unpickled, with another seed, and resumed
    by a dataset built again after some of the batches: `stops`, or the second and those around the end of a pass.
    """

    def check(make, shuffles=True, pickles=True, stops=()):
        straight = [_bits(batches) for batches in _passes(make(), "train", 3)]
        assert len(straight[0]) >= 3
        if shuffles:
            assert straight[0] != straight[1] != straight[2] != straight[0]
            assert straight[0] != _bits(_passes(make(), "train", seed=1)[0])
        assert [_bits(batches) for batches in _passes(make(), "train", 2, buffer=2)] == straight[:2]
        if pickles:
            dataset = make()
            _passes(dataset, "train")
            again = pickle.loads(pickle.dumps(dataset))
            assert [_bits(batches) for batches in _passes(again, "train", 2)] == straight[:2]
        flat = [batch for batches in straight for batch in batches]
        for stop in stops or (2, len(straight[0]), len(straight[0]) + 1):
            before, after = stream_of(make(), "train"), stream_of(make(), "train")
            epochs = (batch for _ in range(3) for batch in before)
            assert _bits(next(epochs) for _ in range(stop)) == flat[:stop]
            state = before.state_dict()
            after.load_state_dict(state)
            assert after.restore(), f"not the same after {stop} batches"
            rest = [batch for _ in range(2) for batch in after]
            assert len(rest) >= len(straight[1])
            assert _bits(rest)[: len(flat) - stop] == flat[stop : stop + len(rest)]

    return check


def _yaml_of(kind):
    text = next(part for part in inspect.getdoc(kind).split("\n\n") if part.startswith("    "))
    return YAML(typ="safe").load(text)


@pytest.fixture
def yaml_of():
    """Return the config that the docstring of a dataset shows."""
    return _yaml_of


@pytest.fixture
def train_docstring(tmp_path):
    """Train a linear classifier on what the docstring of a dataset shows; return the statistics of each epoch.

    With one class, it is trained on logits.
    """

    def train(kind, x, y, features, classes, epochs, lr=0.5, streams=("valid",), **main_loop):
        shape = {"class": "torch.nn.Flatten", **({"start_dim": 0} if classes == 1 else {})}
        linear = {"class": "torch.nn.Linear", "in_features": features, "out_features": classes}
        loss = "torch.nn.BCEWithLogitsLoss" if classes == 1 else "torch.nn.CrossEntropyLoss"
        accuracy = {"import": "emrun.metrics.accuracy", "inputs": ["logits", y]}
        config = {
            **_yaml_of(kind),
            "seed": 0,
            "model": {
                "module": {
                    "class": "torch.nn.Sequential",
                    "args": [linear, shape] if classes == 1 else [shape, linear],
                },
                "inputs": [x],
                "outputs": ["logits"],
                "loss": {"class": loss, "inputs": ["logits", y]},
                "metrics": {"accuracy": accuracy} if classes > 1 else {},
                "optimizer": {"class": "SGD", "lr": lr},
            },
            "main_loop": {"extra_streams": list(streams), "report": False, **main_loop},
            "hooks": [
                {"ComputeStats": {"variables": ["loss", "accuracy"] if classes > 1 else ["loss"]}},
                {"StopAfter": {"epochs": epochs}},
            ],
        }
        main_loop = create_training(config, output_root=tmp_path).main_loop
        assert main_loop.run_training().status == "finished"
        return [line["streams"] for line in main_loop.metrics]

    return train
