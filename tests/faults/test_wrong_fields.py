"""Content of a run that nobody damaged but somebody changed, with a right checksum: each field, to what it cannot be.

`resume`, `eval` and `replay` say which field of which file is wrong, or go through where the value is a possible one.
They never show a traceback, never touch a file outside of the run, and leave the run as it was. What `state.pt` holds
may be any error, or train on; it touches no other file either.

Taken out once by hand, these made this fail: the check of the manifest's names, that of the manifest as a whole, of
`failure.json`, of the trace.
"""

import copy
import io
import json
import math
import shutil

import pytest
import torch
from ruamel.yaml import YAML

from emrun.storage.code.files import read_code
from emrun.storage.sealed import describe, json_digest

WRONG = {
    "gone": None,
    "None": None,
    "true": True,
    "minus one": -1,
    "huge": 2**70,
    "half": 0.5,
    "nan": math.nan,
    "text": "x",
    "outside": "../../victim.txt",
    "hidden": ".hidden",
    "directory": "it-00000013",
    "list": [],
    "nested": [[["../../victim.txt"]]],
    "mapping": {},
    "tensor": torch.zeros(3, 7),
    "bytes": b"1",
}
JSON_ONLY = [name for name in WRONG if name not in ("tensor", "bytes")]
OWN = ("train.log", ".lock", ".owner.json")
ELSEWHERE = "instead, set on_missing_variable: default"  # of a column with the name of no variable, a possible one
STATUSES = {"resume": (0, 2, 74), "eval": (0, 2, 74), "replay": (0, 1, 2, 74)}


def paths_in(content, depth=6):
    """Return the keys that lead to each value in mappings and lists."""
    found = [()]
    if depth and isinstance(content, dict):
        found += [(key, *rest) for key, value in content.items() for rest in paths_in(value, depth - 1)]
    elif depth and isinstance(content, list | tuple):
        found += [(index, *rest) for index, value in enumerate(content) for rest in paths_in(value, depth - 1)]
    return found


def changed(content, path, how):
    """Return content with another value, or none, at a path; or, of a list, with an entry more or less."""
    if not path:
        return {} if how == "gone" else copy.deepcopy(WRONG[how])
    key, *rest = path
    if isinstance(content, dict):
        copied = dict(content)
        if how == "gone" and not rest:
            del copied[key]
        else:
            copied[key] = changed(content[key], rest, how)
        return copied
    entries = list(content)
    if how == "gone" and not rest:
        del entries[key]
    else:
        entries[key] = changed(content[key], rest, how)
    return type(content)(entries)


def cases_of(content, hows, depth=6):
    return [(path, how) for path in paths_in(content, depth) for how in hows]


def rewrite_manifest(place, change):
    content = json.loads((place / "manifest.json").read_text())
    content.pop("sha256", None)
    content = change(content)
    if isinstance(content, dict):
        content["sha256"] = json_digest(content)
    (place / "manifest.json").write_text(json.dumps(content))


def rewrite_state(place, change, listed_in="manifest.json"):
    state = torch.load(place / "state.pt", weights_only=True)
    torch.save(change(state), place / "state.pt")
    facts = json.loads((place / listed_in).read_text())
    facts.pop("sha256")
    facts["files"]["state.pt"] = describe(place / "state.pt")
    (place / listed_in).write_text(json.dumps({**facts, "sha256": json_digest(facts)}))


def rewrite_facts(place, change):
    facts = json.loads((place / "failure.json").read_text())
    facts.pop("sha256")
    facts = change(facts)
    if isinstance(facts, dict):
        facts["sha256"] = json_digest(facts)
    (place / "failure.json").write_text(json.dumps(facts))


def rewrite_trace(directory, change):
    yaml, text = YAML(typ="safe", pure=True), io.StringIO()
    yaml.dump(change(yaml.load(directory / "trace.yaml")), text)
    (directory / "trace.yaml").write_text(text.getvalue())


def tree(directory):
    """Return what a directory holds, but for what every command writes."""
    return {
        path.relative_to(directory): path.readlink() if path.is_symlink() else path.read_bytes()
        for path in directory.rglob("*")
        if (path.is_symlink() or path.is_file()) and path.name not in OWN
    }


def attempt(small, trial, root, file, *arguments):
    """Run a command on `root/run`, whose file was changed, and check what is said and what is left."""
    (root / "victim.txt").write_text("precious")
    before = tree(root / "run")
    outside = sorted(root.iterdir())
    done = small.command(*arguments, cwd=root)
    with trial.telling():
        if file != "state.pt":
            assert "Traceback" not in done.stderr, done.stderr
            assert done.returncode in STATUSES[arguments[0]], done.stderr
        if file != "state.pt" and done.returncode in (2, 74):
            others = ("a resume cannot change", ELSEWHERE, "undo the change", "has no state.pt")
            assert any(words in done.stderr for words in (file, *others)), done.stderr
    assert (root / "victim.txt").read_text() == "precious"
    assert not (root / "victim.txt").is_symlink()
    shutil.rmtree(root / "forked", ignore_errors=True)
    assert sorted(root.iterdir()) == outside
    if file != "state.pt" and (
        (done.returncode == 2 and ELSEWHERE not in done.stderr)
        or arguments[0] == "replay"
        or (done.returncode, arguments[0]) == (74, "resume")
    ):
        assert tree(root / "run") == before
    return done


