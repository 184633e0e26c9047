"""`emrun export` and `emrun.export`: programs that are compared outside of emrun, and the folder that is published."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from campaign import thinned
from exports.forked import let_fork
from samples import SAMPLES, SMALL_GPT, own_modules

import emrun
from emrun.cli import emrun as commands
from emrun.errors import ExportError, MissingExtra, StorageError, UsageError

NETS = """
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout


class Data:
    classes_names = ["<script>", "a|b", "---"]

    def rows(self, ctx):
        x = np.random.default_rng(1).normal(size=(20, 6)).astype(np.float32)
        for rows in ctx.batches(20, 8):
            values = x[rows]
            pictures = (np.abs(values) * 20).astype(np.uint8)
            tokens = (np.abs(values) * 5).astype(np.int32)
            yield {"x": values, "image": pictures, "tokens": tokens, "mask": values > 0, "y": np.asarray(rows) % 3}

    train_stream = valid_stream = rows


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 3)


class Several(Net):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 6)

    def forward(self, image, tokens, mask, y=None):
        logits = self.last(self.words(tokens).mean(2) * mask + image)
        outputs = {"logits": logits, "scaled": image, "largest": logits.argmax(1), "none": None}
        if y is not None:
            outputs["loss"] = cross_entropy(logits, y)
        return outputs


class Dropout(Net):
    def forward(self, x):
        return self.last(dropout(x, 0.5, True))


class NoEvaluation(Net):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def train(self, mode=True):
        return super().train(True)

    def forward(self, x):
        return self.last(self.drop(x))


class Draws(Net):
    def forward(self, x):
        return self.last(x + 1e-9 * torch.randn_like(x))


class Counts(Net):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.last(x) + self.calls


class Statistic(Net):
    def forward(self, x):
        return self.last(x - x.mean(0))


class Branch(Net):
    def forward(self, x):
        if x.sum() > 0:
            return self.last(x)
        return self.last(-x)


class Array(Net):
    def forward(self, x):
        return self.last(torch.from_numpy(x.detach().numpy()))


class Sizes(Net):
    def forward(self, x):
        return self.last(x.reshape(8, 6)) if len(x) == 8 else self.last(x)


class Recurrent(Net):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 6)
        self.gru = nn.GRU(6, 6, batch_first=True)

    def forward(self, tokens):
        return self.last(self.gru(self.words(tokens))[0][:, -1])


class Frozen(Net):
    def forward(self, x):
        return self.last(x) * (2 if torch.compiler.is_compiling() else 1)


class Lists(Net):
    def forward(self, x):
        return {"logits": self.last(x), "found": [each.sum().item() for each in x]}
"""
LOSS = {"class": "torch.nn.CrossEntropyLoss", "inputs": ["logits", "y"]}
SCALED = {"image": {"scale": 255, "mean": 0.4, "std": 0.2}, "tokens": "tokens", "mask": "mask", "y": "y"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains a module of `NETS` for an epoch, once, and returns the run."""
    place = tmp_path_factory.mktemp("runs")
    (place / "export_nets.py").write_text(NETS)
    sys.path.insert(0, str(place))
    made = {}

    def train(name, **model):
        if name not in made:
            given = {"module": {"class": f"export_nets.{name}"}, "optimizer": {"class": "SGD", "lr": 0.1}}
            if "inputs" not in model:
                given |= {"outputs": ["logits"], "loss": LOSS}
                given |= {"metrics": {"accuracy": {"import": "emrun.metrics.accuracy", "inputs": ["logits", "y"]}}}
            given |= model
            loop = {"extra_streams": ["valid"], "on_unused_sources": "ignore"}
            hooks = ["ComputeStats", "SaveBest", {"StopAfter": {"epochs": 1}}]
            config = {
                "seed": 1,
                "dataset": {"class": "export_nets.Data"},
                "model": given,
                "main_loop": loop,
                "hooks": hooks,
            }
            training = emrun.create_training(config, output_dir=place / name)
            training.main_loop.run_training()
            made[name] = place / name
        return made[name]

    yield train
    sys.path.remove(str(place))
    sys.modules.pop("export_nets", None)


@pytest.fixture(scope="module")
def several(trained, tmp_path_factory, warm):
    """A run of `Several`, and its export as a program of `torch.export`."""
    run = trained("Several", inputs=SCALED)
    place = tmp_path_factory.mktemp("several") / "new" / "folder"
    with pytest.MonkeyPatch.context() as patch:
        let_fork(patch, warm)
        return run, emrun.export(run, to="torch-export", output=place, license="mit")


