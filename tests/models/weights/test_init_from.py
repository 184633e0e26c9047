"""`init_from`: a new run begins with other weights, and a table says what was loaded and what was not."""

import json
import logging

import pytest
import torch
from doubles import Affine, Streams
from safetensors.torch import save_file
from torch import nn

from emrun import MainLoop, TorchModel
from emrun.base.errors import ArgumentError
from emrun.models.weights.init_from import InitFrom


def net(head=2, **arguments):
    torch.manual_seed(head)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, head, **arguments))


def saved(module, path):
    """Write the weights of a module to a safetensors file."""
    save_file({name: each.contiguous() for name, each in module.state_dict().items()}, path)
    return str(path)


@pytest.fixture
def path(tmp_path):
    """A safetensors file with weights of `net(2)`."""
    return saved(net(), tmp_path / "net.safetensors")


def load(module, init_from):
    """Load; return what -> (tensors, values, which)."""
    rows = InitFrom.read(init_from).load(module, {})["rows"]
    return {each["what"]: (each["tensors"], each["values"], each["which"]) for each in rows}


def refused(module, init_from):
    """Return the error of loading, after which the module is as before."""
    before = {name: each.clone() for name, each in module.state_dict().items()}
    with pytest.raises(ArgumentError) as caught:
        load(module, init_from)
    assert all(torch.equal(each, before[name]) for name, each in module.state_dict().items())
    return str(caught.value)


def equal(one, other, *names):
    states = one.state_dict(), other.state_dict()
    return all(torch.equal(*(state[name] for state in states)) for name in names or states[0])


def test_all_weights_and_buffers_are_loaded(path):
    module = net(2)
    nn.init.ones_(module[0].weight)
    assert load(module, path) == {"loaded": (9, 43, "0.weight, 0.bias, 1.weight, 1.bias, +5")}
    assert equal(module, net())


def test_another_head_is_an_error_that_says_how_to_skip_it(path):
    message = refused(net(5), path)
    assert message == (
        f"init_from: {path} does not fit Sequential: another shape: 2.weight is (2, 4) in the file, (5, 4) in the "
        "module, 2.bias is (2,) in the file, (5,) in the module; to load only what fits, set on_mismatch: skip"
    )


def test_another_head_can_be_skipped(path):
    module = net(5)
    table = load(module, {"path": path, "on_mismatch": "skip"})
    assert table["loaded"][:2] == (7, 33)
    assert table["not loaded: another shape"][:2] == (2, 25)
    assert equal(module, net(), "0.weight", "1.running_mean")
    assert equal(module, net(5), "2.weight", "2.bias")


def test_match_selects_by_one_of_several_patterns(path):
    module = net(5)
    table = load(module, {"path": path, "match": [r"^0\.", r"^1\..*s$"]})
    assert table["loaded"] == (3, 20, "0.weight, 0.bias, 1.bias")
    assert table["not loaded: left out by match"][:2] == (6, 38)
    assert equal(module, net(), "0.weight", "0.bias")


def test_tensors_that_are_missing_on_either_side_are_an_error_or_skipped(tmp_path):
    module, other = nn.Sequential(nn.Linear(2, 2), nn.PReLU()), nn.ModuleDict({"0": nn.Linear(2, 2), "2": nn.PReLU()})
    path = saved(other, tmp_path / "a.safetensors")
    message = refused(module, path)
    assert "not in the file: 1.weight; only in the file: 2.weight; to load only what fits" in message
    table = load(module, {"path": path, "on_mismatch": "skip"})
    assert table["not loaded: not in the file"] == (1, 1, "1.weight")
    assert table["not loaded: only in the file"] == (1, 1, "2.weight")
    assert equal(module[0], other["0"])


def test_renames_are_applied_in_order(path):
    module = nn.ModuleDict({"body": net()})
    load(module, {"path": path, "rename": {"^": "x.", r"^x\.(\d)": r"body.\1"}})
    assert equal(module["body"], net())


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"encoder": ""}, r"'encoder' matches no name in the file, which has 0.bias, 0.weight"),
        ({r"^\d\.": ""}, r"0.bias and 1.bias both become bias"),
        ({"^0": r"\1"}, r"'\\\\1' cannot replace '\^0': invalid group reference"),
    ],
)
def test_a_rename_that_does_nothing_or_harm_is_an_error(path, rename, message):
    with pytest.raises(ArgumentError, match=f"init_from.rename: .*{message}"):
        load(net(), {"path": path, "rename": rename})


def tied():
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    return module


