"""`strategy: {shard: REGEX}`: parts of a module whose weights are divided among the ranks."""

import threading
from copy import deepcopy
from functools import partial

import pytest
import torch
from campaign import thinned
from in_ranks import Failed, all_in_ranks, in_ranks, results_of
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import SGD, AdamW
from torch.utils._pytree import tree_flatten_with_path, tree_map

from emrun import TorchModel
from emrun.base.encoding import decode, digest, encode
from emrun.base.errors import ArgumentError
from emrun.diagnosis.probe import _not_restored
from emrun.models.sharding import Sharding
from emrun.models.weights.init_from import InitFrom
from emrun.models.weights.saving import collect_weights, load_weights
from emrun.ranks.group import Ranks, join
from emrun.ranks.pieces import piece, whole
from emrun.storage.checkpoints.saved_weights import read_saved
from emrun.storage.checkpoints.shards import OF_STATE, Stored, taken_out, whole_of, write_places, write_shard
from emrun.storage.checkpoints.state_file import load_state, save_state
from emrun.storage.checkpoints.weights import FILE


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(4, 5, bias=False)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return {"loss": self.head(x).square().mean((1, 2))}


def tied(net):
    net.head.weight = net.embed.weight


def tied_to_block(net):
    net.blocks[1][0].weight = net.blocks[0][0].weight


def of_two_dtypes(net):
    net.blocks[1][0].double()


def with_scalar(net):
    net.blocks[0].scale = nn.Parameter(torch.tensor(1.0))


def transposed(net):
    net.head.weight.data = torch.empty(4, 5).t()


BLOCKS = {"shard": r"^blocks\.\d+$"}
NOT = "strategy.shard: 'layers' matches none of the parts of Net, embed, blocks.0, "


@pytest.mark.parametrize(
    ("value", "change", "message"),
    [
        ("blocks", None, "strategy: 'blocks' is not a mapping such as"),
        ({}, None, "strategy: {} is not a mapping such as"),
        ({"shards": "blocks"}, None, "strategy.shards: unknown key 'shards'; did you mean 'shard'?; allowed: shard"),
        ({"shard": "layers"}, None, NOT),
        ({"shard": "^$"}, None, "strategy.shard: '^$' matches none of the parts of Net, embed, blocks.0, "),
        ({"shard": r"^blocks$"}, None, "strategy.shard: '^blocks$' matches none of the parts"),  # it has no forward
        ({"shard": ["head", "("]}, None, "strategy.shard[1]: '(' is not a regular expression"),
        (
            BLOCKS,
            tied_to_block,
            "strategy.shard: 'blocks.0.0.weight' (in 'blocks.0') and 'blocks.1.0.weight' (in 'blocks.1') are one "
            "parameter, which cannot be in two shards; match a part that has both, or neither",
        ),
        (
            {"shard": "head"},
            tied,
            "'embed.weight' (in no part that matches) and 'head.weight' (in 'head') are one parameter",
        ),
        (BLOCKS, with_scalar, "'blocks.0.scale' cannot be sharded: it is a scalar; give it the shape (1,)"),
        (BLOCKS, transposed, "'head.weight' cannot be sharded: it is not contiguous"),
        (BLOCKS, of_two_dtypes, "'blocks.1.0.weight' is torch.float64, but 'blocks.1.1.weight' is torch.float32: a "),
    ],
)
def test_what_cannot_be_sharded_is_an_error_in_one_process_too(value, change, message):
    net = Net()
    if change is not None:
        change(net)
    with pytest.raises(ArgumentError) as error:
        Sharding(net, value, Ranks())
    assert message in str(error.value)


def test_a_module_without_parameters_is_an_error():
    with pytest.raises(ArgumentError, match="Sequential has no parameters to shard; remove strategy"):
        Sharding(nn.Sequential(nn.ReLU()), {"shard": "0"}, Ranks())


def test_a_torch_that_cannot_sum_the_gradients_of_shards_is_an_error(monkeypatch):
    monkeypatch.delattr(FSDPModule, "set_force_sum_reduction_for_comms")
    with pytest.raises(ArgumentError, match=r"strategy.shard: torch \S+ cannot sum the gradients of shards; install a"):
        Sharding(Net(), BLOCKS, Ranks(size=2))


def test_weights_that_are_tied_in_one_shard_are_allowed():
    net = Net()
    tied(net)
    Sharding(net, BLOCKS, Ranks())


def test_in_one_process_a_module_can_be_copied_without_what_belongs_to_the_training():
    net = Net()
    Sharding(net, BLOCKS, Ranks(), partial(lambda lock: False, threading.Lock()))
    assert deepcopy(net)(torch.arange(4).view(2, 2))["loss"].shape == (2,)


def loss_of_weights(module):
    return module.head.weight.square().sum()


