"""Archives: what is inside, which run comes out, and which files are refused."""

import hashlib
import json
import os
import shutil
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest
from projects import LINEAR
from training.tiny import CONFIG, metrics, trained, weights

import emrun
from emrun.base.errors import StorageError, UsageError
from emrun.exports.archive import unpack
from emrun.storage.lock import RunLock
from emrun.storage.sealed import json_digest
from emrun.storage.trace import read_trace
from emrun.training.create import train
from emrun.training.evaluate import evaluate
from emrun.training.resume import resume_training


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a secret in its config, an evaluation, and checkpoints of each epoch."""
    place = tmp_path_factory.mktemp("run")
    hooks = [*CONFIG["hooks"][:2], {"SaveEvery": {"n_epochs": 1}}, "WriteCSV", {"StopAfter": {"epochs": 3}}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKEN", "s3cr3t-of-this-machine")
        training = trained(place, config={**CONFIG, "hooks": hooks, "vars": {"token": "${env:TOKEN}"}})
        (evaluated,) = [evaluate(training.output_dir, "train", checkpoint_name="latest")]
    assert evaluated
    return training


@pytest.fixture(scope="module")
def archive(run, tmp_path_factory):
    place = tmp_path_factory.mktemp("archive") / "run.zip"
    emrun.export(run.output_dir, to="archive", output=place)
    return place


def files_in(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_the_same_run_gives_the_same_bytes_without_secrets_and_paths_and_the_run_is_only_read(run, archive, tmp_path):
    before = files_in(run.output_dir)
    again = emrun.export(run.output_dir, to="archive", output=tmp_path / "again.zip")
    assert again.place.read_bytes() == archive.read_bytes()
    assert files_in(run.output_dir) == before
    for secret in ("s3cr3t", str(run.output_dir), str(Path.home()), os.uname().nodename):
        assert secret.encode() not in archive.read_bytes()
    with zipfile.ZipFile(archive) as content:
        names = content.namelist()
        assert {info.compress_type for info in content.infolist()} == {zipfile.ZIP_STORED}
        assert {info.date_time[0] for info in content.infolist()} == {1980}
    assert len({Path(name).parts[1] for name in names if name.startswith("checkpoints/")}) == 1
    assert {"config.yaml", "trace.yaml", "metrics.jsonl", "steps.jsonl", "eval/train-1/trace.yaml"} <= set(names)
    assert not {"train.log", "training.csv", ".config.yaml.json", "report.html"} & set(names)


def test_the_run_that_is_unpacked_is_the_run(run, archive, tmp_path):
    (tmp_path / "got").mkdir()
    content = unpack(archive, tmp_path / "got")
    got = tmp_path / "got"
    assert (
        next(iter(content["checkpoints"].values()))["names"]
        == ["best", "epoch-3", "latest"]
        == sorted(path.name for path in (got / "checkpoints").iterdir() if path.is_symlink())
    )
    for name in ("metrics.jsonl", "steps.jsonl", "rows.jsonl"):
        assert (got / name).read_bytes() == (run.output_dir / name).read_bytes()
    again = emrun.export(got, to="archive", output=tmp_path / "got.zip")
    assert again.facts["checkpoints"] == content["checkpoints"]
    assert zipfile.ZipFile(again.place).namelist() == zipfile.ZipFile(archive).namelist()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_resume_from_an_archived_checkpoint_gives_the_bits_of_the_uninterrupted_run(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN", "another")
    place = tmp_path / "one.zip"
    made = emrun.export(run.output_dir, to="archive", output=place, checkpoint_name="epoch-1")
    assert [where["epoch"] for where in made.facts["checkpoints"].values()] == [1]
    unpack(place, tmp_path / "of" / "another" / "place")
    resumed = resume_training(tmp_path / "of" / "another" / "place", checkpoint_name="epoch-1")
    train(resumed)
    assert weights(resumed) == weights(run)
    steps = [training.output_dir / "steps.jsonl" for training in (resumed, run)]
    assert steps[0].read_bytes() == steps[1].read_bytes()
    assert metrics(resumed) == metrics(run)
    assert (resumed.output_dir / "training.csv").read_text().count("\n") == 5
    assert evaluate(resumed.output_dir, "valid", checkpoint_name="latest") == {
        "valid": metrics(run)[-1]["streams"]["valid"]
    }


def test_the_best_and_the_newest_checkpoint_are_inside_or_the_one_that_was_asked_for(tmp_path):
    training = trained(tmp_path, "model.optimizer.lr=30.0", "hooks.StopAfter.epochs=2")
    made = emrun.export(training.output_dir, to="archive", output=tmp_path / "a.zip")
    assert [where["names"] for where in made.facts["checkpoints"].values()] == [["best"], ["latest"]]
    unpack(tmp_path / "a.zip", tmp_path / "a")
    for name in (None, "latest"):
        found = evaluate(tmp_path / "a", "valid", checkpoint_name=name)
        assert found == evaluate(training.output_dir, "valid", checkpoint_name=name)
    made = emrun.export(training.output_dir, to="archive", output=tmp_path / "b.zip", checkpoint_name="latest")
    assert "is not inside: emrun eval takes the one that is" in made.lines[1]
    (where,) = unpack(tmp_path / "b.zip", tmp_path / "b")["checkpoints"].values()
    assert where["names"] == ["latest"]


def test_a_config_keeps_its_comments(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(
        f"# of mine\ndataset: {{class: Majority, n: 50}}  # small\n{LINEAR}hooks: [StopAfter: {{epochs: 1}}]\n"
    )
    training = trained(tmp_path, "main_loop.on_unused_sources=ignore", config=config)
    emrun.export(training.output_dir, to="archive", output=tmp_path / "a.zip")
    unpack(tmp_path / "a.zip", tmp_path / "got")
    text = (tmp_path / "got" / "config.yaml").read_text()
    assert text.startswith("# of mine\ndataset: {class: Majority, n: 50}  # small\n")
    assert f"code_directory: {tmp_path / 'got'}/code/modules\n" in text


def test_runs_that_cannot_be_archived_are_refused_and_nothing_is_written(run, tmp_path):
    copy = shutil.copytree(run.output_dir, tmp_path / "copy", symlinks=True)

    def refused(message, directory=copy, **options):
        with pytest.raises(UsageError, match=message):
            emrun.export(directory, to="archive", **{"output": tmp_path / "a.zip", **options})
        assert not list(tmp_path.glob("*a.zip*"))

    refused("a name that ends in .zip", output=tmp_path / "a.tar")
    refused("leave out overrides", overrides=["model.optimizer.lr=1"])
    refused("no checkpoint 'lastest'; did you mean 'latest'", checkpoint_name="lastest")
    lock = RunLock(copy)
    trace = (copy / "trace.yaml").read_text()
    (copy / "trace.yaml").write_text(trace.replace("status: finished", "status: running"))
    refused("copy is running; an archive is made of a run that has ended")
    lock.release()
    (copy / "trace.yaml").write_text("status: [")
    refused("copy is damaged")
    (copy / "trace.yaml").write_text(trace)
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace("0.5", "0.6"))
    refused(r"config\.yaml was edited; undo that, or resume")
    (copy / "config.yaml").write_text(text)
    (copy / "checkpoints" / "latest" / "model.safetensors").write_bytes(b"")
    with pytest.raises(StorageError, match=r"model\.safetensors differs"):
        emrun.export(copy, to="archive", output=tmp_path / "a.zip", checkpoint_name="latest")
    shutil.rmtree(copy / "checkpoints")
    refused("copy has no checkpoint")


def test_a_run_that_was_killed_is_archived(run, tmp_path):
    copy = shutil.copytree(run.output_dir, tmp_path / "copy", symlinks=True)
    trace = (copy / "trace.yaml").read_text()
    (copy / "trace.yaml").write_text(trace.replace("status: finished", "status: running"))
    emrun.export(copy, to="archive", output=tmp_path / "a.zip")
    unpack(tmp_path / "a.zip", tmp_path / "got")
    assert read_trace(tmp_path / "got")["status"] == "running"


def rewritten(archive, place, change=lambda infos: infos, listing=None):
    """Write an archive again with other members; `change` gets and returns (ZipInfo, bytes) pairs."""
    with zipfile.ZipFile(archive) as source:
        members = [(info, source.read(info)) for info in source.infolist()]
    members = change(members)
    if listing is not None:
        content = json.loads(members[-1][1])
        content.pop("sha256")
        listing(content)
        members[-1] = (members[-1][0], json.dumps({**content, "sha256": json_digest(content)}).encode())
    with zipfile.ZipFile(place, "w") as target:
        for info, data in members:
            target.writestr(info, data, compress_type=info.compress_type)
    return place


def another(name, data=b"x", **fields):
    info = zipfile.ZipInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def adding(name, **fields):
    """Return what adds a member that the listing knows."""
    _, data = another(name, **fields)

    def listing(content):
        content["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}

    return (lambda members: [another(name, **fields), *members]), listing


LINK = (stat.S_IFLNK | 0o777) << 16
BAD = {
    "a name that leads out": (*adding("../evil.py"), "'../evil.py' is not the name of a file that a run has"),
    "a name that leads out below": (*adding("code/modules/../../../x.py"), "is not the name of a file"),
    "an absolute name": (*adding("/etc/evil"), "'/etc/evil' is not the name"),
    "a drive": (*adding("C:evil.py"), "'C:evil.py' is not the name"),
    "a backslash": (*adding("checkpoints/it-00000012/..\\evil"), "is not the name"),
    "a hidden name": (*adding(".lock"), "'.lock' is not the name"),
    "a module beside the run": (*adding("sitecustomize.py"), "'sitecustomize.py' is not the name"),
    "a folder": (*adding("checkpoints/"), "'checkpoints/' is not the name"),
    "a control character": (*adding("checkpoints/it-00000012/a\nb"), r"it-00000012/a\\nb' is not the name"),
    "a link": (*adding("code/modules/a.py", external_attr=LINK), "'code/modules/a.py' is not a file that is stored"),
    "a device": (
        *adding("code/modules/a.py", external_attr=(stat.S_IFCHR | 0o666) << 16),
        "is not a file that is stored as it is",
    ),
    "another case": (
        lambda members: [another("code/modules/A.py"), another("code/modules/a.py"), *members],
        None,
        "the names 'code/modules/[aA].py' and 'code/modules/[aA].py' differ only in case",
    ),
    "a member that is compressed": (
        *adding("code/modules/a.py", data=b"0" * 100_000, compress_type=zipfile.ZIP_DEFLATED),
        "is not a file that is stored as it is",
    ),
    "a member that is not listed": (
        lambda members: [another("code/modules/a.py"), *members],
        None,
        "its members are not those that archive.json lists",
    ),
    "a member that is missing": (lambda members: members[1:], None, "its members are not those that "),
    "no listing": (lambda members: members[:-1], None, "There is no item named 'archive.json'"),
    "a newer version": (
        lambda members: members,
        lambda content: content.update(format=2),
        "format 2 of archive.json is newer than this emrun supports",
    ),
    "a listing of another kind": (
        lambda members: members,
        lambda content: content.update(checkpoints={"..": {"names": [], "epoch": 0, "iteration": 0}}),
        "its members are not those that archive.json lists",
    ),
    "a name of a checkpoint that leads out": (
        lambda members: members,
        lambda content: next(iter(content["checkpoints"].values())).update(names=["../../x"]),
        "a name of a checkpoint is '../../x', but must be a name",
    ),
    "other bytes": (
        lambda members: [(info, data.replace(b"epoch", b"epocH", 1)) for info, data in members[:-1]] + members[-1:],
        None,
        "differs from its checksum",
    ),
    "a listing that was edited": (
        lambda members: [*members[:-1], (members[-1][0], members[-1][1].replace(b'"epoch": 3', b'"epoch": 4'))],
        None,
        "its members are not those that archive.json lists",
    ),
    "a listing that is no mapping": (lambda members: [*members[:-1], (members[-1][0], b"[1]")], None, "is damaged"),
    "a listing that is nested deeply": (
        lambda members: [*members[:-1], (members[-1][0], b"[" * 100_000)], None, "is damaged: ",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("what", BAD)
def test_an_archive_that_is_not_safe_is_refused_and_leaves_nothing(archive, tmp_path, what):
    change, listing, message = BAD[what]
    bad = rewritten(archive, tmp_path / "bad.zip", change, listing)
    with pytest.raises(UsageError, match=f"bad.zip .*{message}"):
        unpack(bad, tmp_path / "deep" / "got")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.zip"]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_is_there_twice_and_members_that_overlap_are_refused(archive, tmp_path):
    bad = rewritten(archive, tmp_path / "bad.zip", lambda members: [members[0], *members])
    with pytest.raises(UsageError, match="one after the other, each once"):
        unpack(bad, tmp_path / "got")
    with zipfile.ZipFile(archive) as source:
        size = max(info.file_size for info in source.infolist())
    old, new = size.to_bytes(4, "little"), (2**31).to_bytes(4, "little")
    (tmp_path / "bomb.zip").write_bytes(archive.read_bytes().replace(old + old, new + new))
    with pytest.raises(UsageError, match="one after the other, each once"):
        unpack(tmp_path / "bomb.zip", tmp_path / "got")


def test_a_file_of_another_format_or_that_was_cut_is_refused_and_leaves_nothing(archive, tmp_path):
    whole = archive.read_bytes()
    with tarfile.open(tmp_path / "tar.zip", "w") as tar:
        tar.add(archive, "a")
    (tmp_path / "text.zip").write_text("dataset: {}")
    (tmp_path / "empty.zip").write_bytes(b"")
    zipfile.ZipFile(tmp_path / "other.zip", "w").close()
    for cut in (10, len(whole) // 2, len(whole) - 1):
        (tmp_path / f"cut-{cut}.zip").write_bytes(whole[:cut])
    (tmp_path / "begin.zip").write_bytes(whole[200:])
    files = sorted(tmp_path.iterdir())
    for file in files:
        with pytest.raises(UsageError, match=file.name) as raised:
            unpack(file, tmp_path / "got")
        assert raised.value.exit_status == 2
    assert sorted(tmp_path.iterdir()) == files


def test_a_place_that_is_not_empty_or_in_a_run_and_a_full_disk_are_refused(archive, run, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for place, message in (
        (tmp_path, "is not an empty directory"),
        (tmp_path / "file", "is not an empty directory"),
        (run.output_dir / "got", "is a run directory, and a run cannot lie in another one"),
    ):
        with pytest.raises(UsageError, match=message):
            unpack(archive, place)
    with pytest.raises(UsageError, match="there is no file"):
        unpack(tmp_path / "none.zip", tmp_path / "got")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10, 10, 10))
    with pytest.raises(StorageError, match="the disk is full") as raised:
        unpack(archive, tmp_path / "got")
    assert raised.value.exit_status == 74
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_fails_while_a_member_is_written_leaves_nothing(archive, tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match="the disk is full"):
        unpack(archive, tmp_path / "deep" / "got")
    assert list(tmp_path.iterdir()) == []


CODE = {
    "my_parts.py": """
