"""A run that was copied in one way or another is evaluated and resumed as the run itself would be.

Copies lose the links that are a checkpoint's names (`rsync -r`, FAT, object stores): after a resume the same names
stand for the same checkpoints as after a resume of the run itself. A copy that followed links (`cp -rL`, zip), or has
empty directories in their places (Python's archives), is evaluated; its resume is refused with what to do, and after
that the copy is resumed as the run is.

Taken out once by hand, each of these made this fail: giving names back from the manifests; refusing directories under
names; refusing hooks that save under one name. The names that
a state recorded, and that only what lost its last name is deleted, each cover for the other guards here; taken out,
they made tests of `tests/test_checkpoint.py` fail.
"""

import itertools
import json
import shutil
import subprocess

import pytest

from emrun import create_training, resume_training
from emrun.base.wording import progress
from emrun.storage.checkpoints.manifest import verify
from emrun.training.create import train

NAMES = ("best", "epoch-1", "epoch-2", "latest")
HOOKS = """hooks=[{ComputeStats: {variables: [loss]}}, {SaveBest: {condition: max}}, {SaveEvery: {keep: 2}}, WriteCSV,
{StopAfter: {epochs: 2}}]"""


def no_link(copy, name):
    (copy / name).unlink()


def dangling(copy, name):
    (copy / name).unlink()
    (copy / name).symlink_to("it-00000099")


def followed(copy, name):
    target = (copy / name).resolve()
    (copy / name).unlink()
    shutil.copytree(target, copy / name)


def emptied(copy, name):
    (copy / name).unlink()
    (copy / name).mkdir()


def without_directories(copy):
    for place in list(copy.glob("it-*")):
        shutil.rmtree(place)


def names_in(checkpoints):
    """Return what each name stands for: (epoch, iteration, weights)."""
    found = {}
    for path in checkpoints.iterdir():
        assert path.is_symlink() or path.name.startswith("it-"), path
        if path.is_symlink():
            manifest = verify(path.resolve())
            found[path.name] = manifest.epoch, manifest.iteration, (path / "model.safetensors").read_bytes()
    return found


def trained(small, directory, hooks=HOOKS, epochs=2):
    def make():
        overrides = [hooks, f"hooks.StopAfter.epochs={epochs}"]
        train(create_training(small.config, output_dir=directory, overrides=overrides))

    assert small.forked(make) == 0
    return directory


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    directory = trained(small, tmp_path_factory.mktemp("whole") / "run")
    assert sorted(path.name for path in (directory / "checkpoints").iterdir() if path.is_symlink()) == list(NAMES)
    return directory


def resumed(small, directory, name=None, epochs=3):
    def resume():
        train(resume_training(directory, [f"hooks.StopAfter.epochs={epochs}"], name))

    assert small.forked(resume) == 0
    return names_in(directory / "checkpoints")


SOME = [names for count in (4, 1, 2, 3) for names in itertools.combinations(NAMES, count)]
FAULTS = [
    *itertools.product((no_link, dangling), SOME, (False,)),
    *itertools.product((followed, emptied), SOME, (False,)),
    (followed, NAMES, True),
]