class OwnStep(TorchModel):
    def train_step(self, inputs):
        raise AssertionError


class OwnFiles(TorchModel):
    def save(self, directory):
        raise AssertionError


class WithModes(SGD):
    def train(self): ...

    def eval(self): ...


class Muons:
    """The form of an optimizer of the parameters that match."""

    def __init__(self, match):
        self.options = {"match": match}

    def __call__(self, parameters):
        return torch.optim.Muon(parameters)


class Pictures(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 1, 1))


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2, 2), nn.BatchNorm1d(2))


@pytest.mark.parametrize(
    ("kind", "module", "arguments", "message"),
    [
        (TorchModel, Net, {"micro_batch_size": 2}, "strategy: cannot be used with micro_batch_size"),
        (TorchModel, Net, {"compile": {"backend": "eager"}}, "strategy: cannot be used with compile yet"),
        (TorchModel, Pictures, {"memory_format": "channels_last"}, "strategy: cannot be used with memory_format yet"),
        (
            TorchModel,
            Net,
            {"loss": {"one": lambda: loss_of_weights}},
            "with a loss that gets the module (loss.one) yet",
        ),
        (
            TorchModel,
            Net,
            {"optimizer": WithModes},
            "strategy: cannot be used with WithModes, which has other",
        ),
        pytest.param(
            TorchModel,
            Net,
            {"optimizer": Muons("blocks.*weight")},
            "strategy: cannot be used with Muon, which needs whole",
            marks=pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon"),
        ),
        (OwnFiles, Net, {}, "strategy: cannot be used with a save or a load of OwnFiles yet; remove one of them"),
        (OwnStep, Net, {}, "strategy: cannot be used with a train_step or an update of OwnStep yet"),
        (
            TorchModel,
            Normed,
            {},
            "strategy: 1 (BatchNorm) needs the statistics of all ranks; set model.sync_batch_norm",
        ),
    ],
)
def test_what_does_not_work_with_shards_yet_is_refused_by_name(kind, module, arguments, message):
    with pytest.raises(ArgumentError) as error:
        kind(module(), **{"optimizer": SGD, "device": "cpu", "strategy": {"shard": "0|blocks"}, **arguments})
    assert message in str(error.value)


@pytest.fixture(scope="module")
def place_of_tied(tmp_path_factory):
    return tmp_path_factory.mktemp("tied")


@pytest.fixture(scope="module")
def of_two(place_of_tied):
    """Return what two ranks find: tied weights in files, and the losses of forwards, also of one rank alone."""
    calls = {
        "saved": lambda: saved_and_loaded(place_of_tied),
        "together": lambda: one_forward(False),
        "alone": lambda: one_forward(True),
    }
    return all_in_ranks(2, calls, failing=["alone"])


def saved_and_loaded(place):
    """Save a module with tied weights, and load it in two ways; return all three, and what is tied in the file."""
    ranks = join()
    nets = [Net(), Net(), Net()]
    for net in nets:
        tied(net)
        Sharding(net, BLOCKS, ranks)
    weights, same = collect_weights(nets[0], copied=True)
    shards = ranks.gathered("shards", write_shard({FILE: (weights, same)}, ranks.rank, place))
    if ranks.is_first:
        write_places(place, shards)
    ranks.all_gathered("end", None)
    load_weights(nets[1], place)
    read, rows = [], Stored._rows
    Stored._rows = lambda *arguments: (read.append(found := rows(*arguments)), found)[1]
    InitFrom.read(place).load(nets[2], {})
    assert sum(each.numel() for each in read) == sum(piece(each).numel() for each in nets[2].parameters())
    return [{name: whole(each) for name, each in net.state_dict().items()} for net in nets], same


def test_tied_weights_are_saved_once_and_loaded(of_two, place_of_tied):
    found = of_two["saved"]
    for (saved, loaded, begun), _ in found:
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
        torch.testing.assert_close(begun, saved, rtol=0, atol=0)
    assert found[0][1] == {"head.weight": "embed.weight"}
    assert "head.weight" not in load_file(place_of_tied / "model-0.safetensors")


def one_forward(is_alone):
    """Return the loss on this rank, with weights that were drawn on each rank, and what rank 0 gets alone."""
    ranks = join()
    torch.manual_seed(ranks.rank)
    net = Net()
    Sharding(net, BLOCKS, ranks, lambda: is_alone)
    rows = torch.arange(4).view(2, 2)
    return net(rows)["loss"].tolist()


def test_all_ranks_have_the_weights_of_the_first(of_two):
    one, other = of_two["together"]
    torch.manual_seed(0)
    assert one == other == pytest.approx(Net()(torch.arange(4).view(2, 2))["loss"].tolist())


def test_a_forward_of_one_rank_alone_is_an_error_before_it_waits_for_the_others(of_two):
    for each in of_two["alone"]:
        assert isinstance(each, Failed)
        assert each.kind == "RuntimeError"
        assert "give the hook `every_rank = True`" in each.message


