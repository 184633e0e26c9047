"""Large frozen parameters lie in a file that checkpoints share, and every way to read a checkpoint finds them."""

import copy
import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from campaign import thinned
from here import run_here
from safetensors.torch import load_file
from training.resuming import Interrupt, train_with
from training.tiny import CONFIG as TINY, trained

from emrun import AbstractHook, create_training, load_run, resume_training
from emrun.runs.pruning import Removal
from emrun.runs.stored_run import StoredRun, size_below
from emrun.storage.checkpoints.manifest import STATE, verify
from emrun.storage.checkpoints.saved_weights import read_saved
from emrun.training.create import train

FROZEN, UNFROZEN, INDEX = "frozen.safetensors", "unfrozen.safetensors", "model.safetensors.index.json"
SIZE = 4 * (12 * 512 + 513 * 512)  # bytes of the frozen parameters
TRAINED_SIZE = 4 * (513 * 50 + 51)
AVERAGES = {"AverageWeights": {"decay": 0.5}}


def config_of(*hooks, epochs=3, **freeze):
    """Return a config with a module of which 90 % are frozen, and a checkpoint after each epoch."""
    config = copy.deepcopy(TINY)
    sizes = [(11, 512), (512, 512), (512, 50), (50, 1)]
    layers = [{"class": "torch.nn.Linear", "in_features": one, "out_features": two} for one, two in sizes]
    config["model"]["module"]["args"][:1] = layers
    freeze = {"Freeze": {"match": r"^[01]\.", **freeze}}
    every = {"SaveEvery": {"every": "1 epochs", "keep": 20}}
    config["hooks"] = [*hooks, freeze, "ComputeStats", every, {"StopAfter": {"epochs": epochs}}]
    config["main_loop"] |= {"skip_zeroth_epoch": True, "report": False}
    return config


def run_of(directory, *hooks, **more):
    return trained(directory, config=config_of(*hooks, **more)).output_dir


def places_in(run):
    return [each for each in sorted((run / "checkpoints").iterdir()) if not each.is_symlink()]


def inodes(run):
    return [(each / FROZEN).stat().st_ino for each in places_in(run) if (each / FROZEN).exists()]


def names_in(place):
    return {each.name for each in place.iterdir() if each.name not in ("manifest.json", STATE)}


def values_of(place):
    return {name: each.clone() for name, each in read_saved(place).tensors.items()}


def trained_values(place):
    """Return the values that are trained, as a resume reads them."""
    file = next(name for name in ("training.safetensors", UNFROZEN, "model.safetensors") if (place / name).exists())
    frozen = load_file(place / FROZEN) if (place / FROZEN).exists() else {}
    return {**frozen, **load_file(place / file)}


