"""Bases: each trains well by four lines of YAML, and a run needs neither the base nor the data."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from campaign import thinned
from PIL import Image

from emrun import create_training, load_run, resume_training
from emrun.base.errors import ConfigError
from emrun.config.config import load_config, read_config
from emrun.config.names import bases
from emrun.config.plan import check_statically, defaults_of
from emrun.storage.run import CONFIG
from emrun.training.evaluate import evaluate


def people(path):
    rng = np.random.default_rng(0)
    lines = ["name,city,job,age,income,label,price"]
    for row in range(240):
        city, job = rng.choice(["oslo", "rome", "lima"]), rng.choice(["a", "b"])
        age, income = rng.uniform(20, 60), rng.normal(50, 10)
        label = "yes" if income + 20 * (city == "rome") > 57 else "no"
        lines.append(f"p{row},{city},{job},{age:.2f},{income:.2f},{label},{3 * age + 40 * (job == 'a'):.2f}")
    (path / "people.csv").write_text("\n".join(lines) + "\n")


def load(path):
    rng = np.random.default_rng(0)
    values = [50 + 8 * math.sin(row / 4) + rng.normal(0, 0.5) for row in range(300)]
    (path / "load.csv").write_text(
        "\n".join(["hour,load", *(f"{row},{each}" for row, each in enumerate(values))]) + "\n"
    )


def pictures(path):
    rng = np.random.default_rng(0)
    for number, name in enumerate(("bars", "dots", "plain")):
        (path / "pictures" / name).mkdir(parents=True)
        for index in range(16):
            pixels = rng.integers(0, 80, (32, 32, 3)).astype(np.uint8)
            if number < 2:
                pixels[:: 1 + 7 * number, ::8] += 120
            Image.fromarray(pixels).save(path / "pictures" / name / f"{index}.png")


def masks(path):
    rng = np.random.default_rng(0)
    (path / "images").mkdir()
    (path / "masks").mkdir()
    for index in range(20):
        pixels, mask = rng.integers(0, 60, (16, 16, 3)), np.zeros((16, 16), np.uint8)
        row, column = rng.integers(0, 9, 2)
        mask[row : row + 7, column : column + 7] = 1
        pixels[mask == 1] += 120
        Image.fromarray(pixels.astype(np.uint8)).save(path / "images" / f"{index}.png")
        Image.fromarray(mask).save(path / "masks" / f"{index}.png")


SEGMENTATION = "image: images, mask: masks, classes: [a, b], size: 8, width: 8, batch_size: 7, lr: .02, epochs: 8"


def texts(path):
    rng = np.random.default_rng(0)
    things, words = ["film", "book", "trip"], {"good": ["warm", "clever", "great"], "bad": ["dull", "poor", "loud"]}
    with (path / "reviews.jsonl").open("w") as file:
        for row in range(160):
            label = ["good", "bad"][row % 2]
            said = [f"the {rng.choice(things)} was {rng.choice(words[label])}" for _ in range(rng.integers(1, 4))]
            file.write(json.dumps({"review": " and ".join(said), "verdict": label}) + "\n")


def chats(path):
    with (path / "chats.jsonl").open("w") as file:
        for row in range(60):
            messages = [("user", f"say {row % 3}"), ("assistant", "abc"[row % 3])]
            file.write(json.dumps({"messages": [{"role": role, "content": each} for role, each in messages]}) + "\n")


VARS = {
    "segmentation": (masks, SEGMENTATION, "loss", 0.5),
    "image_classification": (
        pictures,
        "root: pictures, size: 32, batch_size: 8, epochs: 12, lr: 0.003",
        "accuracy",
        0.8,
    ),
    "tabular": (
        people,
        "train: people.csv, target: label, numbers: [age, income], categories: [city, job]",
        "accuracy",
        0.8,
    ),
    "tabular_regression": (people, "train: people.csv, target: price, numbers: [age], categories: [job]", "mae", 12.0),
    "text_classification": (texts, "train: reviews.jsonl, text: review, label: verdict", "accuracy", 0.9),
    "chat": (chats, "train: chats.jsonl, tokenizer: {learn: 300}, pack: 32, width: 32, layers: 1", "loss", 1.5),
    "forecast": (
        load,
        "train: load.csv, columns: [load], targets: [load], past: 24, future: 6, order: hour",
        "mae",
        2.0,
    ),
}
"""Base -> what writes the data, the `vars`, and the statistic of `test` with what a training must reach."""
FAST = {"tabular": ["vars.epochs=12"], "tabular_regression": ["vars.epochs=20"], "forecast": ["vars.epochs=6"]}
FAST |= {"text_classification": ["vars.epochs=4"], "chat": ["vars.epochs=6", "vars.lr=0.01"]}
FEW = ("tabular",)
"""The one that `make test` trains here; tests/test_readme.py trains most others, by pages of docs/start."""


@pytest.fixture(params=VARS)
def base(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, values, *_ = VARS[request.param]
    make(tmp_path)
    (tmp_path / "c.yaml").write_text(f"extends: emrun:{request.param}\nvars: {{{values}}}\nseed: 1\n")
    return request.param


@pytest.mark.whole
@pytest.mark.parametrize("base", thinned(VARS, FEW), indirect=True)
def test_four_lines_train_well_and_the_run_needs_neither_the_base_nor_the_data(base, tmp_path, monkeypatch):
    check_statically(load_config("c.yaml"), evaluations=True)
    create_training("c.yaml", output_dir="run", overrides=FAST.get(base, [])).main_loop.run_training()
    *_, variable, limit = VARS[base]
    stream = "valid" if base == "chat" else "test"
    found = evaluate("run", stream)[stream][variable]["mean"]
    assert found >= limit if variable == "accuracy" else found <= limit
    # the merged text, with the names of numbers; the numbers lie in another file
    text = (tmp_path / "run" / CONFIG).read_text()
    assert "extends" not in text
    assert "${data:" in text
    numbers = json.loads((tmp_path / "run" / "preparation.json").read_text())["numbers"]
    assert all(isinstance(number, int) for number in numbers.values())
    # without the data and the base
    for each in tmp_path.iterdir():
        if each.name != "run":
            shutil.rmtree(each) if each.is_dir() else each.unlink()
    monkeypatch.setattr("emrun.config.config.bases", dict)
    (tmp_path / "run").rename(tmp_path / "copy")
    model = load_run("copy").model
    assert sum(each.numel() for each in model.module.parameters()) > 100


@pytest.mark.campaign  # tests/training/test_preparation.py has such numbers on two ranks
@pytest.mark.parametrize("base", VARS, indirect=True)
def test_a_new_run_of_a_base_begins_on_two_ranks(base, emrun, run_directory):
    done = emrun("train", "c.yaml", "vars.epochs=1", "--nproc", "2", ranks=2)
    assert done.returncode == 0, done.stderr
    numbers = json.loads((run_directory("log") / "preparation.json").read_text())["numbers"]
    create_training("c.yaml", output_dir="alone").main_loop.close()
    assert json.loads(Path("alone/preparation.json").read_text())["numbers"] == numbers


@pytest.mark.parametrize("name", bases())
def test_every_base_begins_with_what_it_is_for_and_lists_what_it_needs(name):
    lines = bases()[name].read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert "# required: " in "\n".join(lines)


def test_every_choice_is_visible_with_its_place(base):
    config = read_config("c.yaml")
    places = {".".join(map(str, path)): str(node.position) for path, node, _ in config.root.places()}
    assert places["vars.epochs"].startswith(("c.yaml", f"emrun:{base}:"))
    assert places["model.optimizer.lr"].startswith(f"emrun:{base}:")
    assert ("model.optimizer.betas", (0.9, 0.999), "AdamW") in defaults_of(config)


def test_an_error_of_a_value_of_the_user_is_at_the_value_also_when_it_is_a_part_of_a_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    people(tmp_path)
    (tmp_path / "c.yaml").write_text(
        "extends: emrun:tabular\nvars:\n  train: people.csv\n  target: label\n  numbers: [agee]\n"
    )
    with pytest.raises(ConfigError, match=r"c\.yaml:5:13: dataset\.columns: people\.csv has no column 'agee'; did you"):
        create_training("c.yaml")
    (tmp_path / "c.yaml").write_text("extends: emrun:tabular\nvars:\n  train: people.csv\n  target: label\n")
    with pytest.raises(ConfigError, match="there is no column to predict from; list some as numbers or categories"):
        create_training("c.yaml")
    assert not (tmp_path / "log").exists()


def test_a_file_with_the_name_of_a_base_needs_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "emrun:tabular").write_text("seed: 3\n")
    (tmp_path / "c.yaml").write_text("extends: ./emrun:tabular\n")
    assert read_config("c.yaml").root.plain() == {"seed": 3}
    (tmp_path / "c.yaml").write_text("extends: emrun:tabular\n")
    assert "model" in read_config("c.yaml").root.plain()


@pytest.mark.parametrize(
    "text",
    [
        "vars: {mine: 3}\nmain_loop: {buffer: '${vars.mine}'}",
        "vars: {mine: 3}\neval: {test: {main_loop: {buffer: '${vars.mine}'}}}",
        "vars: {split: {valid: 0.3}}",
        "dataset: {split: null}\nvars: {lr: 0.1}",
    ],
)
def test_values_that_something_reads_are_no_mistakes(text, tmp_path):
    (tmp_path / "c.yaml").write_text(f"extends: emrun:tabular\n{text}\n")
    assert read_config(tmp_path / "c.yaml").root.get("vars", "epochs").value == 50


@pytest.mark.parametrize(
    "text", ["vars: {modle: 3}", "eval: {test: {vars: {modle: 3}}}", "vars: {modle: {a: 1, b: 2}}"]
)
def test_a_value_that_nothing_reads_is_an_error_also_in_files_between(text, tmp_path):
    (tmp_path / "a.yaml").write_text(f"extends: emrun:image_classification\n{text}\n")
    (tmp_path / "c.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ConfigError, match="unknown variable 'modle'; did you mean 'model'") as caught:
        read_config(tmp_path / "c.yaml")
    assert [problem.position.line for problem in caught.value.problems] == [2]


def test_overrides_give_what_a_base_needs_and_a_resume_changes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    people(tmp_path)
    (tmp_path / "c.yaml").write_text("extends: emrun:tabular\n")
    given = ["vars.train=people.csv", "vars.target=label", "vars.numbers=[age]", "vars.epochs=1"]
    create_training("c.yaml", output_dir="run", overrides=given).main_loop.run_training()
    resumed = resume_training("run", overrides=["vars.epochs=2", "model.scheduler.on_extend=replan"])
    resumed.main_loop.run_training()
    assert resumed.main_loop.training_epochs_done == 2


def test_runs_with_numbers_of_the_data_become_a_model_and_weights_to_begin_with(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    people(tmp_path)
    config = {
        "extends": "emrun:tabular",
        "vars": {"train": "people.csv", "target": "label", "numbers": ["income"], "categories": ["city"], "epochs": 1},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    for name, overrides in (("a", []), ("b", ["model.init_from=a"])):
        create_training("c.yaml", output_dir=name, overrides=overrides).main_loop.run_training()
    with pytest.raises(ConfigError, match="another shape"):
        create_training("c.yaml", output_dir="c", overrides=["vars.target=job", "vars.hidden=[9]", "model.init_from=a"])
    made = {"seed": 1, "dataset": read_config("c.yaml").tree.get("dataset").plain()}
    made["model"] = {"class": "Ensemble", "runs": ["a", "b"], "outputs": ["logits"]}
    made["model"]["metrics"] = {"accuracy": ["logits", "target"]}
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / CONFIG).write_text(
        json.dumps({**made, "hooks": [{"ComputeStats": {"variables": ["accuracy"]}}]})
    )
    assert 0 <= evaluate("both", "test")["test"]["accuracy"]["mean"] <= 1
