"""Configs and overrides made at random, most of them wrong: each is accepted or refused at a position.

No guard was taken out by hand for these: the wrong configs of tests/wrong_configs each show one.
"""

import random
import shlex
import string
import sys
from pathlib import Path

import pytest
from campaign import thinned

from emrun.base.errors import ConfigError, exit_status
from emrun.config.config import load_config
from emrun.config.import_finder import Imported, locate
from emrun.config.names import short_names
from emrun.config.plan import check_statically
from emrun.config.sections import SECTIONS
from emrun.config.source_finder import Unimported

SAMPLES = Path(__file__).parent.parent.parent / "sample_configs"
SHARED = Unimported()
CONFIG = (SAMPLES / "majority.yaml").read_text(encoding="utf-8")
WORDS = ("dataset", "model", "hooks", "class", "import", "args", "seed", "eval", "main_loop", "module", "extends", "lr")
SCALARS = (
    "3", "-1", "1e400", "0x_", "9" * 5000, ".nan", "null", "yes", "true", "~", "''", "'x", '"\\x"', "x: y",
    "Majority", "- a",
    "os.path", "torch.nn.Linear", "torch.nn.Lin", "a..b", "!!python/object:os.system x", "!x y", "&a 1", "*a", "*b",
    "@", "`",
    "${", "$${x}", "'${seed}'", "'${name}'", "'${env:NOT_THERE}'", "'${env:NOT_THERE,3}'", "'${model}'", "2001-01-01",
    "? [a]", "<<", "%", "|", ">-", "0o8", "1_000", "\t", "\u00e9", "\ufeff", "\u2028", "\x07", "\ud7ff", "[", "}", "#",
)  # fmt: skip
BROKEN = (
    b"a: &a [*a]", b"a: &a {b: *a}", b"\xff\xfe", b"a: \x00", b"\x00" * 50, b"a: 1\na: 2", b"? {a: b}\n: c",
    b"---\n---\n",
    b"a: b: c", b"\ta: 1", b"a:\n\t- b", b"<<: *a", b"<<: 3", b"<<: [{a: 1}, 3]", b"%YAML 1.1\n---\na: 1", b"[" * 3000,
    b"{" * 3000, b"- " * 2000, b"a: " + b"9" * 6000, b"!!binary x", b"a: !!set {}", b"", b"#", b"...", b"--- |\n x",
    b"a: '${b}'\nb: '${a}'", b"a: '${a.b.c}'", b"a: {b: '${a}'}", b"\xef\xbb\xbfa: 1", b"\xc3\x28", b"a: \xed\xa0\x80",
    b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(b"b%d: &b%d [%s]\n" % (n, n,
    b",".join([b"*b%d" % (n - 1) if n else b"*a"] * 9))
    for n in range(8)), b"? [1, 2]\n: 3", b"1: 2\n1.0: 3", b"true: 1\nnull: 2", b"a: *missing", b"&a", b"extends: .",
    b"extends: [c.yaml]", b"extends: '\\0'", b'extends: "\\0"', b"extends: {a: b}", b"extends: /dev/null/x",
)  # fmt: skip

PARTS = [0, *(pytest.param(part, marks=pytest.mark.campaign) for part in (1, 2, 3))]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Each test works in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("emrun.config.plan.Unimported", lambda: SHARED)  # torch's files are read once


def verdict(content, overrides=()):
    """Return the error about a config, None when phase one accepts it; any other error fails the test."""
    if content is not None:
        Path("c.yaml").write_bytes(content)
    try:
        check_statically(load_config(Path("c.yaml"), overrides), evaluations=True)
    except ConfigError as error:
        assert exit_status(error) == 2
        assert error.problems
        assert all(problem.position is not None and str(problem.position) for problem in error.problems), str(error)
        str(error).encode()
        return error
    return None


def tree(generator, depth=0):
    """Return a value at random, as YAML within brackets."""
    kind = generator.random()
    if kind < 0.35 and depth < 6:
        keys = [generator.choice((*WORDS, generator.choice(SCALARS))) for _ in range(generator.randrange(5))]
        return "{" + ", ".join(f"{key}: {tree(generator, depth + 1)}" for key in keys) + "}"
    if kind < 0.5 and depth < 6:
        return "[" + ", ".join(tree(generator, depth + 1) for _ in range(generator.randrange(4))) + "]"
    return generator.choice(SCALARS)