def test_a_program_has_the_scaling_inside_and_neither_the_labels_nor_the_loss(several):
    _, export = several
    facts = json.loads((export.place / "export.json").read_text())
    assert export.files == ["model.pt2", "export.json", "README.md"]
    assert [(each["name"], each["dtype"], each["shape"]) for each in facts["inputs"]] == [
        ("image", "uint8", ["batch", 6]),
        ("tokens", "int64", ["batch", 6]),
        ("mask", "bool", ["batch", 6]),
    ]
    outputs = [(each["name"], each["shape"]) for each in facts["outputs"]]
    assert outputs == [("logits", ["batch", 3]), ("scaled", ["batch", 6]), ("largest", ["batch"])]
    assert facts["not_needed"] == ["y"]
    assert [each["examples"] for each in facts["comparison"]["batches"]] == [8, 8, 4, 7, 1]
    assert all(each["largest"] <= each["tolerance"] for each in facts["comparison"]["differences"].values())
    program = torch.export.load(export.place / "model.pt2").module()
    inputs = {"image": torch.full((3, 6), 51, dtype=torch.uint8)}
    inputs |= {"tokens": torch.zeros(3, 6, dtype=torch.int64), "mask": torch.ones(3, 6, dtype=torch.bool)}
    assert torch.allclose(program(inputs)["scaled"], torch.tensor((51 / 255 - 0.4) / 0.2))


@pytest.mark.parametrize("form", thinned(["onnx", "safetensors"], ["safetensors"]))
def test_the_description_has_the_values_of_references_and_numbers_of_the_data(tmp_path, monkeypatch, form):
    rows = "\n".join(f"{row},{row % 3},{'ab'[row % 2]}" for row in range(40))
    (tmp_path / "rows.csv").write_text(f"x,z,y\n{rows}\n")
    monkeypatch.chdir(tmp_path)
    given = "train: rows.csv, target: y, numbers: [x, z], epochs: 1, batch_size: 8"
    (tmp_path / "config.yaml").write_text(f"extends: emrun:tabular\nvars: {{{given}}}\nseed: 1\n")
    emrun.create_training("config.yaml", output_dir="run").main_loop.run_training()
    place = emrun.export("run", to=form, output=tmp_path / form).place
    facts = (place / "export.json").read_text()
    assert "${" not in facts
    assert '"name": "Table rows.csv"' in (place / "README.md").read_text()
    assert form == "onnx" or json.loads(facts)["module"]["numbers"] == 2


def test_the_card_tells_the_run_and_shows_names_with_markup_as_they_are(several):
    _, export = several
    card = (export.place / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    assert 'license: "mit"' in front
    assert json.loads(front.partition("model-index: ")[2])[0]["results"][0]["metrics"][0]["type"]
    assert "Classes, from 0: &lt;script&gt;, a\\|b, &#8203;---." in body
    assert "<script>" not in body
    assert "| train | 20 |" in body
    assert "No stream was evaluated that the training does not use." in body
    assert "emrun verify-run run" in body
    assert "code_directory" not in body
    assert os.fspath(export.place.parent.parent) not in body


NO_PROGRAMS = [
    ("Dropout", {}, {}, "forward draws random numbers in evaluation: output 'logits' of two runs"),
    ("NoEvaluation", {}, {}, r"draws random numbers in evaluation \(as in training: last .*drop \(Dropout\)"),
    ("Draws", {}, {}, "forward draws random numbers"),
    ("Counts", {}, {}, "forward keeps a state between calls in evaluation"),
    ("Statistic", {}, {}, "forward calculates a statistic of the batch in evaluation: output 'logits'"),
    ("Branch", {}, {}, r"decides by the values of a tensor in module \(Branch\), .*\.py:\d+: if x.sum\(\) > 0:"),
    ("Array", {}, {}, r"cannot be traced in module \(Array\), .*\.py:\d+: return self.last\(torch.from_numpy"),
    ("Sizes", {}, {}, "the trace fixes dimension 0 of input 'x' to 7"),
    ("Recurrent", {}, {"dynamic": ["tokens:1"]}, r"dimension 1 of input 'tokens' to 6: torch exports gru \(GRU\)"),
    (
        "Frozen",
        {},
        {},
        "output 'logits' of the program .*on batch 0 of stream 'valid' it differs.*when it is traced",
    ),
    ("Lists", {"outputs": ["logits", "found"]}, {}, "output 'found' is a list"),
    ("Statistic", {}, {"dynamic": ["x:1"]}, "the model fails on shorter inputs, which a program must take"),
    ("Several", {"inputs": SCALED}, {"probabilities": True}, "probabilities: no loss of the model says how"),
]


@pytest.mark.parametrize(
    ("name", "model", "options", "message"),
    thinned(NO_PROGRAMS, [each for each in NO_PROGRAMS if each[0] in ("Branch", "Several", "Statistic")]),
)
def test_a_model_that_is_no_program_is_refused_and_nothing_is_written(name, model, options, message, trained, tmp_path):
    run = trained(name, **model)
    with pytest.raises(ExportError, match=message):
        emrun.export(run, to="torch-export", output=tmp_path / "new" / "out", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "onx"}, "there is no format 'onx'; did you mean 'onnx'"),
        ({"stream": "tst"}, "dataset Data has no method 'tst_stream'"),
        ({"dynamic": ["z:1"]}, "--dynamic: 'z:1': there is no input 'z'"),
        ({"dynamic": ["x"]}, "--dynamic: 'x': there is no input ''"),
        ({"dynamic": ["x:0"]}, "'x' has the shape .8, 6.; dimension 0 is that of the batch"),
        ({"checkpoint_name": "nowhere"}, "nowhere"),
    ],
)
def test_what_does_not_exist_is_a_wrong_usage(options, message, trained, tmp_path):
    with pytest.raises(UsageError, match=message):
        emrun.export(trained("Statistic"), **({"to": "torch-export", "output": tmp_path / "out"} | options))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_a_run_is_a_wrong_usage(tmp_path):
    with pytest.raises(UsageError, match="not a run"):
        emrun.export(tmp_path, to="onnx")