@pytest.fixture(scope="module")
def ended(small, tmp_path_factory):
    """Return a run that ended in the middle of an epoch."""
    place = tmp_path_factory.mktemp("ended")
    (place / "config.yaml").write_text(json.dumps(small.config, indent=2))
    hooks = "hooks.StopAfter={iterations: 13}"
    done = small.command("train", "-q", "config.yaml", hooks, "--output-dir", "whole", cwd=place)
    assert done.returncode == 0, done.stderr
    return place / "whole"


@pytest.fixture
def stopped(project, ended):
    """Return a directory with a run that ended in the middle of an epoch, and a copy of it to change."""
    shutil.copytree(ended, project / "whole", symlinks=True)
    return project


def fresh(project):
    shutil.rmtree(project / "run", ignore_errors=True)
    shutil.copytree(project / "whole", project / "run", symlinks=True)
    return (project / "run" / "checkpoints" / "latest").resolve()


RESUME = ("resume", "-q", "run", "hooks.StopAfter.iterations=16")


@pytest.mark.timeout(7200)
@pytest.mark.fault("a field of a manifest is changed, with a right checksum", share=2)
def test_a_manifest_with_a_wrong_field_is_refused_and_nothing_outside_is_touched(stopped, small, trials):
    content = json.loads((fresh(stopped) / "manifest.json").read_text())
    del content["sha256"]
    content["names"].append("best")
    cases = [(case, command) for case in cases_of(content, JSON_ONLY) for command in ("resume", "eval")]
    names = (
        ["../../victim.txt"],
        ["/tmp/x"],
        ["a/b"],
        ["."],
        [".."],
        ["it-00000001"],
        ["latest", "\n"],
        ["\0"],
        ["a" * 300],
    )
    cases += [((("names",), names), command) for names in names for command in ("resume", "eval")]
    for trial in trials(cases, small=1):
        ((path, how), command) = trial.case

        def change(content, path=path, how=how):
            content["names"].append("best")
            return {**content, "names": how} if isinstance(how, list) else changed(content, path, how)

        rewrite_manifest(fresh(stopped), change)
        arguments = RESUME if command == "resume" else ("eval", "-q", "run", "valid", "--checkpoint", "latest")
        with trial:
            done = attempt(small, trial, stopped, "manifest.json", *arguments)
            if isinstance(how, list):
                assert done.returncode == 2, done.stderr
                assert "names[" in done.stderr


@pytest.mark.timeout(7200)
@pytest.mark.fault("a field of state.pt is changed, with a right checksum", share=2)
def test_a_state_with_a_wrong_field_reaches_no_other_file(stopped, small, trials):
    content = torch.load(fresh(stopped) / "state.pt", weights_only=True)
    for trial in trials(cases_of(content, WRONG), small=1):
        rewrite_state(fresh(stopped), lambda state, case=trial.case: changed(state, *case))
        with trial:
            attempt(small, trial, stopped, "state.pt", *RESUME)


@pytest.mark.timeout(7200)
@pytest.mark.fault("a field of a trace is changed")
def test_a_trace_with_a_wrong_field_keeps_no_run_from_its_resume(stopped, small, trials):
    fresh(stopped)
    content = YAML(typ="safe", pure=True).load(stopped / "run" / "trace.yaml")
    for trial in trials(cases_of(content, JSON_ONLY, depth=2), small=1):
        fresh(stopped)
        rewrite_trace(stopped / "run", lambda trace, case=trial.case: changed(trace, *case))
        with trial:
            done = attempt(small, trial, stopped, "trace.yaml", *RESUME)
            assert done.returncode == 0, done.stderr


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.fault("a field of the record of the code is changed")
def test_a_record_of_the_code_with_a_wrong_field_keeps_no_run_from_its_resume(stopped, small, trials):
    fresh(stopped)
    content = json.loads((stopped / "run/code/record.json").read_text())
    kept = {**content, "modules": {"../../victim": {"file": "f", "sha256": None}}, "packages": {"torch": "1"}}
    cases = [case for case in cases_of(kept, JSON_ONLY, depth=3) if case[0] != ("packages", "torch")]
    for trial in trials(cases, small=1):
        fresh(stopped)
        (stopped / "run/code/record.json").write_text(json.dumps(changed(kept, *trial.case)))
        with trial:
            done = attempt(small, trial, stopped, "record.json", *RESUME)
            assert done.returncode == 0, done.stderr
            with trial.reading():
                assert read_code(max((stopped / "run").glob("code*"))) is not None


@pytest.mark.timeout(7200)
@pytest.mark.fault("a field of a capsule is changed, with a right checksum", share=2)
def test_a_capsule_with_a_wrong_field_is_refused(doomed, small, trials):
    failed = small.command("train", "-q", "config.yaml", "dataset.bad=[13]", "--output-dir", "whole", cwd=doomed)
    assert failed.returncode == 3, failed.stderr
    capsule = doomed / "whole" / "failures" / "1"
    facts = json.loads((capsule / "failure.json").read_text())
    del facts["sha256"]
    state = torch.load(capsule / "state.pt", weights_only=True)
    cases = [("failure.json", case) for case in cases_of(facts, JSON_ONLY, depth=3)]
    cases += [("state.pt", case) for case in cases_of(state, WRONG, depth=4)]
    for trial in trials(cases, small=1):
        file, case = trial.case
        shutil.rmtree(doomed / "run", ignore_errors=True)
        shutil.copytree(doomed / "whole", doomed / "run", symlinks=True)
        place = doomed / "run" / "failures" / "1"
        if file == "failure.json":
            rewrite_facts(place, lambda facts, case=case: changed(facts, *case))
        else:
            rewrite_state(place, lambda state, case=case: changed(state, *case), "failure.json")
        with trial:
            attempt(small, trial, doomed, file, "replay", "run")
