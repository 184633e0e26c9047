"""Temporary folders and how they are deleted."""

from emrun.base import temporary


def folders(place):
    return sorted(path.name for path in place.glob("emrun-*"))


def test_a_temporary_folder_is_deleted_at_the_end_of_its_block(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with temporary.TemporaryFolder("check") as folder:
        assert folders(tmp_path) == [folder.name]
        assert folder.name.startswith("emrun-check-")
    assert folders(tmp_path) == []


def test_only_temporary_folders_that_are_not_locked_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    temporary._clear_temporary_folders.cache_clear()
    for name in ("emrun-left", "emrun-notes", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    for name in ("emrun-left", "other"):
        (tmp_path / name / ".emrun").touch()
    (tmp_path / "emrun-link").symlink_to("other")
    held = temporary.TemporaryFolder()
    assert folders(tmp_path) == sorted(["emrun-link", "emrun-notes", held.path.name])
    assert (tmp_path / "other" / "file").exists()
    temporary._clear_temporary_folders.cache_clear()
    temporary.TemporaryFolder().delete()
    assert held.path.exists()
    held.delete()