def test_a_folder_that_has_files_is_left_as_it_is(several, tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(UsageError, match="exists; choose a new or empty folder with -o"):
        emrun.export(several[0], to="torch-export", output=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_place_that_cannot_be_written_is_an_error_of_storage(several, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as raised:
        emrun.export(several[0], to="torch-export", output=tmp_path / "file" / "out")
    assert raised.value.exit_status == 74


def test_the_command_reports_a_refusal_with_status_2(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = trained("Statistic")
    capsys.readouterr()
    status = commands.main(["export", str(run), "--to", "torch-export", "--json"], standalone_mode=False)
    assert status == 2
    problem = json.loads(capsys.readouterr().out)["problems"][0]
    assert problem["code"] == "export"
    assert "calculates a statistic of the batch" in problem["message"]
    assert list(tmp_path.iterdir()) == []


def test_onnx_needs_the_extra_export(several, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"onnx, which is not installed: pip install 'emrun.export.'"):
        emrun.export(several[0], to="onnx", output=tmp_path / "out")


TWO_BATCHES = "main_loop.extra_streams=[{valid: {batches: 2}}]"


@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.parametrize("to", ["onnx", "torch-export"])
@pytest.mark.parametrize(
    ("sample", "overrides", "dynamic", "message"),
    [
        ("digits_convnet.yaml", [], [], None),
        ("digits_mlp.yaml", [], [], None),
        ("char_gpt", [*SMALL_GPT, "main_loop.fixed_epoch_size=20"], ["tokens:1"], None),
        ("imdb_gru", ["dataset.longest=40"], [], None),
        ("detection", [TWO_BATCHES], [], "source 'targets' is a list"),
        ("table", [], [], None),
        ("pictures", [], [], None),
    ],
)
def test_a_program_of_a_sample_gives_what_its_model_gives(
    sample, overrides, dynamic, message, to, tmp_path, monkeypatch
):
    config = SAMPLES / sample
    if config.is_dir():
        config = shutil.copytree(config, tmp_path / "project")
        monkeypatch.chdir(config)
        own_modules(config, monkeypatch)
        if (config / "prepare.py").exists():
            subprocess.run([sys.executable, "prepare.py"], check=True, stdout=subprocess.DEVNULL)
    training = emrun.create_training(
        config, output_dir=tmp_path / "run", overrides=["hooks.StopAfter.epochs=1", *overrides]
    )
    training.main_loop.run_training()
    if message is not None:
        with pytest.raises(ExportError, match=message):
            emrun.export(tmp_path / "run", to=to, output=tmp_path / "out", dynamic=dynamic)
        return
    export = emrun.export(tmp_path / "run", to=to, output=tmp_path / "out", dynamic=dynamic)
    assert all(each["largest"] <= each["tolerance"] for each in export.facts["comparison"]["differences"].values())