@pytest.mark.parametrize("name", ["0.weight", "1.weight"])
def test_a_tied_weight_is_loaded_by_any_of_its_names(tmp_path, name):
    save_file({name: torch.eye(3)}, tmp_path / "a.safetensors")
    module = tied()
    table = load(module, str(tmp_path / "a.safetensors"))
    assert table["loaded"][:2] == (2, 9)
    assert table["of these, tied to others"][0] == 1
    assert torch.equal(module[0].weight, torch.eye(3))
    assert module[1].weight is module[0].weight


def test_weights_that_are_tied_only_here_are_an_error(tmp_path):
    save_file({"0.weight": torch.eye(3), "1.weight": torch.zeros(3, 3)}, tmp_path / "a.safetensors")
    assert "tied here: 1.weight and 0.weight are one tensor here, but differ in the file" in refused(
        tied(), str(tmp_path / "a.safetensors")
    )


def test_a_conversion_of_the_dtype_is_in_the_table(tmp_path):
    path = saved(net().to(torch.bfloat16), tmp_path / "a.safetensors")
    module = net()
    table = load(module, path)
    assert table["of these, converted from bfloat16 to float32"][:2] == (8, 42)
    assert module[0].weight.dtype == torch.float32
    assert torch.equal(module[0].weight, net()[0].weight.bfloat16().float())


def test_floats_are_not_loaded_into_whole_numbers(tmp_path):
    state = net().state_dict()
    save_file({**state, "1.num_batches_tracked": torch.tensor(1.5)}, tmp_path / "a.safetensors")
    message = refused(net(), str(tmp_path / "a.safetensors"))
    assert "another dtype: 1.num_batches_tracked is float32 in the file, int64 in the module" in message


def test_another_model_is_an_error_with_names_of_both(path):
    message = refused(Affine(), {"path": path, "on_mismatch": "skip"})
    assert message == (
        f"init_from.path: nothing of {path} is loaded: the file has 0.bias, 0.weight, 1.bias, 1.num_batches_tracked, "
        "1.running_mean, 1.running_var, +3, Affine has w, b"
    )


def test_a_match_of_nothing_is_an_error(path):
    with pytest.raises(ArgumentError, match=r"init_from.match: '\^head' matches none of the names 0.weight, "):
        load(net(), {"path": path, "match": "^head"})


def test_names_of_a_file_are_shown_without_control_characters(tmp_path):
    torch.save({"\x1b[31mw\n": torch.ones(())}, tmp_path / "a.pt")
    assert r"only in the file: \x1b[31mw\n;" in refused(Affine(), str(tmp_path / "a.pt"))


class Own(nn.Linear):
    """A module that refuses weights."""

    def _load_from_state_dict(self, *arguments):
        raise RuntimeError("not these")


def test_what_a_module_refuses_is_an_error(tmp_path):
    path = saved(nn.Linear(1, 1), tmp_path / "a.safetensors")
    with pytest.raises(ArgumentError, match="Own does not load these weights: not these"):
        load(Own(1, 1), path)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (5, "init_from: 5 is neither a path nor a mapping"),
        ("", "init_from: '' is neither a path nor a mapping"),
        ({"match": "a"}, "init_from.path: None is not the path of a run directory"),
        ({"path": "a", "mach": "b"}, "init_from.mach: unknown key 'mach'; did you mean 'match'"),
        ({"path": "a", "on_mismatch": "warn"}, "init_from.on_mismatch: 'warn' is not one of error, skip"),
        ({"path": "a", "match": []}, "init_from.match: .* is neither a regular expression nor a list"),
        ({"path": "a", "match": ["a", 1]}, r"init_from.match\[1\]: 1 is not a regular expression"),
        ({"path": "a", "rename": {"(": ""}}, r"init_from.rename: '\(' is not a regular expression"),
        ({"path": "a", "rename": ["a"]}, "init_from.rename: .* is not a mapping"),
    ],
)
def test_a_wrong_form_is_an_error_when_the_model_is_built(form, message):
    with pytest.raises(ArgumentError, match=message):
        TorchModel(Affine(), init_from=form)


def test_a_loop_in_python_loads_once(path, caplog):
    model = TorchModel(net(5), inputs=["x"], outputs=["y"], init_from={"path": path, "on_mismatch": "skip"})
    with caplog.at_level(logging.INFO, "emrun"):
        MainLoop(model, Streams(train=[]))
        MainLoop(model, Streams(train=[]))
    assert equal(model.module, net(), "0.weight")
    (text,) = [each.getMessage() for each in caplog.records if each.name == "emrun.models.weights.init_from"]
    assert text.splitlines()[0] == f"weights from {path}:"
    assert "not loaded: another shape 2 25" in " ".join(text.split())