def saved_again(place, source):
    """Save a model that has made some updates, or has loaded what another number of ranks saved."""
    ranks = join()
    torch.manual_seed(1)
    strategy = BLOCKS if ranks.several else None
    model = TorchModel(Net(), optimizer=AdamW, device="cpu", strategy=strategy)
    if source is None:
        for rows in (torch.arange(4).view(2, 2), torch.arange(2, 5).view(1, 3)):
            model.run({"x": rows}, True, "train")
    else:
        model.load(source)
        model.load_state_dict(decode(load_state(source)["model"]))
    rows = {}
    state = {"model": taken_out(encode(model.state_dict(), "model", copied=True), rows)}
    write = model.stage()
    if not ranks.several:
        write(place)
        save_state(state, place)
        return
    shards = ranks.gathered("shards", [write(place), write_shard({OF_STATE: (rows, {})}, ranks.rank, place)])
    if ranks.is_first:
        save_state(state, place)
        write_places(place, [each for of_rank in shards for each in of_rank])


def changed_since(place):
    """Return what a rank finds changed in a model that has loaded a checkpoint: at first, and after changes."""
    join()
    model = TorchModel(Net(), optimizer=AdamW, device="cpu", strategy=BLOCKS)
    model.load(place)
    model.load_state_dict(decode(load_state(place)["model"]))
    before = _not_restored(model, place)
    piece(model.module.head.weight)[:1] += 1e-7  # on the ranks that have a row
    piece(model.optimizer.state[model.module.embed.weight]["exp_avg"])[:1] += 1e-7
    return before, _not_restored(model, place)


def flat(value):
    return dict(tree_flatten_with_path(tree_map(whole_of, value))[0])


@pytest.mark.parametrize("sizes", thinned([[3, 1], [2, 3, 1]], [[3, 1]]))  # the one before the last has 3
def test_weights_and_the_states_of_optimizers_pass_through_any_number_of_ranks(tmp_path, sizes):
    places = [tmp_path / str(number) for number in range(1 + len(sizes))]
    for place in places:
        place.mkdir()
    saved_again(places[0], None)
    for place, source, size in zip(places[1:], places, sizes, strict=False):
        in_ranks(size, saved_again, place, source) if size > 1 else saved_again(place, source)
    expected, states = read_saved(places[0]).tensors, flat(load_state(places[0])["model"])
    assert any("exp_avg" in str(path) for path in states)
    for place in places[1:]:
        found, of_place = tree_map(whole_of, dict(read_saved(place).tensors)), flat(load_state(place)["model"])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], each) for name, each in expected.items())
        assert of_place.keys() == states.keys()
        assert digest([*of_place.values()]) == digest([*states.values()])
    assert [(place / "shards.json").exists() for place in places[1:]] == [size > 1 for size in sizes]
    own = [load_file(places[-2] / f"state-{rank}.safetensors") for rank in range(3)]
    names = [{name.rpartition("[")[2] for name in each} for each in own]
    assert names == [{"'exp_avg']", "'exp_avg_sq']"}] * 3
    assert (places[-1] / FILE).read_bytes() == (places[0] / FILE).read_bytes()  # one process again
    changes = ["['head.weight']", "['state']['state'][0]['exp_avg']"]  # embed.weight is the first parameter
    assert in_ranks(2, changed_since, places[-2]) == [([], changes)] * 2


class Changing(Net):
    """Has another parameter in its second forward pass: added, or put in place of one, by itself or between two."""

    def __init__(self, how):
        super().__init__()
        self.how, self.passes = how, 0

    def forward(self, x):
        self.passes += 1
        if self.passes == 2 and self.how == "adds":
            self.blocks[1][0].scale = nn.Parameter(torch.ones(1))
        if self.passes == 2 and self.how == "replaces":
            self.head.weight = nn.Parameter(torch.ones(5, 4))
        return super().forward(x)


def three_passes(how):
    net = Changing(how)
    Sharding(net, BLOCKS, join())
    for number in range(3):
        if number == 1 and how == "between":
            net.blocks[0] = Net().blocks[0]
        net(torch.arange(4).view(2, 2))["loss"].sum().backward()
    return net.passes


@pytest.mark.parametrize(
    ("how", "name"),
    thinned(
        [("adds", "blocks.1.0.scale"), ("replaces", "head.weight"), ("between", "blocks.0.0.weight")],
        [("replaces", "head.weight")],
    ),
)
def test_a_parameter_that_is_added_or_replaced_later_is_an_error_with_its_name(how, name):
    for each in results_of(2, three_passes, how):
        assert each.kind == "RuntimeError"
        assert each.message.startswith(f"{name!r} is a new parameter, which the module or a hook has added or put in")