def random_config(generator):
    """Return a config at random: nothing but chance, one that has been edited, or a known evil."""
    kind = generator.randrange(4)
    if kind == 0:
        lines = [f"{generator.choice(WORDS)}: {tree(generator)}" for _ in range(generator.randrange(6))]
        return "\n".join(lines).encode("utf-8", "surrogatepass")
    if kind == 1:
        lines = CONFIG.splitlines()
        for _ in range(generator.randrange(1, 4)):
            index = generator.randrange(len(lines))
            before = lines[index].partition(":")[0]
            lines[index] = f"{before}: {tree(generator)}"
        return "\n".join(lines).encode("utf-8", "surrogatepass")
    content = bytearray(CONFIG.encode())
    if kind == 2:
        for _ in range(generator.randrange(1, 5)):
            at = generator.randrange(len(content))
            content[at : at + generator.randrange(3)] = generator.choice(
                (b"", b"\x00", b"\xff", b"\t", b":", b"{", b"]", b"'", b"&a ", b"*a", b"\n", b"- ", b"#", b"!", b"x")
            )
        return bytes(content)
    evil = generator.choice(BROKEN)
    return evil if generator.random() < 0.5 else bytes(content) + b"\n" + evil


OVERRIDES = ("seed", "model.optimizer.lr", "model.module.args.0", "hooks.StopAfter.epochs", "hooks.0", "hooks.9.x",
    "hooks",
    "dataset.class", "eval.valid.hooks", "~hooks.SaveBest", "~seed", "~model", "~hooks.7", "~x.y", "a..b", "", "~",
    ".", "x",
    "model.module", "main_loop.extra_streams.0", "hooks.LogVariables", "extends", "~hooks.0", "a" + ".a" * 200,
    "hooks.-1",
)  # fmt: skip


def random_overrides(generator):
    found = []
    for _ in range(generator.randrange(1, 4)):
        key = generator.choice(OVERRIDES)
        value = "" if key.startswith("~") and generator.random() < 0.9 else f"={tree(generator)}"
        text = key + (value if generator.random() < 0.95 else "")
        if generator.random() < 0.2:
            at = generator.randrange(len(text) + 1)
            text = text[:at] + generator.choice(string.printable) + text[at:]
        found.append(text)
    return found


@pytest.mark.timeout(7200)
@pytest.mark.fault("configs at random: trees, edits, cycles, bombs, bad encodings", share=2)
@pytest.mark.parametrize("part", PARTS)
def test_a_config_at_random_is_accepted_or_refused_at_a_position(trials, part):
    refused = []
    for trial in trials(range(part, 100_000, 4), small=75, together=True):
        with trial, trial.telling():
            refused.append(verdict(random_config(trial.random)))
    assert sum(error is not None for error in refused) >= len(refused) / 2


@pytest.mark.timeout(7200)
@pytest.mark.fault("overrides at random")
@pytest.mark.parametrize("part", PARTS)
def test_an_override_at_random_is_accepted_or_refused_by_its_name(trials, part):
    Path("c.yaml").write_text(CONFIG)
    refused = []
    for trial in trials(range(part, 20_000, 4), small=30, together=True):
        with trial, trial.telling():
            refused.append(verdict(None, random_overrides(trial.random)))
    assert len(refused) / 5 <= sum(error is not None for error in refused) <= len(refused)


@pytest.mark.campaign
def test_each_known_evil_is_refused():
    accepted = [evil for evil in BROKEN if verdict(evil) is None]
    assert accepted == []


@pytest.mark.timeout(7200)
@pytest.mark.fault("the command gets a wrong config or override")
def test_the_command_refuses_them_with_status_2_and_without_a_traceback(tmp_path, small, trials):
    for trial in trials(range(1000), small=10):
        content, overrides, error = CONFIG.encode(), [], None
        while error is None:
            content = CONFIG.encode() if trial.case % 2 else random_config(trial.random)
            overrides = random_overrides(trial.random) if trial.case % 2 else []
            if not any("\0" in text or text.startswith("-") for text in overrides):
                error = verdict(content, overrides)
        with trial, trial.telling():
            done = small.command("train", "c.yaml", *overrides, cwd=tmp_path)
            assert done.returncode == 2, (content, shlex.join(overrides), done.stderr)
            assert done.stderr
            assert "Traceback" not in done.stderr


