"""The commands that look at a config without training: `config`, `dataset`, `bench`, `show`."""

import itertools
import json
import re
import sys

import pytest
from campaign import thinned
from click.testing import CliRunner
from parsing import LOOKUP
from ruamel.yaml import YAML

from emrun import create_dataset
from emrun.base.errors import ConfigError
from emrun.cli import emrun as commands
from emrun.cli.bench import _choice
from emrun.config.catalogue import PLACES, listing
from emrun.config.json_schema import config_schema
from emrun.config.names import short_names
from emrun.config.source_finder import Unimported
from emrun.diagnosis.stream_bench import Bench, Setting, Speed, StreamBench
from emrun.stream_context import StreamContext

BASE = """\
seed: 3
dataset:
  class: Digits
  batch_size: 50
model:
  module: {class: torch.nn.Linear, in_features: 64, out_features: "${env:EMRUN_TEST_WIDTH,10}"}
  optimizer: {class: SGD, lr: 0.1}
hooks:
  - StopAfter: {epochs: 5}
"""
CONFIG = """\
extends: base.yaml
dataset:
  flat: true
model:
  optimizer: {lr: "${rate}"}
rate: 0.5
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def test_a_config_is_printed_merged(project, emrun_here):
    done = emrun_here("config", "config.yaml", "hooks.StopAfter.epochs=2")
    assert done.returncode == 0, done.stderr
    found = YAML(typ="safe").load(done.stdout)
    assert found["dataset"] == {"class": "Digits", "batch_size": 50, "flat": True}
    assert found["model"]["optimizer"] == {"class": "SGD", "lr": "${rate}"}
    assert found["hooks"] == [{"StopAfter": {"epochs": 2}}]
    assert "extends" not in found
    assert sorted(path.name for path in project.iterdir()) == ["base.yaml", "config.yaml"]


def test_another_class_keeps_the_learning_rate(project, monkeypatch):
    monkeypatch.chdir(project)
    for name in ("AdamW", "Sgd", "torch.optim.SGD"):
        overrides = [f"model.optimizer.class={name}"]
        done = CliRunner().invoke(commands, ["config", "config.yaml", *overrides, "--resolved"])
        assert YAML(typ="safe").load(done.stdout)["model"]["optimizer"] == {"class": name, "lr": 0.5}


def test_it_can_be_trained_from_what_is_printed(project, emrun_here):
    (project / "again.yaml").write_text(emrun_here("config", "config.yaml", "--resolved").stdout)
    again = emrun_here("config", "again.yaml", "--resolved")
    assert again.stdout == (project / "again.yaml").read_text()


def test_interpolations_are_resolved_but_the_environment_is_not_printed(project, emrun_here, monkeypatch):
    monkeypatch.setenv("EMRUN_TEST_WIDTH", "secret")
    done = emrun_here("config", "config.yaml", "--resolved")
    found = YAML(typ="safe").load(done.stdout)
    assert found["model"]["optimizer"]["lr"] == 0.5
    assert found["model"]["module"]["out_features"] == "${env:EMRUN_TEST_WIDTH,10}"
    assert "secret" not in done.stdout


def test_origins_tell_file_and_line_or_override(project, emrun_here):
    done = emrun_here("config", "config.yaml", "--origins", "main_loop.buffer=2")
    origins = {line.split()[0]: line.split(maxsplit=2)[2] for line in done.stdout.splitlines()}
    assert origins["dataset.batch_size"] == "base.yaml:4:15"
    assert origins["dataset.flat"] == "config.yaml:3:9"
    assert origins["model.optimizer.lr"] == "config.yaml:5:19"
    assert origins["hooks.0.StopAfter.epochs"] == "base.yaml:9:25"
    assert origins["main_loop.buffer"] == "override 'main_loop.buffer=2'"
    assert origins["dataset.shift"] == "default of Digits"
    assert origins["model.optimizer.momentum"] == "default of SGD"
    assert origins["model.module.bias"] == "default of torch.nn.Linear"
    assert origins["main_loop.skip_zeroth_epoch"] == "default of MainLoop"
    assert origins["hooks.0.StopAfter.minutes"] == "default of StopAfter"
    keys = list(origins)
    assert keys.index("dataset.shift") < keys.index("model.module.class")
    assert not {"model.optimizer.params", "hooks.0.StopAfter.model"} & set(keys)


def test_origins_of_a_config_that_cannot_be_used_are_shown_as_far_as_possible(project, monkeypatch):
    monkeypatch.chdir(project)
    for wrong in ("model=3", "dataset.class=Nothing", "hooks=3", "hooks=[3]", "main_loop=3", "name=${env:EMRUN_UNSET}"):
        done = CliRunner().invoke(commands, ["config", "config.yaml", "--origins", wrong], standalone_mode=False)
        assert (done.exception, done.return_value) == (None, 0), done.stderr
        assert f"override '{wrong}'" in done.stdout
        assert "default of " in done.stdout


def test_the_schema_is_printed_without_a_config(tmp_path, emrun_here, monkeypatch):
    schema = config_schema()
    monkeypatch.setattr("emrun.cli.config.config_schema", lambda: schema)  # which takes long
    done = emrun_here("config", "--schema")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == schema
    assert list(tmp_path.iterdir()) == []


@pytest.mark.campaign
def test_the_schema_is_made_without_torch(tmp_path, emrun, monkeypatch):
    monkeypatch.setattr(Unimported, "_lookup", LOOKUP)
    done = emrun("config", "--schema", env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == config_schema()
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "emrun.config.json_schema" in imported
    assert "torch" not in imported
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schema", "config.yaml"], "remove CONFIG and the other options"),
        (["--schema", "--resolved"], "remove CONFIG and the other options"),
        (["--origins", "--schema"], "remove CONFIG and the other options"),
        ([], "Missing argument 'CONFIG'."),
        (["--origins"], "Missing argument 'CONFIG'."),
    ],
)
def test_a_schema_is_of_all_configs_and_anything_else_of_one(project, emrun_here, arguments, message):
    done = emrun_here("config", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.startswith("Usage: emrun config")


def test_a_config_that_cannot_be_read_is_an_error(project, emrun_here):
    (project / "config.yaml").write_text("a: 1\na: 2\n")
    done = emrun_here("config", "config.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith("config.yaml:2:1")
    assert done.stdout == ""


def test_a_method_of_the_dataset_is_called(project, emrun_here):
    done = emrun_here("dataset", "stream_info", "config.yaml", "dataset.flat=false")
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[2:4]] == [["test", "image"], ["test", "label"]]
    assert "(1, 8, 8)" in done.stdout
    assert sorted(path.name for path in project.iterdir()) == ["base.yaml", "config.yaml"]


def test_the_dataset_needs_neither_a_model_nor_an_output_directory(project, emrun_here):
    (project / "mine.py").write_text(
        "class Mine:\n    def __init__(self, n, output_dir):\n        self.n, self.output_dir = n, output_dir\n\n"
        "    def download(self):\n        print('downloaded', self.n, self.output_dir)\n"
    )
    (project / "config.yaml").write_text("dataset: {class: mine.Mine, n: 7}\n")
    done = emrun_here("dataset", "download", "config.yaml")
    assert (done.returncode, done.stdout) == (0, "downloaded 7 None\n")


def test_any_dataset_tells_of_its_streams(project, emrun_here):
    (project / "mine.py").write_text("class Mine:\n    def train_stream(self):\n        yield {'x': [1, 5]}\n")
    (project / "config.yaml").write_text("dataset: {class: mine.Mine}\n")
    done = emrun_here("dataset", "stream_info", "config.yaml")
    assert done.stdout.splitlines()[-1].split() == ["train", "x", "int64", "()", "1", "to", "5"]


def test_bench_prints_a_table_of_streams_and_settings_and_what_to_choose(project, emrun_here):
    done = emrun_here("bench", "config.yaml", "main_loop.extra_streams=[valid]", "--seconds", "0.02", "--step-ms=9")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["stream", "read", "batches/s", "first", "batch", "training", "waits"]
    streams = [line.split()[0] for line in lines[2 : lines.index("")]]
    assert len(streams) >= 8
    assert streams == ["train"] * (len(streams) // 2) + ["valid"] * (len(streams) // 2)
    assert re.match(r"choose .*: with a step of 9 ms, training waits \d+% of its time for stream 'train', ", lines[-2])
    assert re.match(
        r"as the config is \(.*\), the stream gives \S+ batches/s, the model takes 111: training waits", lines[-1]
    )
    assert sorted(path.name for path in project.iterdir()) == ["base.yaml", "config.yaml"]


@pytest.mark.campaign
def test_bench_of_a_dataset_alone_says_what_it_takes_to_choose(project, emrun_here):
    (project / "mine.py").write_text(
        "class Mine:\n    def bench(self):\n        return 'my own'\n\n"
        "    def train_stream(self):\n        yield {'x': [1, 5]}\n\n    def test_stream(self):\n        return []\n"
    )
    (project / "config.yaml").write_text("dataset: {class: mine.Mine}\n")
    done = emrun_here("bench", "config.yaml", "--seconds=0.05", "--all")
    assert done.returncode == 0, done.stderr
    assert "my own" not in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["test", "no", "read-ahead", "no", "batches"] in rows
    assert "stream 'train' does not get its rows from ctx.batches" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("is not known: the config has no model; use --step-ms")
    assert "x>0" in emrun_here("bench", "config.yaml", "--seconds=0").stderr


def test_bench_ends_with_what_a_stream_raises(project, emrun_here):
    (project / "mine.py").write_text(
        "class Mine:\n    def train_stream(self):\n        yield {'x': [1]}\n        1 / 0\n"
    )
    (project / "config.yaml").write_text("dataset: {class: mine.Mine}\n")
    done = emrun_here("bench", "config.yaml")
    assert (done.returncode, done.stdout) == (1, "")
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stream_info", "config.yaml", "--all"], "No such option '--all'"),
        (["stream_inf", "config.yaml"], "no method 'stream_inf'; did you mean 'stream_info'?"),
        (["num_batches", "config.yaml"], "no method 'num_batches'"),
        (["_secret", "config.yaml"], "no method '_secret'"),
        (["stream_info", "config.yaml", "dataset.batchsize=3"], "did you mean 'batch_size'?"),
        (["stream_info", "config.yaml", "~dataset"], "missing section 'dataset'"),
        (["stream_info", "nothing.yaml"], "nothing.yaml"),
    ],
)
def test_what_cannot_be_called_is_an_error(project, emrun_here, arguments, message):
    (project / "config.yaml").write_text("dataset: {class: Majority}\n")
    done = emrun_here("dataset", *arguments)
    assert done.returncode in (2, 74)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dataset_can_be_made_in_python():
    dataset = create_dataset({"seed": 1, "dataset": {"class": "Digits", "batch_size": 10}}, ["dataset.flat=true"])
    context = StreamContext("valid", seed=0)
    assert next(iter(dataset.valid_stream(context)))["image"].shape == (10, 64)
    with pytest.raises(ConfigError, match="did you mean 'flat'"):
        create_dataset({"dataset": {"class": "Digits", "flatt": True}})


def test_the_hooks_are_listed_with_what_they_do(emrun_here):
    done = emrun_here("show", "hooks")
    assert done.returncode == 0
    title, *lines = done.stdout.splitlines()
    assert title == "Hooks (entries of hooks):"
    assert [line.split()[0] for line in lines] == short_names("hook")
    assert all(len(line.split()) > 4 for line in lines)


def test_show_without_a_name_lists_every_kind(emrun_here):
    done = emrun_here("show")
    assert done.returncode == 0, done.stderr
    for kind, part in zip(PLACES, done.stdout.split("\n\n"), strict=True):
        title, *rows = part.splitlines()
        assert title == f"{kind.capitalize()} ({PLACES[kind]}):"
        assert [row.split()[0] for row in rows] == [name for name, _ in listing(kind)]


def test_a_listing_is_wrapped_on_a_terminal_and_has_a_line_for_each_name_in_a_pipe(monkeypatch):
    piped = CliRunner().invoke(commands, ["show", "schedules"]).stdout
    assert len(piped.splitlines()) == 1 + len(listing("schedules"))
    assert max(map(len, piped.splitlines())) > 80
    monkeypatch.setattr(sys.modules["emrun.cli.show"], "width", lambda stream: 80)
    assert max(map(len, CliRunner().invoke(commands, ["show"]).stdout.splitlines())) <= 80


def test_the_help_shows_each_command_in_one_group(emrun_here):
    shown = emrun_here("--help").stdout
    sections = {part.partition(":\n")[0]: part.partition(":\n")[2] for part in shown.split("\n\n")[3:]}
    names = {title: [line.split()[0] for line in text.splitlines()] for title, text in sections.items()}
    assert names == {
        "Train": ["init", "train", "resume", "eval", "predict", "export", "sweep"],
        "Look": ["check", "config", "show", "bench", "dataset", "completion"],
        "Compare": ["compare", "ls", "diff", "trace", "report", "prune"],
        "Prove": ["verify-resume", "verify-run", "replay"],
    }
    assert sorted(itertools.chain(*names.values())) == sorted(commands.commands)
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert "--seconds" not in emrun_here("dataset", "--help").stdout


@pytest.mark.parametrize("name", short_names("hook"))
def test_a_hook_is_explained_with_yaml_to_paste(name):
    done = CliRunner().invoke(commands, ["show", name.upper()])
    assert done.exit_code == 0
    assert f"- {name}" in done.stdout
    assert done.stdout.splitlines()[1] == ""


def test_a_hook_of_ones_own_is_explained(project, emrun_here):
    (project / "mine.py").write_text('class Mine:\n    """Does\n    it."""\n\n\nclass Silent:\n    pass\n')
    assert emrun_here("show", "mine.Mine").stdout == "Does\nit.\n"
    assert emrun_here("show", "mine.Silent").stdout == "mine.Silent has no docstring\n"


UNKNOWN = [
    ("StopAfte", "did you mean 'StopAfter'?"),
    ("mine.Nothing", "no module 'mine'"),
    ("a b", "'a b' is not a base, hook, dataset, model, optimizer, schedule or metric (`emrun show` lists them)"),
    ("digit", "did you mean 'Digits'?"),
    ("TorchModle", "did you mean 'TorchModel'?"),
    ("cosineannealing", "did you mean 'CosineAnnealingLR'?"),
    ("acuracy", "did you mean 'accuracy'?"),
    ("metric", "did you mean 'metrics'?"),
]


@pytest.mark.parametrize(("name", "message"), thinned(UNKNOWN, UNKNOWN[:4]))
def test_an_unknown_name_is_an_error_with_the_nearest_of_all_kinds(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(commands, ["show", name])
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


BROKEN = """
class Half:
    def train_stream(self):
        yield {"x": [1.0, 2.0]}

    def test_stream(self):
        yield {"x": [1.0, 2.0]}
        raise OSError("no such shard\\nsecond line")

    def valid_stream(self):
        return open("missing.csv")
