"""Small models, datasets and hooks that run in the process of a test, and what is trained with them."""

import itertools
import threading

import numpy as np
import torch
from torch import nn

from emrun import AbstractHook, AbstractModel, Factory, MainLoop, TorchModel
from emrun.hook import EVENTS
from emrun.hooks import StopAfter
from emrun.streams.reading import Reading
from emrun.streams.stream import StreamWrapper


class Streams:
    """A dataset whose streams are lists of batches."""

    def __init__(self, num_batches=None, **streams):
        if num_batches is not None:
            self.num_batches = num_batches
        for name, batches in streams.items():
            setattr(self, f"{name}_stream", lambda batches=batches: iter(batches))


class Record(AbstractHook):
    """Keeps what the batches gave."""

    whole_batches = True

    def __init__(self):
        super().__init__()
        self.trained = []
        self.evaluated = []

    def after_batch(self, batch_data):
        (self.trained if self.main_loop.training else self.evaluated).append(batch_data)


class Affine(nn.Module):
    """y = w x + b on vectors of length 1, with its squared error as the loss."""

    def __init__(self, w=1.0, b=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w))
        self.b = nn.Parameter(torch.tensor(b))

    def forward(self, x, y):
        predicted = self.w * x + self.b
        return {"predicted": predicted, "loss": (predicted - y) ** 2}


class Push(nn.Module):
    """Its loss is its weight: with a learning rate of 0.1 each update takes 0.1 away."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return {"loss": self.w * torch.ones_like(x)}


class Net(nn.Module):
    """Two linear layers with others between them; the loss of an example is its squared output."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), *layers, nn.Linear(4, 1))

    def forward(self, x):
        return {"loss": self.layers(x).squeeze(1) ** 2}


class Normed(nn.Module):
    """Linear layers around a norm, with names; the output is the loss."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.norm = nn.LayerNorm(3)
        self.second = nn.Linear(3, 1)

    def forward(self, x):
        return {"loss": self.second(self.norm(self.first(x)))}


class Embedded(nn.Module):
    """Has a sparse gradient, if told so, dense ones, and a parameter without a gradient."""

    def __init__(self, sparse=False, scale=1):
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=sparse)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = scale

    def forward(self, x):
        return {"loss": self.scale * self.layers(self.table(x)).squeeze(-1) ** 2}


def words(count=6):
    """Return batches for `Embedded`."""
    rng = np.random.default_rng(0)
    return [{"x": rng.integers(0, 9, 4)} for _ in range(count)]


def vectors(count=6):
    """Return batches of four vectors of length 3."""
    rng = np.random.default_rng(0)
    return [{"x": rng.random((4, 3), np.float32)} for _ in range(count)]


SGD = Factory(torch.optim.SGD, lr=0.1)
XY = [{"x": [1.0, 2.0], "y": [3.0, 5.0]}, {"x": [0.0, -1.0], "y": [1.0, -1.0]}]


def run(model, batches=XY, *hooks, epochs=1, **arguments):
    """Train and return what the hook `Record` saw of the training."""
    record = Record()
    with MainLoop(model, Streams(train=batches), [*hooks, record], on_unused_sources="ignore", **arguments) as loop:
        for _ in range(epochs):
            loop.epoch(["train"])
    return record.trained


def evaluate(model, batches=XY):
    """Evaluate one pass and return the data of its batches."""
    record = Record()
    MainLoop(model, Streams(valid=batches), [record], on_unused_sources="ignore").run_evaluation("valid")
    return record.evaluated


def identity(**arguments):
    """Return a model whose forward returns its input `x` times a parameter."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x * self.scale if x.is_floating_point() else x

    return TorchModel(Scale(), outputs=["same"], **arguments)


def state_of(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same_state(module, state):
    return all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())


class Buffers(nn.Module):
    """A module whose state is the given tensors."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


class Keep(nn.Module):
    """Keeps the arguments of its last call; base of modules that tell what they are called with."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.called = None

    def keep(self, *arguments):
        self.called = arguments
        return {"out": torch.zeros(len(arguments[0]))}


class Two(Keep):
    def forward(self, a, b):
        return self.keep(a, b)


X, Y = np.array([1.0, 2.0, -1.0]), np.array([2.0, 6.0, 0.0])
DW, DB = 2 * (2 * X + 1 - Y) * X, 2 * (2 * X + 1 - Y)  # the gradients of each example's squared error


# A loop without PyTorch