# Misspelt names


def keys_of(target, without=()):
    return [name for name in Imported().parameters(locate(target)).named if name not in without]


def misspellings():
    """Yield a config with @ in a line of its own where a name belongs, and the names that may stand there."""
    dataset, model = "dataset: {class: Majority}\n", "model:\n  module: {class: torch.nn.ReLU}\n"
    both = dataset + model
    yield "@: {class: Majority}\n" + model, ["dataset"]
    yield dataset + model.replace("model", "@", 1), ["model"]
    yield "@: null\n" + both, [key for key in SECTIONS if key not in ("dataset", "model")]
    loop = keys_of("emrun.loop.main_loop.MainLoop", ("self", "model", "dataset", "hooks", "run", "seed", "unknown"))
    yield both + "main_loop:\n  @: null\n", loop
    for kind in short_names("dataset"):
        found = keys_of(f"emrun.datasets.{kind}", ("output_dir",))
        yield model + f"dataset:\n  class: {kind}\n  @: null\n", found
    for kind in short_names("hook"):
        found = keys_of(f"emrun.hooks.{kind}", ("model", "dataset", "output_dir"))
        if found:
            yield both + f"hooks:\n  - {kind}:\n      @: null\n", found
    for kind in ("AdamW", "SGD"):
        found = keys_of(f"torch.optim.{kind}", ("params",))
        yield f"{both}  optimizer:\n    class: {kind}\n    @: null\n", found
    text = "dataset: {class: Majority}\nmodel:\n  @: {class: torch.nn.ReLU}\n"
    yield text, keys_of("emrun.TorchModel", ("dataset", "output_dir"))
    yield both + "hooks:\n  - @\n", short_names("hook")
    yield model + "dataset:\n  class: @\n", short_names("dataset")
    for key, package in (("optimizer", "torch.optim"), ("scheduler", "torch.optim.lr_scheduler")):
        yield f"{both}  {key}:\n    class: @\n", Unimported().classes(package)


def one_edit(name, generator):
    """Return a name with a letter left out, added, replaced, or swapped with the next."""
    at, letter = generator.randrange(len(name)), generator.choice(string.ascii_lowercase)
    kind = generator.randrange(4)
    if kind == 3:
        at = max(0, min(at, len(name) - 2))
        return name[:at] + name[at : at + 2][::-1] + name[at + 2 :]
    return name[:at] + ("", letter + name[at], letter)[kind] + name[at + 1 :]


@pytest.mark.parametrize(("edits", "step", "least"), thinned([(1, 16, 20), (1, 1, 70), (6, 1, 420)], [(1, 16, 20)]))
def test_a_misspelt_name_is_reported_at_its_line_and_nearly_always_with_the_right_one(edits, step, least):
    """Each edit of a name leaves out, adds or replaces a letter, or swaps two; `step` tells which names are tried."""
    generator = random.Random("typos")
    tried = right = 0
    wrong = []
    for text, names in misspellings():
        line = text[: text.index("@")].count("\n") + 1
        for name in sorted(names)[::step]:
            typos = {one_edit(name, generator) for _ in range(edits)}
            for typo in sorted(typo for typo in typos if typo.isidentifier() and typo.lower() not in _folded(names)):
                error = verdict(text.replace("@", typo).encode())
                assert error is not None, (text, typo)
                here = [each for each in error.problems if each.position.line == line and repr(typo) in each.message]
                assert here, (typo, str(error))
                tried += 1
                right += f"did you mean {name!r}?" in here[0].message
                if f"did you mean {name!r}?" not in here[0].message:
                    wrong.append((name, typo, here[0].message[:90]))
    assert tried > least
    assert right / tried >= 0.9, (right, tried, wrong)


def _folded(names):
    return {name.lower().replace("_", "") for name in names} | {name.lower() for name in names}
