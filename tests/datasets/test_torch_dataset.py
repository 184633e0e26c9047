"""TorchDataset: map-style and iterable datasets, samplers and data loaders of torch, read like any other stream."""

import itertools
import random
import sys

import numpy as np
import pytest
import torch
from campaign import thinned
from doubles import stream_of, wrapped
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from emrun.base.errors import ArgumentError, StreamError
from emrun.config.import_finder import locate
from emrun.datasets import TorchDataset
from emrun.ranks.group import Ranks
from emrun.stream_context import StreamContext
from emrun.streams.stream import StreamPosition

COUNT = 11
hugging_face = locate("datasets")  # the library, not the folder of this repository
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it


@pytest.fixture(autouse=True)
def workers_end_soon(monkeypatch):
    """A loader that is left in the middle of a pass waits this long for each of its workers, then terminates it."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)


class Points(Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        if index >= COUNT:
            raise IndexError(index)
        return np.float32([index, -index]), index


class Named(Points):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"x": x, "y": y}


class Together(Points):
    def __getitems__(self, indices):
        return [(np.float32([index, -index]), index) for index in indices]

    def __getitem__(self, index):
        raise NotImplementedError


class Drawn(IterableDataset):
    """Draws its order when a pass begins."""

    def __iter__(self):
        order = torch.randperm(COUNT).tolist()
        yield from (Points()[index] for index in order)


class ByEpoch(IterableDataset):
    """Its order depends on the number of the pass alone."""

    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return COUNT

    def __iter__(self):
        yield from (Points()[index] for index in np.random.default_rng(self.epoch).permutation(COUNT).tolist())


class Endless(IterableDataset):
    """Goes on with where the pass before ended, by its state."""

    def __init__(self):
        self.position = 0
        self.began = []

    def __iter__(self):
        self.began.append(self.position)
        while True:
            self.position += 1
            yield Points()[self.position**2 % COUNT]
            if self.position % COUNT == 0:
                return

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Buffered(ByEpoch):
    """Shuffles in a buffer, which its state lacks."""

    position = 0

    def __iter__(self):
        rng, buffer = random.Random(self.epoch), []
        for index in range(self.position % COUNT, COUNT):
            self.position = index + 1
            buffer.append(index)
            if len(buffer) == 5:
                yield Points()[buffer.pop(rng.randrange(5))]
        yield from (Points()[index] for index in buffer)

    state_dict, load_state_dict = Endless.state_dict, Endless.load_state_dict


def streamed(of="shuffled"):
    """A dataset of Hugging Face in shards, shuffled in a buffer, or of which every second row is."""
    data = hugging_face.Dataset.from_dict({"y": list(range(COUNT))}).to_iterable_dataset(num_shards=2)
    shuffled = data.shuffle(seed=3, buffer_size=4)
    both = [data.map(lambda row: {"y": -row["y"]}), shuffled.filter(lambda row: row["y"] != 5)]
    return {"plain": data, "shuffled": shuffled, "interleaved": hugging_face.interleave_datasets(both)}[of]


class Shuffled:
    """A sampler without a generator of its own."""

    def __len__(self):
        return COUNT

    def __iter__(self):
        order = list(range(COUNT))
        random.shuffle(order)
        np.random.shuffle(order[:5])
        return iter([order[place] for place in torch.randperm(COUNT)])


def loader(kind=DataLoader, **arguments):
    return kind(Points(), **{"batch_size": 3, "shuffle": True, **arguments})


FOUND = {
    "map-style": lambda: {"train": Points()},
    "with names": lambda: {"train": Named(), "sources": None},
    "read together": lambda: {"train": Together()},
    "tensors": lambda: {"train": TensorDataset(torch.arange(22.0).reshape(11, 2), torch.arange(11))},
    "a list": lambda: {"train": [Points()[index] for index in range(COUNT)]},
    "weighted": lambda: {"train": Points(), "sampler": WeightedRandomSampler([0.1] * 5 + [1.0] * 6, 9)},
    "random": lambda: {"train": Points(), "sampler": RandomSampler(range(COUNT))},
    "sampler of its own": lambda: {"train": Points(), "sampler": Shuffled()},
    "by epoch": lambda: {"train": ByEpoch()},
    "loader": lambda: {"train": loader()},
    "loader with workers": lambda: {"train": loader(num_workers=2)},
    "loader of weighted": lambda: {
        "train": loader(shuffle=False, sampler=WeightedRandomSampler([0.1] * 5 + [1.0] * 6, 9))
    },
    "stateful loader": lambda: {"train": loader(StatefulDataLoader)},
    "stateful loader with workers": lambda: {"train": loader(StatefulDataLoader, num_workers=2)},
}


def make(train, **arguments):
    return TorchDataset(train, **{"sources": ["x", "y"], "batch_size": 3, **arguments})


def together(batches, source="y"):
    return torch.cat([batch[source] for batch in batches]).tolist()


TELLING = ["map-style", "weighted", "sampler of its own", "loader with workers", "stateful loader"]
LEAVES_PASSES = [kind for kind in FOUND if kind != "stateful loader with workers"]  # which wait 5 s each to be left


@pytest.mark.parametrize(
    "kind", thinned(LEAVES_PASSES, ["map-style", "sampler of its own", "loader", "stateful loader"])
)
def test_a_training_stream_is_the_same_however_it_is_read(kind, check_training_stream):
    seeded = kind != "by epoch"

    def build():
        torch.manual_seed(random.SystemRandom().randrange(2**60))  # which must make no difference
        random.seed()
        np.random.seed()
        return make(**FOUND[kind]())

    stops = (2, 5) if "workers" in kind else ()  # in the first pass and in the second: each start forks processes
    check_training_stream(build, shuffles=seeded, pickles="loader" not in kind, stops=stops)


def test_workers_that_persist_read_the_second_pass_like_workers_that_begin_with_it(passes, bits):
    def build():
        return make(loader(num_workers=1, persistent_workers=True))

    straight = passes(build(), "train", 2)
    resumed = wrapped(build().train_stream, name="train")
    resumed.seek(StreamPosition(2, 0))
    with resumed:
        assert bits(resumed) == bits(straight[1])


@pytest.mark.parametrize("kind", thinned(FOUND, [*TELLING, "read together", "by epoch", "with names"]))
def test_every_kind_reads_batches_with_names(kind, passes):
    arguments = FOUND[kind]()
    dataset = make(**arguments)
    for batches in passes(dataset, "train", 2):
        assert len(batches) == dataset.num_batches["train"]
        assert [list(batch) for batch in batches] == [["x", "y"]] * len(batches)
        assert all(len(batch["y"]) == 3 for batch in batches[:-1])
        assert {batch["y"].dtype for batch in batches} == {torch.int64}
        assert {batch["x"].dtype for batch in batches} == {torch.float32}
        if "weighted" not in kind:
            assert sorted(together(batches)) == list(range(COUNT))


@pytest.mark.parametrize("kind", ["map-style", "read together", "weighted", "sampler of its own"])
def test_evaluations_are_in_the_order_of_the_dataset(kind, passes):
    dataset = make(**FOUND[kind](), valid=Points())
    for batches in (*passes(dataset, "train", 2, training=False), *passes(dataset, "valid", 2)):
        assert together(batches) == list(range(COUNT))


def test_a_weighted_sampler_prefers_the_heavy(passes):
    dataset = make(Points(), sampler=WeightedRandomSampler([0.01] * 5 + [1.0] * 6, 1000))
    found = together(passes(dataset, "train")[0])
    assert len(found) == 1000
    assert np.mean(np.array(found) >= 5) > 0.98


@pytest.mark.parametrize("kind", ["map-style", "weighted", "sampler of its own", "loader", "stateful loader"])
def test_reading_leaves_the_global_random_states_alone(kind, passes):
    dataset = make(**FOUND[kind]())
    before = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
    passes(dataset, "train", 2)
    assert (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()) == before


@pytest.mark.parametrize("kind", thinned(FOUND, ["weighted", "sampler of its own", "stateful loader"]))
def test_an_evaluation_between_passes_does_not_change_the_next(kind, passes, bits):
    dataset, other = make(**FOUND[kind]()), make(**FOUND[kind]())
    straight = passes(other, "train", 1)
    passes(dataset, "train", training=False)
    assert bits(passes(dataset, "train")[0]) == bits(straight[0])


def test_a_loader_with_workers_in_a_worker_is_reported_with_the_key_to_change():
    stream = wrapped(make(loader(num_workers=2)).train_stream, name="train", workers=1, start_method="fork")
    with (
        stream,
        pytest.raises(StreamError, match=r"'train' starts processes, .* num_workers, .* main_loop.workers=0") as found,
    ):
        next(iter(stream))
    assert found.value.exit_status == 2


def test_an_iterable_dataset_with_a_state_is_resumed_from_the_state(check_training_stream, passes):
    check_training_stream(lambda: make(Endless()), shuffles=False, pickles=False)


@pytest.mark.parametrize(
    ("kind", "of"),
    thinned(
        itertools.product((None, StatefulDataLoader), ("plain", "shuffled", "interleaved")),
        [(None, "interleaved")],
    ),
)
def test_a_streamed_dataset_of_hugging_face_loses_no_row_in_a_resume(of, kind, check_training_stream):
    def build():
        return make(streamed(of) if kind is None else kind(streamed(of), batch_size=3), sources=None)

    check_training_stream(build, shuffles=False, pickles=False)


def test_a_state_that_does_not_lead_to_the_position_is_not_used(check_training_stream, passes, bits):
    check_training_stream(lambda: make(Buffered()), shuffles=False, pickles=False)
    straight = bits(passes(make(Buffered()), "train")[0])
    state = None
    for stop in range(len(straight)):  # interrupted again and again
        stream = wrapped(make(Buffered()).train_stream, name="train")
        if state is not None:
            stream.load_state_dict(state)
            assert stream.restore()
        assert bits([next(iter(stream))]) == [straight[stop]]
        state = stream.state_dict()


def test_an_iterable_dataset_with_a_state_is_not_read_again(passes):
    before = wrapped(make(Endless()).train_stream, name="train")
    epoch = iter(before)
    next(epoch), next(epoch)
    data = Endless()
    after = wrapped(make(data).train_stream, name="train")
    after.load_state_dict(before.state_dict())
    assert after.restore()
    assert data.began == [3]  # behind the first batch: the second is made again, and compared
    assert together([next(iter(after))]) == together([next(epoch)])


@pytest.mark.parametrize("workers", thinned([0, 2], [0]))
def test_a_stateful_loader_is_not_read_again(workers):
    class Counted(Points):
        read = torch.zeros(COUNT, dtype=torch.int64).share_memory_()

        def __getitem__(self, index):
            self.read[index] += 1
            return super().__getitem__(index)

    def build():
        return make(StatefulDataLoader(Counted(), batch_size=1, shuffle=True, num_workers=workers))

    before = wrapped(build().train_stream, name="train")
    epoch = iter(before)
    found = [next(epoch) for _ in range(9)]
    Counted.read.zero_()
    after = wrapped(build().train_stream, name="train")
    after.load_state_dict(before.state_dict())
    assert after.restore()
    assert not Counted.read[together(found[:8])].any()  # only the last is made again, to be compared
    assert workers or Counted.read.sum().item() == 1  # processes read ahead, those of the first loader too
    assert sorted(together(found)) != together(found)
    assert together(after) == together(epoch)


def test_a_dataset_that_draws_when_a_pass_begins_is_replayed(passes):
    dataset = make(Drawn())
    for batches in passes(dataset, "train", 2):
        assert sorted(together(batches)) == list(range(COUNT))
    assert dataset.num_batches == {}


def test_set_epoch_gets_the_number_of_the_pass(passes):
    data = ByEpoch()
    for training, epochs in ((True, [1, 2]), (False, [0, 0])):
        found = passes(make(data), "train", 2, training=training)
        orders = [np.random.default_rng(epoch).permutation(COUNT).tolist() for epoch in epochs]
        assert [together(batches) for batches in found] == orders


INSIDE = {
    "subset": lambda data: Subset(ConcatDataset([data, Points()]), range(COUNT)),
    "stack": lambda data: StackDataset(each=data),
    "chain": lambda data: ChainDataset([data, Drawn()]),
}


@pytest.mark.parametrize("kind", INSIDE)
def test_set_epoch_reaches_the_dataset_that_another_is_made_of(kind, passes):
    class Told(ByEpoch if kind == "chain" else Points):
        def set_epoch(self, epoch):
            self.epoch = epoch
            told.append(epoch)

    told = []
    whole = INSIDE[kind](Told())
    passes(make(whole, sources=None, collate=lambda items: {"x": np.arange(len(items))}), "train", 2)
    assert told == [1, 2]
    with pytest.raises(ArgumentError, match="such workers do not see what set_epoch of Told sets"):
        make(DataLoader(whole, num_workers=1, persistent_workers=True))


class SharedEpoch(Buffered):
    def __init__(self):
        self.shared = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def epoch(self):
        return self.shared.item()

    def set_epoch(self, epoch):
        self.shared.fill_(epoch)


SHARED = [SharedEpoch, lambda: streamed().map(lambda row: {"x": 0, **row})]


@pytest.mark.parametrize("dataset", thinned(SHARED, [SharedEpoch]))
def test_workers_that_persist_see_an_epoch_in_shared_memory(dataset, passes):
    def orders(persistent):
        data = DataLoader(dataset(), batch_size=3, num_workers=1, persistent_workers=persistent)
        named = isinstance(data.dataset, Buffered)
        return [together(each) for each in passes(make(data, sources=["x", "y"] if named else None), "train", 2)]

    found = orders(True)
    assert found == orders(False)
    assert found[0] != found[1]


def test_workers_that_persist_with_an_epoch_that_they_do_not_see_are_refused():
    for data in (ByEpoch(), Buffered()):
        persisting = DataLoader(data, num_workers=1, persistent_workers=True)
        with pytest.raises(ArgumentError, match=r"train: its DataLoader has persistent_workers=True, .* of B\w+ sets"):
            make(persisting)
        assert make(Points(), valid=persisting).num_batches["train"] == 4  # evaluations have one epoch


def test_single_values_have_one_source(passes):
    dataset = TorchDataset(torch.arange(5.0), sources=["x"], batch_size=5)
    assert passes(dataset, "train", training=False)[0][0]["x"].tolist() == [0, 1, 2, 3, 4]


def test_collate_makes_the_batch(passes):
    dataset = TorchDataset(Points(), batch_size=4, collate=lambda items: {"sum": [sum(x) + y for x, y in items]})
    assert passes(dataset, "train", training=False)[0][0] == {"sum": [0, 1, 2, 3]}


def test_a_failing_item_is_named(passes):
    class Broken(Points):
        def __getitem__(self, index):
            if index == 7:
                raise RuntimeError("broken")
            return super().__getitem__(index)

    with pytest.raises(RuntimeError) as caught:
        passes(make(Broken()), "train")
    assert "while reading item 7 of Broken" in caught.value.__notes__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sources": None}, "stream 'train': its batches are of type list, with 2 fields; set `sources` to their"),
        ({"sources": ["x"]}, "stream 'train': its batches are of type list, with 2 fields; set `sources` to"),
        (
            {"train": Named(), "sources": ["x", "yy"]},
            "stream 'train': its batches have no source 'yy'; did you mean 'y'? (it has x, y)",
        ),
        (
            {"train": torch.arange(3), "sources": None},
            "stream 'train': its batches are of type Tensor, with 1 field",
        ),
        ({"sampler": [0, 11]}, "stream 'train': its sampler gave 11, which is not an index from 0 to 10"),
        ({"sampler": [0, -1]}, "stream 'train': its sampler gave -1, which is not an index from 0 to 10"),
        ({"sampler": [[0, 1]]}, "stream 'train': its sampler gave [0, 1], which is not an index"),
        ({"sampler": [torch.tensor(0.5)]}, "stream 'train': its sampler gave tensor(0.5000), which is not an index"),
    ],
)
def test_what_the_first_batch_shows_is_a_stream_error(passes, arguments, message):
    with pytest.raises(StreamError) as caught:
        passes(make(**{"train": Points(), **arguments}), "train")
    assert str(caught.value).startswith(message)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": None}, "train: NoneType is neither a map-style dataset (__getitem__ and __len__), nor an iterable"),
        ({"train": "data"}, "train: str is neither"),
        ({"train": {"a": 1}}, "train: dict is neither"),
        ({"train": iter([1])}, "train: list_iterator is neither a map-style dataset "),
        ({"train": []}, "train: contains no examples"),
        ({"valid": 3}, "valid: int is neither"),
        ({"batch_size": 0}, "batch_size: 0 is not a whole number of at least 1"),
        ({"sources": "x"}, "sources: 'x' is not a list of names"),
        ({"collate": "mine"}, "collate: str is not a function; write {import: NAME}"),
        ({"sampler": 3}, "sampler: int is not iterable: it has no __iter__"),
        ({"train": Drawn(), "sampler": [1]}, "sampler: a sampler needs a map-style dataset, and train is not one"),
        ({"train": loader(), "sampler": [1]}, "sampler: a sampler needs a map-style dataset, and train is not one"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, message):
    with pytest.raises(ArgumentError) as caught:
        TorchDataset(**{"train": Points(), **arguments})
    assert str(caught.value).startswith(message)


def test_the_yaml_in_its_docstring_trains(tmp_path, monkeypatch, train_docstring):
    (tmp_path / "my_data.py").write_text(
        "import numpy as np\n"
        "class Points:\n"
        "    def __init__(self, count):\n"
        "        self.x = np.random.default_rng(count).normal(size=(count, 2)).astype(np.float32)\n"
        "    def __len__(self):\n"
        "        return len(self.x)\n"
        "    def __getitem__(self, index):\n"
        "        return self.x[index], int(self.x[index].sum() > 0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_data", raising=False)  # that of a sample config
    last = train_docstring(TorchDataset, "x", "label", 2, 2, epochs=5)[-1]
    assert last["valid"]["accuracy"]["mean"] > 0.8


def test_names_of_classes_as_the_datasets_of_torchvision_have_them():
    class WithClasses(Points):
        classes = ("cat", "dog")

    assert TorchDataset(WithClasses(), sources=["x", "y"]).classes_names() == ["cat", "dog"]
    WithClasses.classes = 2
    assert TorchDataset(WithClasses(), sources=["x", "y"]).classes_names() == []
    assert TorchDataset(Points(), sources=["x", "y"]).classes_names() == []


def test_sources_choose_among_the_keys_of_mappings(passes):
    assert [list(batch) for batch in passes(make(Named(), sources=["y"]), "train")[0]] == [["y"]] * 4


def test_names_of_a_class_label_are_names():
    features = hugging_face.Features({"x": hugging_face.Value("int64"), "y": hugging_face.ClassLabel(names=["a", "b"])})
    rows = hugging_face.Dataset.from_dict({"x": [1, 2], "y": [0, 1]}, features=features)
    assert TorchDataset(rows).classes_names() == {"y": ["a", "b"]}
    assert TorchDataset(rows, sources=["x"]).classes_names() == {}


class Noisy(Points):
    """Its items draw from one global generator, those of some rows only."""

    draws = staticmethod(torch.rand)
    rows = range(COUNT)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + self.draws(1).item() if index in self.rows else x, y


class OfNumpy(Noisy):
    draws = staticmethod(np.random.rand)


class OfPython(Noisy):
    @staticmethod
    def draws(count):
        return np.float64(random.random())


class OfSome(Noisy):
    rows = range(0, COUNT, 2)


class OfBatches(Points):
    def __getitems__(self, indices):
        noise = torch.rand(len(indices)).tolist()
        return [(np.float32([index, each]), index) for index, each in zip(indices, noise, strict=True)]


def noisy_batch(items):
    x, y = torch.utils.data.default_collate(items)
    return x + torch.rand(1), y


NOISY = {
    "torch": lambda: make(Noisy()),
    "numpy": lambda: make(OfNumpy()),
    "python": lambda: make(OfPython()),
    "some": lambda: make(OfSome()),
    "together": lambda: make(OfBatches()),
    "collate": lambda: make(Points(), collate=noisy_batch),
    "sampler": lambda: make(Noisy(), sampler=WeightedRandomSampler([0.1] * 5 + [1.0] * 6, 9)),
}
OF_TORCH = [kind for kind in NOISY if kind not in ("numpy", "python")]


@pytest.mark.parametrize("kind", thinned(OF_TORCH, OF_TORCH[::2]))
def test_items_that_draw_are_the_same_however_a_training_stream_is_read(kind, check_training_stream):
    check_training_stream(NOISY[kind])


def read(dataset, workers=0, **options):
    """Return the batches of a pass, as that many workers make them, and leave the global generators as they were."""
    contexts = [
        StreamContext("train", seed=3, epoch=2, worker=worker, workers=workers, **options)
        for worker in range(max(1, workers))
    ]
    streams = [dataset.train_stream(context) for context in contexts]
    batches = [batch for turn in itertools.zip_longest(*map(list, streams)) for batch in turn if batch is not None]
    return {row: x for batch in batches for x, row in zip(batch["x"].tolist(), batch["y"].tolist(), strict=True)}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", NOISY)
def test_items_that_draw_are_the_same_in_workers(kind, workers):
    torch.manual_seed(workers)  # which must make no difference
    np.random.seed(workers)
    random.seed(workers)
    assert read(NOISY[kind](), workers) == read(NOISY[kind]())


@pytest.mark.parametrize(
    ("kind", "read_by"), [("torch", "loop"), ("torch", "thread"), ("numpy", "loop"), ("some", "loop")]
)
def test_an_item_is_that_of_its_seed(kind, read_by):
    dataset = NOISY[kind]()
    found = read(dataset, read_by=read_by)
    context = StreamContext("train", seed=3, epoch=2)
    data = dataset._data["train"]
    for row in range(COUNT):
        seed = context.seed_for(row)
        torch.manual_seed(seed % 2**63)
        np.random.seed(seed % 2**32)
        assert found[row] == data[row][0].tolist()


@pytest.mark.parametrize("kind", ["torch", "some", "together"])
def test_items_that_draw_are_the_same_on_two_ranks(kind):
    parts = [read(NOISY[kind](), ranks=Ranks(rank, 2)) for rank in range(2)]
    whole = read(NOISY[kind]())
    assert {row for part in parts for row in part} == set(range(COUNT))
    if kind != "together":
        assert parts[0] | parts[1] == whole


def test_a_resume_with_a_buffer_is_exact_though_items_draw():
    before, after = (stream_of(make(Noisy()), "train", buffer=2) for _ in range(2))
    with before, after:
        batches = iter(before)
        next(batches)
        next(batches)
        after.load_state_dict(before.state_dict())
        assert after.restore()
        assert next(iter(after))["x"].tolist() == next(batches)["x"].tolist()


@pytest.mark.parametrize("kind", ["numpy", "python"])
def test_a_thread_refuses_items_that_draw_from_what_it_shares(kind):
    message = rf"change the global random numbers of {kind}, .*main_loop.workers: 1"
    with pytest.raises(StreamError, match=message) as found:
        read(NOISY[kind](), read_by="thread")
    assert found.value.exit_status == 2


@pytest.mark.parametrize("kind", ["map-style", "read together", "tensors", "weighted"])
def test_items_that_draw_nothing_are_not_seeded(kind, monkeypatch):
    def no(*arguments):
        raise AssertionError

    monkeypatch.setattr("emrun.datasets.torch_dataset.seed_generators", no)
    monkeypatch.setattr(StreamContext, "seed_for", no)
    read(make(**FOUND[kind]()))
    with pytest.raises(AssertionError):
        read(make(Noisy()))