class LossOfOne(AbstractModel):
    """Has a loss of 1 for every batch, and no weights."""

    input_names = ("x",)
    output_names = ("loss",)

    def run(self, batch, train, stream):
        return {"loss": 1.0}

    def save(self, directory):
        """Write nothing."""

    def load(self, directory):
        """Read nothing."""


class Numbers:
    """Three numbers to train on and one to evaluate."""

    def train_stream(self):
        return iter([{"x": [1, 2]}, {"x": [3]}])

    def valid_stream(self):
        return iter([{"x": [4]}])


class Doubler(AbstractModel):
    """Returns its input doubled and remembers how it was called."""

    input_names = ("x",)
    output_names = ("doubled",)

    def __init__(self):
        self.calls = []

    def run(self, batch, train, stream):
        self.calls.append((stream, train, list(batch["x"])))
        return {"doubled": [2 * value for value in batch["x"]]}

    def save(self, directory):
        (directory / "weights").write_text(str(len(self.calls)))

    def load(self, directory):
        pass


class SixExamples:
    """Three train batches, two valid batches, one test batch, of two examples each."""

    def __init__(self):
        self.passes = []

    def train_stream(self, ctx):
        self.passes.append(ctx.epoch)
        for rows in ctx.batches(6, 2):
            yield {"x": rows.tolist()}

    def valid_stream(self):
        yield {"x": [10, 11]}
        yield {"x": [12, 13]}

    def test_stream(self):
        yield {"x": [20, 21]}


def recording_hook(**raising):
    """Return a hook that listens to every event and raises what `raising` gives for its name."""

    class Recorder(AbstractHook):
        def __init__(self):
            super().__init__()
            self.events = []

    def listen(event):
        def method(self, **arguments):
            self.events.append((event, arguments))
            if event in raising:
                error = raising[event]
                raise error(event) if isinstance(error, type) else error

        return method

    for event in EVENTS:
        if event != "register_mainloop":
            setattr(Recorder, event, listen(event))
    return Recorder()


def with_method(name, function=lambda self: None):
    """Return a class of hooks with a method."""
    return type("MyHook", (AbstractHook,), {name: function})


def names(hook):
    return [name for name, _ in hook.events]


def loop_of(*hooks, model=None, dataset=None, **arguments):
    return MainLoop(model or Doubler(), dataset or SixExamples(), hooks, **arguments)


def trained(*hooks, epochs=1, **arguments):
    loop = loop_of(*hooks, StopAfter(epochs=epochs), **arguments)
    loop.run_training()
    return loop


def run_numbers(*hooks, model=None, **arguments):
    """Train for an epoch on `Numbers`; return the loop."""
    return trained(*hooks, model=model or LossOfOne(), dataset=Numbers(), **arguments)


# Streams


def stream_of(dataset, name="train", seed=0, buffer=0, training=None, **more):
    """Return what reads a stream of a dataset."""
    training = name == "train" if training is None else training
    function = getattr(dataset, f"{name}_stream")
    return wrapped(function, buffer, name=name, seed=seed, training=training, **more)


def wrapped(
    function,
    buffer=0,
    epoch_size=-1,
    name="unnamed",
    *,
    seed=0,
    training=True,
    interrupted=None,
    ranks=None,
    **how,
):
    """Return what reads a stream; further arguments are those of `Reading`."""
    interrupted = interrupted or (lambda: False)
    options = {"epoch_size": epoch_size, "seed": seed, "training": training, "ranks": ranks}
    return StreamWrapper(function, name, reading=Reading(buffer, **how), interrupted=interrupted, **options)


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("emrun-read")]


def by_context(batches=7):
    """A stream that has the number of its pass in every batch, and draws random numbers."""

    def stream(ctx):
        for rows in ctx.batches(2 * batches - 1, 2, shuffle=True):
            yield {"pass": ctx.epoch, "rows": rows.tolist(), "drawn": ctx.rng.random()}

    return stream


def by_counting(batches=7):
    """A generator without a context; it counts its passes itself."""
    passes = itertools.count(1)

    def stream():
        number = next(passes)
        for index in range(batches):
            yield {"pass": number, "index": index}

    return stream


def always_the_same(batches=7):
    return lambda: ({"index": index} for index in range(batches))


def lists(batches=7):
    return lambda: [{"index": index} for index in range(batches)]


def together(batches, source="image"):
    return np.concatenate([batch[source] for batch in batches])


def flat(epochs):
    return list(itertools.chain.from_iterable(epochs))