"""


def test_stream_info_shows_the_other_streams_when_one_is_broken(tmp_path, emrun_here):
    (tmp_path / "half.py").write_text(BROKEN)
    (tmp_path / "config.yaml").write_text("dataset: {class: half.Half}\n")
    done = emrun_here("dataset", "stream_info", "config.yaml")
    assert done.returncode == 1
    rows = [line.split()[:2] for line in done.stdout.splitlines()[2:]]
    assert rows == [["test", "x"], ["train", "x"], ["valid", "no"]]
    errors = done.stderr.splitlines()
    assert errors[0].startswith("error: stream 'test' fails after 1 batch: OSError: no such shard (")
    assert errors[0].endswith("half.py:8)")
    assert errors[1].startswith("error: stream 'valid' fails after 0 batches: FileNotFoundError: no such")
    assert len(errors) == 2


def test_the_setting_to_choose_can_be_pasted_as_an_override():
    chosen = Speed(Setting(buffer=4, workers=2), 0.001, 0.001)
    stream = StreamBench("train", True, True, 100, [Speed(Setting(), 0.5, 0.5), chosen])
    text = _choice(Bench([stream], 0.01))
    assert text.startswith("choose `buffer: 4, workers: 2` (main_loop.buffer=4 main_loop.workers=2): ")
