"""Temporary folders and how they are deleted."""

from emrun.base.temporary import temporary_folder


def test_a_temporary_folder_is_deleted_at_the_end_of_its_block(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with temporary_folder("check") as folder:
        (folder / "file").touch()
        assert list(tmp_path.iterdir()) == [folder]
        assert folder.name.startswith("emrun-check-")
    assert list(tmp_path.iterdir()) == []