import torch
from my_other import WIDTH
from emrun.datasets.majority import Majority


class Data(Majority):
    pass


def net():
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 1), torch.nn.Dropout(0.5), torch.nn.Flatten(0))
""",
    "my_other.py": "WIDTH = 11\n",
}
OF_MINE = {
    **CONFIG,
    "dataset": {"class": "my_parts.Data", "n": 50},
    "model": {**CONFIG["model"], "module": {"class": "my_parts.net"}},
    "hooks": ["ComputeStats", {"SaveEvery": {"n_epochs": 1}}, {"StopAfter": {"epochs": 2}}],
}


def test_an_archive_is_unpacked_elsewhere_verified_and_resumed_to_the_same_bits(emrun, emrun_here, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    for name, text in CODE.items():
        (project / name).write_text(text)
    (project / "c.yaml").write_text(json.dumps(OF_MINE))
    assert emrun_here("train", "-q", "c.yaml", "--output-dir", "run", cwd=project).returncode == 0
    whole = files_in(project / "run")
    last = (project / "run" / "checkpoints" / "latest").readlink()
    made = emrun_here(
        "export", "-q", "run", "--to", "archive", "--checkpoint", "epoch-1", "-o", "../a.zip", cwd=project
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.splitlines()[1].startswith("checkpoint it-00000004 (epoch-1, latest): 1 epoch, ")
    shutil.rmtree(project)

    place = tmp_path / "else"
    place.mkdir()
    done = emrun_here("init", "got", "--from", "../a.zip", cwd=place)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "resume it with: emrun resume got"
    assert "emrun init DIR --from ../a.zip" in made.stdout
    done = emrun("verify-run", "-q", "got", cwd=place)  # which forks there, and begins two new Pythons from here
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("to the last bit") == 2
    done = emrun_here("resume", "-q", "got", "--checkpoint", "epoch-1", cwd=place)
    assert done.returncode == 0, done.stderr
    assert (place / "got" / "checkpoints" / "latest").readlink() == last
    for name in ("steps.jsonl", f"checkpoints/{last}/model.safetensors"):
        assert (place / "got" / name).read_bytes() == whole[name]


def test_a_name_that_is_neither_a_sample_nor_an_archive_gets_the_nearest(tmp_path):
    from click.testing import CliRunner

    from emrun.cli.init import init

    (tmp_path / "run.tar").touch()
    for name, message in (
        ("my_projekt", "did you mean 'my_project'?"),
        (str(tmp_path / "run.tar"), "run.tar is not the name of an archive, which ends in .zip"),
    ):
        done = CliRunner().invoke(init, [str(tmp_path / "got"), "--from", name])
        assert (done.exit_code, message in " ".join(done.output.split())) == (2, True)