def are_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Return a run with six checkpoints; it is not changed."""
    return run_of(tmp_path_factory.mktemp("shared"), epochs=6)


def test_six_checkpoints_have_the_frozen_bytes_once(shared):
    places = places_in(shared)
    assert len(places) == 6
    assert {frozenset(names_in(each)) for each in places} == {frozenset({FROZEN, UNFROZEN, INDEX})}
    assert len(set(inodes(shared))) == 1
    blocks = {each.stat().st_ino: each.stat().st_blocks * 512 for place in places for each in place.iterdir()}
    assert SIZE + 6 * TRAINED_SIZE < sum(blocks.values()) < SIZE + 12 * TRAINED_SIZE  # in six files: 5 * SIZE more
    assert size_below(shared / "checkpoints") < SIZE + 12 * TRAINED_SIZE
    assert Removal.of(StoredRun(shared), "checkpoints").size < SIZE + 12 * TRAINED_SIZE
    for place in places:
        verify(place)
    entries = [json.loads((each / "manifest.json").read_text())["files"] for each in places]
    assert len({json.dumps(each[FROZEN]) for each in entries}) == 1
    assert [list(each) for each in entries] == [sorted(entries[0])] * 6


def test_the_index_is_that_of_transformers(shared):
    place = places_in(shared)[0]
    index = json.loads((place / INDEX).read_text())
    assert index["metadata"] == {"total_size": SIZE + TRAINED_SIZE}
    files = {name: load_file(place / name) for name in (FROZEN, UNFROZEN)}
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    assert set(files[FROZEN]) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_every_command_reads_such_a_checkpoint(shared, tmp_path):
    run = shutil.copytree(shared, tmp_path / "run", symlinks=True)
    assert inodes(run)[0] != inodes(run)[1]  # such a copy has the file six times
    latest = values_of(run / "checkpoints" / "latest")
    assert are_equal(latest, load_run(run, "latest").model.module.state_dict())
    assert are_equal(latest, values_of(run / "checkpoints" / "latest" / INDEX))
    assert are_equal(latest, values_of(run))
    for command in (
        ["eval", "-q", run, "valid"],
        ["predict", "-q", run, "valid", "-o", tmp_path / "found.jsonl"],
        ["diff", run, run],
    ):
        done = run_here(command, Path.cwd())
        assert (done.returncode, done.stderr) == (0, "")
    begun = trained(tmp_path / "begun", f"model.init_from={run}", config=config_of(epochs=1)).output_dir
    assert are_equal(
        load_file(begun / "checkpoints" / "latest" / FROZEN), load_file(run / "checkpoints/latest" / FROZEN)
    )
    prune = ["prune", "--optimizer-states", "--yes", str(run)]
    assert run_here(prune, Path.cwd()).returncode == 0
    assert are_equal(latest, values_of(run))


def test_a_resume_shares_the_file_and_ends_the_same(shared, tmp_path):
    run = run_of(tmp_path, epochs=4)
    train(resume_training(run, overrides=["hooks.StopAfter.epochs=6"]))
    assert len(inodes(run)) == 6
    assert len(set(inodes(run))) == 1
    assert are_equal(values_of(run), values_of(shared))


@pytest.mark.campaign
@pytest.mark.parametrize("epochs", thinned([1, 2, 3], [2]))
def test_parameters_that_thaw_are_in_the_one_file_again_and_a_resume_is_exact(tmp_path, epochs):
    straight = run_of(tmp_path / "straight", epochs=4, until="2 epochs")
    has_frozen = [FROZEN in names_in(each) for each in places_in(straight)]
    assert has_frozen in ([True, False, False, False], [True, True, False, False])
    assert [names_in(each) for each in places_in(straight)][-1] == {"model.safetensors"}
    first, *_, last = map(values_of, places_in(straight))
    assert not torch.equal(first["0.weight"], last["0.weight"])
    run = run_of(tmp_path / "run", epochs=epochs, until="2 epochs")
    train(resume_training(run, overrides=["hooks.StopAfter.epochs=4"]))
    assert are_equal(values_of(run), last)
    assert inodes(run) == [inodes(run)[0]] * has_frozen.count(True)


@pytest.mark.campaign
def test_averages_share_the_frozen_tensors_and_a_resume_is_exact(tmp_path):
    straight = run_of(tmp_path / "straight", AVERAGES)
    assert names_in(places_in(straight)[-1]) == {FROZEN, UNFROZEN, INDEX, "training.safetensors"}
    assert len(set(inodes(straight))) == 1
    last = places_in(straight)[-1]
    assert not torch.equal(trained_values(last)["2.weight"], values_of(last)["2.weight"])
    run = run_of(tmp_path / "run", AVERAGES, epochs=1)
    train(resume_training(run, overrides=["hooks.StopAfter.epochs=3"]))
    for values in (values_of, trained_values):
        assert are_equal(values(places_in(run)[-1]), values(last))


@pytest.mark.campaign
def test_averages_of_tensors_that_are_frozen_after_a_while_lie_with_the_others(tmp_path):
    class FreezeLate(AbstractHook):
        def after_epoch(self, epoch_id):
            if epoch_id == 1:
                for each in [*self.main_loop.model.module[:2].parameters()]:
                    each.requires_grad = False

    config = config_of({"AverageWeights": {"kind": "swa"}})
    config["hooks"] = [each for each in config["hooks"] if "Freeze" not in each]
    training = create_training(config, output_dir=tmp_path / "run")
    training.main_loop.change_hooks([*training.main_loop.hooks, FreezeLate()])
    train(training)
    last = places_in(tmp_path / "run")[-1]
    module, averages = training.model.module, training.model.evaluation_weights
    assert not torch.equal(averages["0.weight"], module[0].weight)
    assert are_equal(trained_values(last), module.state_dict())
    assert are_equal(values_of(last), dict(averages))


class Teacher(AbstractHook):
    """Changes a frozen parameter, as an average of another one does."""

    def after_epoch(self):
        with torch.no_grad():
            self.main_loop.model.module[1].weight += 1


def test_a_frozen_tensor_that_is_changed_by_hand_is_written_again(tmp_path):
    run = run_of(tmp_path, f"{__name__}.Teacher")
    assert len(set(inodes(run))) == 3
    first, second, third = (values_of(each)["1.weight"] for each in places_in(run))
    torch.testing.assert_close(second, first + 1)
    torch.testing.assert_close(third, first + 2)


@pytest.mark.parametrize(
    "error", thinned([errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV], [errno.EOPNOTSUPP])
)
def test_without_hard_links_each_checkpoint_has_the_whole(error, tmp_path, monkeypatch):
    def refuse(*arguments, **keywords):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "link", refuse)
    run = run_of(tmp_path, epochs=2)
    assert len(set(inodes(run))) == 2
    for place in places_in(run):
        verify(place)
    assert (places_in(run)[0] / FROZEN).read_bytes() == (places_in(run)[1] / FROZEN).read_bytes()


@pytest.mark.parametrize("damage", thinned(["changed", "cut", "missing", "link"], ["changed"]))
def test_a_damaged_file_is_not_shared_any_more(damage, tmp_path):
    run = run_of(tmp_path, epochs=1)
    (place,) = places_in(run)
    path = place / FROZEN
    content = path.read_bytes()
    training = resume_training(run, overrides=["hooks.StopAfter.epochs=2"])
    if damage == "changed":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "cut":
        path.write_bytes(content[:1000])
    else:
        path.rename(run / "elsewhere")
        if damage == "link":
            path.symlink_to(run / "elsewhere")
    train(training)
    new = places_in(run)[-1]
    verify(new)
    assert (new / FROZEN).read_bytes() == content
    assert not (new / FROZEN).is_symlink()


def test_few_frozen_bytes_are_in_the_one_file(tmp_path):
    config = config_of(epochs=1)
    config["hooks"][0] = {"Freeze": {"match": r"^0\."}}
    assert names_in(places_in(trained(tmp_path, config=config).output_dir)[0]) == {"model.safetensors"}


@pytest.mark.campaign
def test_a_run_whose_checkpoints_have_one_file_goes_on(tmp_path, monkeypatch, shared):
    with monkeypatch.context() as patch:
        patch.setattr("emrun.storage.checkpoints.weights.LEAST_APART", 10**9)
        run = run_of(tmp_path, epochs=3)
    assert not inodes(run)
    train(resume_training(run, overrides=["hooks.StopAfter.epochs=6"]))
    assert len(inodes(run)) == 3
    assert are_equal(values_of(run), values_of(shared))


@pytest.mark.campaign
def test_a_run_that_is_interrupted_in_an_evaluation_has_the_same_files_before_and_after_the_first_batch(tmp_path):
    config = config_of(epochs=1)
    config["main_loop"]["skip_zeroth_epoch"] = False
    train_with(create_training(config, output_dir=tmp_path / "straight"), straight := Interrupt())
    last = len(straight.events) - straight.events[::-1].index("before_batch valid")
    train_with(create_training(config, output_dir=tmp_path / "run"), Interrupt(last))
    train_with(resume_training(tmp_path / "run"), resumed := Interrupt())
    assert "before_batch valid" in resumed.events
    assert "before_batch train" not in resumed.events
    runs = [places_in(tmp_path / name) for name in ("straight", "run")]
    for one, other in zip(*(places[-1:] for places in runs), strict=True):
        assert names_in(one) == names_in(other) == {FROZEN, UNFROZEN, INDEX}
        assert all((one / name).read_bytes() == (other / name).read_bytes() for name in names_in(one))
    assert {FROZEN in names_in(each) for each in runs[0]} == {True}
