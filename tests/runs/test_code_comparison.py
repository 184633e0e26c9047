"""The records of what two runs were made from, also when they are somebody else's."""

import json

import pytest

from emrun.base.errors import StorageError
from emrun.runs.code_comparison import compare_code
from emrun.storage.code.files import FORMAT, Code, sha256_of, write_code

SOURCE = b"import torch\n\nWIDTH = 32\n"


@pytest.fixture
def record(tmp_path):
    """Return a function that writes a record of code, and returns the run directory."""

    def write(run, source=SOURCE, *, place="code", **others):
        modules = {"my.net": {"file": "net.py", "sha256": sha256_of(source)}} if source is not None else {}
        files = {"modules/my/net.py": source} if source is not None else {}
        (tmp_path / run).mkdir(exist_ok=True)
        content = {"python": "3.11", "repositories": [], "modules": modules, "packages": {"numpy": "2.0"}, **others}
        write_code(tmp_path / run / place, Code({"format": FORMAT, **content, "problems": []}, files))
        return tmp_path / run

    return write


def test_equal_code_has_no_differences(record):
    found = compare_code(record("a"), record("b"))
    assert found == {"modules": [], "packages": [], "python": None, "repositories": None}


def test_a_changed_module_has_a_unified_diff(record):
    found = compare_code(record("a"), record("b", SOURCE.replace(b"32", b"64")))
    (module,) = found["modules"]
    assert (module["name"], module["change"]) == ("my.net", "changed")
    assert module["diff"].split("\n")[-2:] == ["-WIDTH = 32", "+WIDTH = 64"]


def test_modules_and_packages_of_one_side_are_named(record):
    found = compare_code(record("a"), record("b", None, packages={"torch": "2.6"}))
    assert found["modules"] == [{"name": "my.net", "change": "only in a", "diff": None}]
    assert found["packages"] == [{"name": "numpy", "a": "2.0", "b": None}, {"name": "torch", "a": None, "b": "2.6"}]


def test_another_python_and_another_commit_are_named(record):
    repositories = [
        {"directory": "here", "commit": "f00", "sha256": None},
        {"directory": "there", "commit": "ba5", "sha256": sha256_of(b"patch")},
    ]
    found = compare_code(
        record("a", repositories=repositories[:1]), record("b", python="3.12", repositories=repositories[1:])
    )
    assert found["python"] == {"a": "3.11", "b": "3.12"}
    assert [each["commit"] for side in "ab" for each in found["repositories"][side]] == ["f00", "ba5"]


def test_the_newest_record_counts(record):
    record("a")
    a = record("a", SOURCE.replace(b"32", b"64"), place="code-2")
    assert [each["name"] for each in compare_code(a, record("b"))["modules"]] == ["my.net"]


def test_a_run_without_a_readable_record_is_not_compared(record, tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(StorageError, match="is not recorded"):
        compare_code(record("a"), tmp_path / "none")
    b = record("b")
    (b / "code" / "record.json").write_text(json.dumps({"format": 2}))
    with pytest.raises(StorageError, match="is damaged, or a newer emrun wrote it"):
        compare_code(tmp_path / "a", b)


@pytest.mark.parametrize("is_file", [True, False])
def test_a_source_behind_a_link_is_not_read(is_file, record, tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "net.py").write_text("TOKEN = 1\n")
    b = record("b", b"TOKEN = 2\n")
    place = b / "code" / "modules" / "my"
    (place / "net.py").unlink()
    if is_file:
        (place / "net.py").symlink_to(tmp_path / "secret" / "net.py")
    else:
        place.rmdir()
        place.symlink_to(tmp_path / "secret")
    (module,) = compare_code(record("a"), b)["modules"]
    assert (module["change"], module["diff"]) == ("changed", None)


def test_the_name_of_a_module_is_not_a_path(record, tmp_path):
    (tmp_path / "outside.py").write_text("TOKEN = 1\n")
    runs = [record(name) for name in "ab"]
    for index, run in enumerate(runs):
        path = run / "code" / "record.json"
        content = json.loads(path.read_text())
        content["modules"]["../../../outside"] = {"file": "outside.py", "sha256": str(index)}
        path.write_text(json.dumps(content))
    (module,) = compare_code(*runs)["modules"]
    assert (module["name"], module["diff"]) == ("../../../outside", None)


def test_a_source_that_is_too_long_is_not_compared_by_lines(record):
    long = b"x = 1\n" * 6_000
    (module,) = compare_code(record("a", long), record("b", long + b"x = 2\n"))["modules"]
    assert (module["change"], module["diff"]) == ("changed", None)
