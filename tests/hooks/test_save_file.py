"""SaveFile: copies in the run directory, which a resume and an evaluation leave as they are."""

import pytest

from emrun import create_training, resume_training
from emrun.base.errors import ArgumentError, ConfigError, StorageError
from emrun.hooks import SaveFile
from emrun.training.create import train
from emrun.training.evaluate import evaluate


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """Go to a directory with two files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tokenizer.json").write_bytes(bytes(range(256)) * 5000)
    return tmp_path


@pytest.fixture
def begun(project, digits_config):
    """Train for an epoch with the hook; return the run directory."""
    hooks = [{"SaveFile": {"files": ["labels.txt", "data/tokenizer.json"]}}, {"StopAfter": {"epochs": 1}}]
    train(create_training(digits_config(hooks, batch_size=500), output_dir=project / "run"))
    return project / "run"


def test_the_files_are_copied(begun, project):
    assert sorted(path.name for path in (begun / "files").iterdir()) == ["labels.txt", "tokenizer.json"]
    assert (begun / "files" / "labels.txt").read_text() == "cat\ndog\n"
    assert (begun / "files" / "tokenizer.json").read_bytes() == (project / "data" / "tokenizer.json").read_bytes()


def test_a_resume_keeps_the_copies_and_names_what_has_changed(begun, project, caplog):
    (project / "labels.txt").write_text("cat\nrat\n")
    train(resume_training(begun, ["hooks.StopAfter.epochs=2"]))
    assert (begun / "files" / "labels.txt").read_text() == "cat\ndog\n"
    told = [each for each in caplog.messages if "SaveFile" in each]
    assert told == [f"SaveFile: {project}/labels.txt has changed since the run began; {begun}/files/labels.txt is kept"]


def test_a_resume_and_an_evaluation_need_only_the_copies(begun, project):
    (project / "labels.txt").unlink()
    train(resume_training(begun, ["hooks.StopAfter.epochs=2"]))
    evaluate(begun, "valid")
    assert not (begun / "eval" / "valid-1" / "files").exists()


def test_the_yaml_in_its_docstring_trains(train_digits, in_docstring, project):
    (project / "tokenizer.json").write_text("{}")
    run = train_digits(in_docstring(SaveFile), batch_size=500).output_dir
    assert len(list((run / "files").iterdir())) == 2


@pytest.mark.parametrize(
    ("files", "argument", "message"),
    [
        ("labels.txt", "files", "'labels.txt' is not a list of names"),
        (["labels.txt", "lables.txt"], "files[1]", "there is no file 'lables.txt' (the current directory is "),
        (["data"], "files[0]", "'data' is a directory; list its files"),
        (["labels.txt", "data/labels.txt"], "files[1]", "there are two files with the name 'labels.txt'; rename one"),
    ],
)
def test_wrong_files_are_errors_at_once(files, argument, message, project):
    with pytest.raises(ArgumentError) as caught:
        SaveFile(files, output_dir=project / "run")
    assert caught.value.argument == argument
    assert message in str(caught.value)


def test_a_missing_file_is_reported_at_its_place_and_no_run_is_begun(project, digits_config):
    with pytest.raises(ConfigError, match=r"hooks\[0\].SaveFile.files\[0\]: there is no file 'missing.txt'"):
        create_training(digits_config([{"SaveFile": {"files": ["missing.txt"]}}]), output_dir=project / "run")
    assert not (project / "run").exists()


def test_a_disk_that_is_full_leaves_no_part_of_a_file(project, digits_config, monkeypatch):
    hooks = [{"SaveFile": {"files": ["labels.txt"]}}, {"StopAfter": {"epochs": 1}}]
    training = create_training(digits_config(hooks), output_dir=project / "run")

    def full(source, place):
        place.write_text("c")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(StorageError, match=r"cannot write .*labels\.txt: the disk is full"):
        training.main_loop.run_training()
    assert not list((project / "run" / "files").iterdir())
