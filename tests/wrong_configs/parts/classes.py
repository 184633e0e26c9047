"""What wrong configs name; there is nothing wrong with most of it."""

import functools
from collections.abc import Sequence

from emrun import AbstractHook, TorchModel

THREE = 3


class Numbers:
    """A dataset."""

    def __init__(self, count: int, sizes: Sequence[int] = ()):
        self.count, self.sizes = count, sizes

    def train_stream(self):
        yield {"x": [[0.0] * 11] * self.count, "y": [0.0] * self.count}

    @classmethod
    def small(cls):
        return cls(2)


class Asks(Numbers):
    """A dataset that takes the model."""

    def __init__(self, model):
        super().__init__(2)


class Tokens(Numbers):
    """A dataset with a tokenizer by the name of its model."""

    def __init__(self, model: str = "bert"):
        super().__init__(2)


def passes_on(function):
    """Decorate a function so that only calling it tells what it takes."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Wrapped(Numbers):
    @passes_on
    def __init__(self, count: int, sizes: Sequence[int] = ()):
        super().__init__(count, sizes)


class Chooses(AbstractHook):
    def __init__(self, limit=0, **kwargs):
        self.limit = limit + kwargs.pop("more", 0)
        super().__init__(**kwargs)


class Configured:
    """A dataset as emloop's were."""

    def _configure_dataset(self, output_dir, count=3):
        self.count = count

    def train_stream(self):
        yield {"x": [[0.0] * 11] * self.count, "y": [0.0] * self.count}


class Count:
    def __init__(self, start: int = 0):
        self.start = start


class Loss:
    def __call__(self, logit, y):
        return (logit.flatten() - y).square()


class LossOf(Loss):
    """A loss for the data of a name."""

    def __init__(self, dataset: str | None = None):
        self.of = dataset


@functools.lru_cache
def Decorated(count):
    return Numbers(count)


class Dynamic:
    """A dataset whose streams are made when it is built."""

    def __init__(self):
        self.__dict__["train_stream"] = lambda: [{"x": [[0.0] * 11], "y": [0.0]}]


class Misspelt(AbstractHook):
    def after_bach(self):
        pass


class WrongParameter(AbstractHook):
    def after_epoch(self, epoch):
        pass


class Median:
    """A metric of whole streams."""

    def update(self, logit):
        self.logit = logit

    def compute(self):
        return float(self.logit.median())

    def reset(self):
        self.logit = None


class OthersEvent(AbstractHook):
    """Has a method that another tool calls."""

    def on_epoch_end(self):
        pass


class OthersModel(TorchModel):
    """Has a method that another tool calls."""

    def configure_optimizers(self):
        pass
