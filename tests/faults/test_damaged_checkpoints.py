"""A damaged checkpoint is always noticed: passed over with a warning for an intact one, refused when asked for by name.

Taken out once by hand, the comparison of files with the manifest made this fail.
"""

import functools
import json
import logging
import shutil
from itertools import product

import pytest

from emrun import resume_training
from emrun.base.errors import EmrunError, StorageError
from emrun.storage.checkpoints.manifest import FORMAT
from emrun.storage.sealed import describe, json_digest
from emrun.training.create import train

FILES = ("model.safetensors", "state.pt", "manifest.json")
LONGER = ["hooks.StopAfter.epochs=4"]
CASES = [
    *product(["cut"], range(70)),
    *product(["flipped"], range(300)),
    *product(["empty", "missing", "longer", "directory", "swapped", "other format"], FILES),
    *product(["wrong model", "newer"], range(6)),
]
FEW = [
    ("cut", 35), ("flipped", 0), ("flipped", 7), ("flipped", 14), ("empty", "manifest.json"), ("missing", "state.pt"),
    ("longer", "state.pt"), ("directory", "model.safetensors"), ("swapped", "model.safetensors"),
    ("swapped", "state.pt"), ("other format", "manifest.json"),
    ("wrong model", 0), ("wrong model", 1), ("wrong model", 2), ("newer", 0),
]  # fmt: skip


def damage(place, other, kind, which, draw):
    """Damage a checkpoint; `other` is one of the same run, with other weights."""
    name = which if which in FILES else draw.choice(FILES)
    path = place / name
    content = path.read_bytes()
    if kind == "cut":
        path.write_bytes(content[: which * len(content) // 70])
    elif kind == "flipped":
        at = draw.randrange(len(content))
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "longer":
        path.write_bytes(content + draw.randbytes(9))
    elif kind == "swapped":
        shutil.copy(other / name, path)
    elif kind == "other format":
        path.write_bytes(draw.choice([b"{}", b"null", b"[1]", b"\x80\x02.", b"PK\x03\x04", b"\xff" * 200]))
    elif kind == "newer":
        rewrite(place, format=FORMAT + 1 + which)
    else:
        path.unlink()
        if kind == "directory":
            path.mkdir()


def rewrite(place, **changes):
    manifest = json.loads((place / "manifest.json").read_text())
    manifest.pop("sha256")
    manifest.update(changes)
    (place / "manifest.json").write_text(json.dumps({**manifest, "sha256": json_digest(manifest)}))


def go_on(directory):
    train(resume_training(directory, LONGER))


@pytest.fixture(scope="module")
def trained_runs(small, tmp_path_factory):
    """Return a run with two checkpoints, and a function that returns the result of going on from either."""
    place = tmp_path_factory.mktemp("trained")
    assert small.forked(small.start_or_resume, place / "run") == 0

    @functools.cache
    def expected():
        shutil.copytree(place / "run", place / "straight", symlinks=True)
        assert small.forked(go_on, place / "straight") == 0
        return small.result(place / "straight", ("latest", "best"))

    return place / "run", expected


@pytest.fixture
def runs(tmp_path, trained_runs):
    """Return a copy of the run, to be damaged, and the function."""
    directory, result = trained_runs
    return shutil.copytree(directory, tmp_path / "run", symlinks=True), result


@pytest.mark.timeout(7200)
@pytest.mark.fault("a checkpoint is cut, flipped, swapped, empty, of another model, of a newer format", share=2)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning_and_refused_by_name(tmp_path, small, trials, runs, caplog):
    directory, expected = runs
    for trial in trials(CASES, small=FEW):
        kind, which = trial.case
        copy = tmp_path / f"{kind}-{which}"
        shutil.copytree(directory, copy, symlinks=True)
        checkpoints = copy / "checkpoints"
        newest, best = (checkpoints / "latest").resolve(), (checkpoints / "best").resolve()
        older = max(place for place in checkpoints.glob("it-*") if place != newest)
        caplog.clear()
        with trial, caplog.at_level(logging.INFO):
            if kind == "wrong model":
                with trial.telling():
                    _refuses_another_model(newest, copy, trial)
                continue
            damage(newest, best, kind, which, trial.random)
            with trial.telling(), pytest.raises(StorageError):
                resume_training(copy, checkpoint_name="latest")
            with trial.reading():
                training = resume_training(copy, LONGER)
            with trial.telling():
                assert f"continuing from {older.name} instead" in caplog.text
                assert any(r.levelname == "WARNING" and newest.name in r.getMessage() for r in caplog.records)
                if kind == "newer":
                    assert "is newer than this emrun supports" in caplog.text
            training.main_loop.run.release()
            if trial.random.random() < 0.1:
                assert small.forked(go_on, copy) == 0
                assert small.result(copy, ("latest", "best")) == expected()


def _refuses_another_model(newest, copy, trial):
    """Put weights of another shape into the checkpoint, with a manifest that fits: no damage, but no fit either."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(newest / "model.safetensors")
    name = trial.random.choice(sorted(tensors))
    changed = {
        0: {**tensors, name: tensors[name].new_zeros(7, 3)},
        1: {key: value for key, value in tensors.items() if key != name},
        2: {**tensors, "another": tensors[name].clone()},
    }[trial.case[1] % 3]
    save_file(changed, newest / "model.safetensors")
    manifest = json.loads((newest / "manifest.json").read_text())
    files = {**manifest["files"], "model.safetensors": describe(newest / "model.safetensors")}
    rewrite(newest, files=files)
    for by_name in (None, "latest"):
        before = {path: path.read_bytes() for path in copy.rglob("*") if path.suffix in (".yaml", ".jsonl", ".csv")}
        with pytest.raises(EmrunError) as caught:
            resume_training(copy, LONGER, checkpoint_name=by_name)
        assert caught.value.exit_status in (2, 74)
        assert {path: path.read_bytes() for path in before} == before


@pytest.mark.timeout(7200)
@pytest.mark.fault("all checkpoints of a run are damaged")
def test_a_run_without_an_intact_checkpoint_is_refused_and_left_as_it_is(tmp_path, small, trials, runs):
    directory, _ = runs
    copy = tmp_path / "copy"
    for trial in trials(product(["cut", "empty", "missing", "flipped"], range(0, 60, 6)), small=4):
        kind, which = trial.case
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(directory, copy, symlinks=True)
        places = [path for path in (copy / "checkpoints").glob("it-*") if not path.is_symlink()]
        for place in places:
            damage(place, place, kind, which, trial.random)
        before = sorted((copy / "checkpoints").iterdir())
        with trial:
            with trial.telling(), pytest.raises(StorageError, match=r"no checkpoint of .* is intact"):
                resume_training(copy, LONGER)
            assert sorted((copy / "checkpoints").iterdir()) == before