def told(small, copy):
    """Return the commands that a refused resume tells."""
    before = {path: path.lstat().st_mtime_ns for path in (copy / "checkpoints").rglob("*")}
    done = small.command("resume", copy, "hooks.StopAfter.epochs=3", cwd=copy)
    assert done.returncode == 2, done.stderr
    said = " ".join(done.stderr.split())
    assert "has directories instead of links" in said, said
    assert {path: path.lstat().st_mtime_ns for path in (copy / "checkpoints").rglob("*")} == before
    return said.partition("or do this: ")[2].split("; ")


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.fault("a run is copied without links, with links followed, without the directories, and resumed")
def test_a_copy_of_a_run_is_resumed_as_the_run_itself(tmp_path, small, run, trials):
    itself = tmp_path / "itself"
    shutil.copytree(run, itself, symlinks=True)
    expected = resumed(small, itself)
    assert sorted(expected) == ["best", "epoch-2", "epoch-3", "latest"]
    copy = tmp_path / "copy"
    for trial in trials(FAULTS[::-1], small=4):
        how, names, is_partial = trial.case
        with trial:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(run, copy, symlinks=True)
            for name in names:
                how(copy / "checkpoints", name)
            if is_partial:
                without_directories(copy / "checkpoints")
            if how in (followed, emptied):
                for command in told(small, copy):
                    subprocess.run(command, shell=True, check=True, cwd=copy)
            with trial.reading():
                assert resumed(small, copy) == expected
            there = {path.name for path in (copy / "checkpoints").glob("it-*")}
            named = {path.readlink().name for path in (copy / "checkpoints").iterdir() if path.is_symlink()}
            assert named == there  # and nothing is left that a name had
            assert not list((copy / "checkpoints").glob(".*"))


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.fault("a checkpoint of a copy that followed links is evaluated")
def test_a_directory_under_a_name_is_evaluated(tmp_path, small, run, trials):
    copy = tmp_path / "copy"
    for trial in trials(itertools.product(NAMES, (False, True)), small=2):
        name, is_partial = trial.case
        with trial, trial.reading():
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(run, copy, symlinks=False)
            if is_partial:
                without_directories(copy / "checkpoints")
            manifest = verify(copy / "checkpoints" / name)
            done = small.command("eval", copy, "valid", "--checkpoint", name, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            assert progress(manifest.epoch, manifest.iteration) in done.stderr


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.fault("the links are gone and the checkpoints are of an emrun that recorded no names in their states")
def test_names_come_back_from_the_manifests_alone(tmp_path, small, trials, monkeypatch):
    """What SaveEvery had given up, and is there for another name, has its name again until SaveEvery saves the next."""
    from emrun.loop.snapshot import Snapshot

    take = Snapshot.take
    monkeypatch.setattr(Snapshot, "take", lambda state, names=None: take(state))
    cases = [(keep, epochs, kept) for keep in (1, 2, "null") for epochs in (1, 2, 3) for kept in ("min", "max")]
    for trial in trials(cases, small=1):
        keep, epochs, condition = trial.case
        hooks = HOOKS.replace("max", condition).replace("keep: 2", f"keep: {keep}")
        with trial:
            itself = trained(small, tmp_path / f"{keep}-{epochs}-{condition}", hooks, epochs)
            copy = itself.with_suffix(".copy")
            shutil.copytree(itself, copy, symlinks=True)
            for path in list((copy / "checkpoints").iterdir()):
                if path.is_symlink():
                    path.unlink()
            assert resumed(small, copy, epochs=epochs + 1) == resumed(small, itself, epochs=epochs + 1)


def saving(*hooks):
    return [{"ComputeStats": {"variables": ["loss"]}}, *hooks, {"StopAfter": {"epochs": 1}}]


TWICE = {
    "two SaveBest": (["SaveBest", {"SaveBest": {"condition": "max"}}], "'best'"),
    "two of one name": ([{"SaveBest": {"model_name": "b"}}, {"SaveBest": {"model_name": "b"}}], "'b'"),
    "latest": ([{"SaveBest": {"model_name": "latest"}}], "'latest'"),
    "a hidden latest": ([{"SaveBest": {"model_name": ".latest"}}], "'latest'"),
    "epoch-1": (["SaveEvery", {"SaveBest": {"model_name": "epoch-1"}}], "'epoch-1'"),
    "epoch-1 before": ([{"SaveBest": {"model_name": "epoch-1"}}, "SaveEvery"], "'epoch-1'"),
    "iteration-5": ([{"SaveEvery": "5 iterations"}, {"SaveBest": {"model_name": "iteration-5"}}], "'iteration-5'"),
    "a/b and a_b": ([{"SaveBest": {"model_name": "a/b"}}, {"SaveBest": {"model_name": "a_b"}}], "'a_b'"),
    "two SaveEvery": (["SaveEvery", {"SaveEvery": {"n_epochs": 2}}], "'epoch'"),
    "epoch and epoch-1": ([{"SaveEvery": {"model_name": "a b"}}, {"SaveEvery": {"model_name": "a_b"}}], "'a_b'"),
}
TWICE["iteration-5"][0][0] = {"SaveEvery": {"every": "5 iterations"}}


@pytest.mark.timeout(7200)
@pytest.mark.fault("two hooks save under one name")
def test_two_hooks_that_save_under_one_name_are_refused_before_training(project, small, trials):
    cases = [(case, command) for case in TWICE for command in ("train", "check")]
    for trial in trials(cases, small=5):
        case, command = trial.case
        hooks, named = TWICE[case]
        with trial, trial.telling():
            config = {**small.config, "hooks": saving(*hooks)}
            (project / "config.yaml").write_text(json.dumps(config, indent=2))
            shutil.rmtree(project / "run", ignore_errors=True)
            more = ["--output-dir", "run"] if command == "train" else []
            done = small.command(command, "config.yaml", *more, cwd=project)
            said = done.stdout + done.stderr
            assert done.returncode == 2, said
            assert "save" in said and named in said and "another model_name" in said, said
            assert "Traceback" not in said
            assert not (project / "run").exists()