def test_a_directory_and_shards_are_loaded_and_a_hostile_file_is_an_error(tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    saved(net(), whole / "model.safetensors")
    module = net(2)
    nn.init.ones_(module[0].weight)
    load(module, str(whole))
    assert equal(module, net())
    shards = tmp_path / "shards"
    shards.mkdir()
    state = net().state_dict()
    names = list(state)
    files = {"a.safetensors": names[:4], "b.safetensors": names[4:]}
    for file, own in files.items():
        save_file({name: state[name] for name in own}, shards / file)
    index = {"weight_map": {name: file for file, own in files.items() for name in own}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    nn.init.ones_(module[0].weight)
    load(module, str(shards))
    assert equal(module, net())
    torch.save({"0.weight": print}, tmp_path / "hostile.pt")
    message = refused(net(), str(tmp_path / "hostile.pt"))
    assert "hostile.pt" in message
    assert "print" in message


def pair():
    torch.manual_seed(7)
    return nn.ModuleDict({"online": net(), "target": net(), "head": nn.Linear(2, 2)})


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = pair()

    def forward(self):
        return {}


def test_a_list_loads_from_several_files_and_a_tensor_to_several_places(tmp_path, path):
    torch.manual_seed(9)
    head = nn.Linear(2, 2)
    several = {"path": path, "rename": {"^": ["parts.online.", "parts.target."]}, "match": "online|target"}
    other = {"path": saved(head, tmp_path / "head.safetensors"), "rename": {"^": "parts.head."}, "match": "head"}
    module = Pair()
    model = TorchModel(module, init_from=[several, other], device="cpu")
    found = model.load_initial()
    parts = module.parts
    assert all(equal(parts[name], net()) for name in ("online", "target"))
    assert equal(parts["head"], head)
    assert [(row["what"], row["tensors"]) for row in found["rows"] if "not" not in row["what"]] == [
        ("1: loaded", 18),
        ("2: loaded", 2),
    ]
    assert found["source"] == f"1: {path}, 2: {other['path']}"
    with torch.no_grad():
        parts["online"][0].weight += 1
    assert not equal(parts["online"], parts["target"])  # each has its own memory
    alone = TorchModel(Affine(), init_from=[saved(Affine(3.0), tmp_path / "a.safetensors")], device="cpu")
    assert alone.load_initial()["rows"][0]["what"] == "loaded"
    assert alone.module.w.item() == 3.0


def test_a_tensor_that_two_entries_load_is_an_error(path):
    entry = {"path": path, "match": "^0"}
    model = TorchModel(
        net(), inputs=["x"], outputs=["y"], init_from=[entry, {**entry, "match": "weight"}], device="cpu"
    )
    with pytest.raises(
        ArgumentError, match=r"init_from\[1\].path: 0.weight of .* would replace what is loaded from .*; set"
    ):
        model.load_initial()


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ([], "init_from: the list is empty"),
        (["a", 5], r"init_from\[1\]: 5 is neither a path nor a mapping"),
        ([{"path": "a", "mach": "b"}], r"init_from\[0\].mach: unknown key 'mach'; did you mean 'match'"),
        (["a", {"path": "a", "match": ["a", 1]}], r"init_from\[1\].match\[1\]: 1 is not a regular expression"),
        ([{"path": "a", "rename": {"a": []}}], r"init_from\[0\].rename.a: the list is empty"),
        ({"path": "a", "rename": {"a": ["b", 3]}}, "init_from.rename.a: .* is not a list of names"),
    ],
)
def test_a_wrong_entry_of_a_list_is_an_error_at_its_place(form, message):
    with pytest.raises(ArgumentError, match=message):
        TorchModel(Affine(), init_from=form)


def test_two_replacements_that_give_one_name_and_a_file_that_is_missing_are_errors_of_their_entry(path):
    for rename in ({r"^\d\.": ["a.", "b."]}, {"^0": ["1", "2"]}):
        with pytest.raises(ArgumentError, match=r"init_from\[0\].rename: .* both become"):
            load_first(net(), [{"path": path, "rename": rename}])
    with pytest.raises(ArgumentError, match=r"init_from\[1\]: .*nowhere"):
        load_first(net(), [{"path": path, "match": "0"}, "nowhere"])


def load_first(module, init_from):
    TorchModel(module, inputs=["x"], outputs=["y"], init_from=init_from, device="cpu").load_initial()
