"""`emrun init --data`: what is seen in data, the config for it, and the whole way to predictions on new files."""

import csv
import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from campaign import thinned
from click.testing import CliRunner
from PIL import Image

from emrun import create_training, evaluate, load_config, predict
from emrun.base.errors import UsageError
from emrun.cli import emrun as commands
from emrun.diagnosis.first_config import first_config
from emrun.diagnosis.first_look import look
from emrun.diagnosis.tryout import try_out
from emrun.hooks import save_confusion_matrix

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "none"))
    return tmp_path


def begin(*words):
    """Call `emrun init` in this process; return its exit status and what it has told."""
    done = CliRunner().invoke(commands, ["init", "made", *words], standalone_mode=False)
    return getattr(done.exception, "exit_code", done.return_value), f"{done.output}{done.exception or ''}"


def pictures(root, count=12, size=16, mode="RGB"):
    """Write pictures of two classes: dark ones and bright ones."""
    for name, base in (("dark", 70), ("bright", 180)):
        (Path(root) / name).mkdir(parents=True)
        for number in range(count):
            pixels = RNG.normal(base, 40, (size, size, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).convert(mode).save(Path(root, name, f"{number}.png"))


def people(count, *without):
    """Return columns of persons: names, ages with gaps, cities, days, a class and a number."""
    draw = random.Random(count)
    ages = [round(draw.gauss(40, 12)) for _ in range(count)]
    columns = {
        "name": [f"p{row}" for row in range(count)],
        "age": [None if row % 50 == 3 else age for row, age in enumerate(ages)],
        "city": [draw.choice(["Brno", "Rome", "Oslo"]) for _ in range(count)],
        "joined": [str(np.datetime64("2020-01-01") + row) for row in range(count)],
        "always": ["x"] * count,
        "price": [1000 + 10 * age + draw.random() for age in ages],
        "label": ["old" if age > 40 else "young" for age in ages],
    }
    return {name: each for name, each in columns.items() if name not in without}


def write(path, columns):
    table = pa.table(columns)
    if str(path).endswith(".parquet"):
        pa.parquet.write_table(table, path)
        return
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(table.column_names)
        writer.writerows([["" if each is None else each for each in row.values()] for row in table.to_pylist()])


def load(count):
    hours = np.datetime64("2024-01-01T00") + np.arange(count)
    values = 10 + np.sin(np.arange(count) * 2 * np.pi / 24) + RNG.normal(0, 0.05, count)
    return {"time": [str(each).replace("T", " ") + ":00:00" for each in hours], "load": values.round(3).tolist()}


def write_folder(path):
    pictures(path)


def write_new_folder(path):
    pictures("other", 3)
    Path(path).mkdir()
    for name in ("dark", "bright"):
        for file in Path("other", name).iterdir():
            shutil.copy(file, Path(path, f"{name}-{file.name}"))


def write_reviews(path, count=200, labels=True):
    """Write texts with classes, as JSON lines or CSV."""
    draw = random.Random(count)
    words = {"good": ["warm", "clever", "great"], "bad": ["dull", "poor", "loud"]}
    rows = []
    for number in range(count):
        label = ["good", "bad"][number % 2]
        said = [f"the {draw.choice(['film', 'trip'])} was {draw.choice(words[label])}" for _ in range(3)]
        rows.append({"id": f"r{number}", "review": ", ".join(said), **({"verdict": label} if labels else {})})
    if Path(path).suffix == ".csv":
        write(path, {name: [row[name] for row in rows] for name in rows[0]})
    else:
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


CASES = {
    "reviews.jsonl": (write_reviews, lambda path: write_reviews(path, 20, False), [], "accuracy", "name"),
    "reviews.csv": (write_reviews, lambda path: write_reviews(path, 20, False), [], "accuracy", "probability.good"),
    "pictures": (write_folder, write_new_folder, [], "accuracy", "name"),
    "people.csv": (
        lambda path: write(path, people(300)),
        lambda path: write(path, people(20, "label", "always", "joined")),
        ["--target", "label"],
        "accuracy",
        "name",
    ),
    "people.parquet": (
        lambda path: write(path, people(300, "joined")),
        lambda path: write(path, people(20, "label", "joined")),
        [],
        "accuracy",
        "name",
    ),
    "prices.csv": (
        lambda path: write(path, people(300, "label")),
        lambda path: write(path, people(20, "price", "label")),
        ["--target", "price"],
        "mae",
        "prediction",
    ),
    "load.csv": (
        lambda path: write(path, load(480)),
        lambda path: write(path, load(50)),
        ["--task", "forecast"],
        "mae",
        "forecast.0.0",
    ),
}


FEW = ("people.csv",)
"""What `make test` trains; pages of docs/start do it with pictures and rows in time, tests/test_bases.py with texts."""


@pytest.mark.parametrize("name", thinned(CASES, FEW))
def test_from_data_to_predictions_on_new_files(name, monkeypatch):
    monkeypatch.setattr(save_confusion_matrix, "draw_matrix", lambda *_, **options: np.zeros((2, 2, 3), np.uint8))
    prepare, prepare_new, words, measure, column = CASES[name]
    prepare(name)
    status, told = begin("--data", name, *words)
    assert status == 0, told
    readme = Path("made/README.md").read_text()
    assert "emrun eval RUN_DIR test\n" in readme
    assert re.search(r"\n    emrun predict RUN_DIR --data PATH -o new\.csv", readme)
    assert f"${{here}}/../{name}" in Path("made/config.yaml").read_text()
    lines = Path("made/config.yaml").read_text().splitlines()
    assert len(lines) <= 25
    assert not list(Path("made").glob("my_*.py"))
    assert all("#" in line for line in lines[4:])  # a comment for each choice
    # the config works, and the model learns
    config = load_config("made")
    try_out(config)
    epochs = 4 if name in FEW else 6
    overrides = [f"vars.epochs={epochs}", f"vars.patience={epochs}"]
    training = create_training(config, output_dir="run", overrides=overrides)
    assert training.main_loop.run_training().status == "finished"
    found = evaluate("run", "test")["test"][measure]["mean"]
    assert found > 0.8 if measure == "accuracy" else found < {"prices.csv": 80, "load.csv": 0.5}[name], found
    # new files, where the train data are not
    new = Path(f"new{Path(name).suffix}")
    prepare_new(new)
    (shutil.rmtree if Path(name).is_dir() else Path.unlink)(Path(name))
    predict("run", data=new, file="p.csv", probabilities=measure == "accuracy")
    with Path("p.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows
    assert column in rows[0]
    assert "id" in rows[0]
    # a copy of the run elsewhere predicts the same
    if name in ("reviews.jsonl", "people.csv"):
        shutil.copytree("run", "elsewhere/copy")
        shutil.rmtree("run")
        predict("elsewhere/copy", data=new, file="q.csv", probabilities=True)
        assert Path("q.csv").read_bytes() == Path("p.csv").read_bytes()
    if name == "reviews.jsonl":
        assert all((float(row["probability.good"]) > 0.5) == (int(row["id"][1:]) % 2 == 0) for row in rows)


def talk(*said):
    roles = ["user", "assistant"] * len(said)
    return {"messages": [{"role": role, "content": each} for role, each in zip(roles, said, strict=False)]}


def lines(path, rows):
    Path(path).write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in rows))


@pytest.mark.campaign  # tests/test_readme.py goes this way in docs/start/language_models.md
def test_from_chats_to_answers():
    lines("chats.jsonl", [talk(f"say {row % 2}", ["no", "yes"][row % 2]) for row in range(80)])
    status, told = begin("--data", "chats.jsonl")
    assert status == 0, told
    assert "80 chats\nmessages: user 80, assistant 80\ncharacters: median 8, longest 8; 0 empty" in told
    assert "78 duplicates" in told
    assert "emrun predict RUN_DIR --data PATH -o answers.jsonl --generate 5" in Path("made/README.md").read_text()
    assert "transformers]'" in Path("made/README.md").read_text()
    text = Path("made/config.yaml").read_text()
    assert len(text.splitlines()) <= 25
    config = load_config("made")
    try_out(config)
    small = [
        "vars.width=32",
        "vars.layers=1",
        "vars.pack=32",
        "vars.epochs=5",
        "vars.lr=0.01",
        "vars.tokenizer.learn=270",
    ]
    assert create_training(config, output_dir="run", overrides=small).main_loop.run_training().status == "finished"
    Path("chats.jsonl").unlink()
    lines("new.jsonl", [talk("say 0"), talk("say 1", "no")])
    predict("run", data="new.jsonl", file="answers.csv", generate=5)
    with Path("answers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["answer"], row["generated"]) for row in rows] == [("", "no"), ("no", "yes")]


GOOD = [{"text": f"a good text {row // 2}", "label": "ab"[row % 2]} for row in range(20)]
TALKS = [talk("hi", "hello")] * 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*GOOD, '{"text": "a go'], r"'.*t\.jsonl', line 21: Unterminated string .*; is the line cut\?"),
        ([*GOOD, "[1]"], r"'.*t\.jsonl', line 21 is a list, not an object"),
        ([], r"t\.jsonl: contains no examples|t\.jsonl': contains no examples"),
        ([*GOOD, {"label": "a"}], r"t\.jsonl, row 21: column 'text' is missing; write a text, or leave the row out"),
        ([*GOOD, {"text": "w"}], r"t\.jsonl, row 21: column 'label' is the target and has 1 gap"),
        ([{**row, "label": "a"} for row in GOOD], r"'label' is the target, but has the value 'a' only"),
        ([{**row, "label": f"l{n}"} for n, row in enumerate(GOOD)], r"'label' is the target, but is different in each"),
        ([{**row, "label": f"l{n // 2}"} for n, row in enumerate(GOOD[:9])], r"'label' has 5 different values"),
        ([*GOOD, {"text": "w", "label": 3}], r"t\.jsonl', line 21: column 'label' is a int, but a str before"),
        ([*GOOD, {"text": [1], "label": "a"}], r"t\.jsonl', line 21: column 'text' is a list, but a str before"),
        ([{"x": n, "label": "ab"[n % 2]} for n in range(20)], r"t\.jsonl has no column of texts from which 'label'"),
        ([{**row, "label": n / 7} for n, row in enumerate(GOOD)], r"t\.jsonl has no column of texts from which 'lab"),
        ([*TALKS, *GOOD], r"t\.jsonl', line 4: column 'messages': is missing"),
        ([*TALKS, {"messages": [{"from": "a", "value": "b"}]}], r"line 4: .* message 1 has no 'role', but from, value"),
        ([{"messages": [{"role": "user", "content": "a"}]}] * 3, r"no answers, of role assistant \(the roles are user"),
    ],
)  # fmt: skip
def test_json_lines_from_which_nothing_can_be_learnt_are_refused(rows, message):
    lines("t.jsonl", rows)
    status, told = begin("--data", "t.jsonl")
    assert status == 2, told
    assert re.search(message, told), told
    assert not Path("made").exists()


def test_texts_are_told_by_what_else_there_is():
    lines("t.jsonl", [*GOOD, {"text": "", "label": "a"}])
    made, uses = told_of("t.jsonl")
    assert (made.base, uses) == ("text_classification", {"text": "text", "label": "target"})
    assert made.seen[-2:] == [
        "text: characters: median 13, longest 13; 1 empty; 10 duplicates",
        "label: 2 classes: a 11, b 10",
    ]
    rows = {"text": [row["text"] for row in GOOD], "label": [row["label"] for row in GOOD], "size": [0.5, 1.5] * 10}
    write("t.csv", rows)
    assert told_of("t.csv")[0].base == "tabular"
    assert told_of("t.csv", task="text_classification")[0].base == "text_classification"
    with pytest.raises(UsageError, match="rows have no messages; leave out --task"):
        told_of("t.csv", task="chat")
    lines("c.jsonl", TALKS)
    with pytest.raises(UsageError, match="has chats in 'messages'; leave out --target and --task"):
        told_of("c.jsonl", task="text_classification")


@pytest.mark.campaign  # docs/start/masks.md does the same
def test_from_pictures_with_masks_to_masks_of_new_pictures():
    for folder in ("all/images", "all/masks", "new"):
        Path(folder).mkdir(parents=True)
    for number in range(12):
        pixels = RNG.integers(0, 255, (32, 32, 3)).astype(np.uint8)
        pixels[: number + 8] //= 4
        Image.fromarray(pixels).save(f"all/images/{number}.png")
        Image.fromarray(((pixels.mean(2) > 64) * 255).astype(np.uint8)).save(f"all/masks/{number}.png")
        Image.fromarray(pixels).save(f"new/{number}.png")
    status, told = begin("--data", "all")
    assert status == 0, told
    config = load_config("made", ["vars.width=4"])
    try_out(config)
    training = create_training(config, output_dir="run", overrides=["vars.epochs=2", "vars.patience=2", "vars.width=4"])
    assert training.main_loop.run_training().status == "finished"
    shutil.rmtree("all")
    assert predict("run", data="new", file="masks/").rows == 12
    assert set(np.unique(np.asarray(Image.open("masks/3.png")))) <= {0, 1}


def test_masks_of_one_class_or_in_colours_are_refused():
    picture = Image.fromarray(np.zeros((32, 32, 3), np.uint8))
    Path("all/images").mkdir(parents=True)
    Path("all/masks").mkdir()
    picture.save("all/images/0.png")
    for mask, message in (
        (np.full((32, 32), 0), r"all/masks has one class, 0"),
        (
            np.zeros((32, 32, 3)),
            r"all/masks/0\.png is a picture in colours.*; save it as a PNG of mode L or P, as Im",
        ),
    ):
        Image.fromarray(mask.astype(np.uint8)).save("all/masks/0.png")
        with pytest.raises(UsageError, match=message):
            told_of("all")


def told_of(path, target=None, task=None):
    made = first_config(look(Path(path).resolve()), target, task)
    tables = [each for each in made.seen if not isinstance(each, str)]
    return made, {row[0]: row[4] for table in tables for row in table.rows}


def test_each_column_gets_a_use():
    more = {"row": list(range(60)), "empty": [None] * 60, "text": [f"a text {row // 2}" for row in range(60)]}
    write("t.csv", {**people(60), **more})
    made, uses = told_of("t.csv", "label")
    assert uses == {
        "name": "id",
        "age": "numbers",
        "city": "categories",
        "joined": "left out: a date",
        "always": "left out: one value only",
        "price": "numbers",
        "label": "target",
        "row": "left out: different in each row",
        "empty": "left out: no values",
        "text": "categories",
    }
    assert made.vars["fill"][0] == {"age": {"by": "median"}}
    assert made.vars["split"][0] == {"valid": 0.15, "test": 0.15, "by": "label"}
    assert "time: joined" in made.seen[-1]
    assert "--task forecast --target price predicts" in made.seen[-1]
    made, _ = told_of("t.csv", "price")
    assert made.seen[-1] == "hint: joined has dates; --task forecast --target price predicts the next rows"
    assert made.vars["split"][0] == {"valid": 0.15, "test": 0.15, "time": "joined"}


def test_hints_about_dates_can_be_followed():
    columns = people(60)
    columns["joined"] = [columns["joined"][row // 6 * 6] for row in range(60)]  # each six times, of three cities
    write("t.csv", columns)
    with pytest.raises(UsageError, match="'joined' has a time twice"):
        told_of("t.csv", "price", "forecast")
    made, _ = told_of("t.csv", "price")
    assert not isinstance(made.seen[-1], str), "the split is by time already"
    assert made.vars["split"][0]["time"] == "joined"
    made, _ = told_of("t.csv", "label")
    hint = "hint: joined has dates; `split: {by: null, time: joined}` evaluates on the last rows"
    assert made.seen[-1] == hint


def test_numbers_among_which_are_texts_are_left_out_and_told():
    columns = people(30)
    columns["age"] = [str(each) for each in columns["age"]]  # None
    write("t.csv", columns)
    _, uses = told_of("t.csv", "label")
    assert uses["age"] == "left out: numbers, but also 'None'; leave such cells empty"


@pytest.mark.parametrize(
    ("columns", "target", "message"),
    [
        (people(30), "name", r"column 'name' is the target, but is different in each row, as a name is; .*\(age, city"),
        (people(30), "joined", r"column 'joined' is the target, but is different in each row"),
        (people(60), "age", r"t\.csv, row 5: column 'age' is the target and has 2 gaps, this is the first; write"),
        (people(30), "always", r"column 'always' is the target, but has the value 'x' only"),
        (people(30), "lable", r"t\.csv has no column 'lable' to predict; did you mean 'label'\?"),
        ({"n": list(range(9)), "x": [0.5] * 9}, "n", r"column 'n' is the target, but is different in each row"),
        ({"x": [1.5, 2, 2], "y": ["a", "b", "a"]}, "y", r"t\.csv has 3 rows; too few to train"),
        ({"x": [1.5] * 9 + [2], "y": [*"abcdefgha", "a"]}, "y", r"column 'y' has 8 different values in 10 rows"),
        ({"name": ["a", "b", "c"], "y": ["a", "b", "a"]}, "y", r"no column from which 'y' can be predicted"),
    ],
)  # fmt: skip
def test_rows_from_which_nothing_can_be_learnt_are_refused(columns, target, message):
    write("t.csv", columns)
    with pytest.raises(UsageError, match=message):
        told_of("t.csv", target)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"t\.csv cannot be read: Empty CSV file"),
        ("a,b\n", r"t\.csv has no rows"),
        ("a,b\n1,2\n3;4\n", r"t\.csv cannot be read: CSV parse error: Row #3: Expected 2 columns, got 1: 3;4"),
        ("a;b\n1;2\n", r"^t\.csv: cells are separated by ';'; write commas"),
        ("a;b\n1;x, y\n", r"^t\.csv: cells are separated by ';'; write commas$"),
        ("a;b\n1;12,5\n", r"^t\.csv: cells are separated by ';'; write commas, and decimal .* as '12,5' in row 2$"),
        ("a\tb\n1\t2\n", r"^t\.csv: cells are separated by '\\t'; write commas"),
        ("a,a\n1,2\n", r"t\.csv: 'a' is the name of several columns"),
    ],
)
def test_files_that_are_no_tables_are_refused(text, message):
    Path("t.csv").write_text(text)
    status, told = begin("--data", "t.csv")
    assert status == 2 or "Error" in told
    with pytest.raises(UsageError, match=message):
        look(Path("t.csv"))
    assert not Path("made").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x,city,label\n1,Rom,a\n2,Köln,b\n3,Rom,a\n", r"t\.csv, row 3: column 'city': 'K\\xf6ln' is not UTF-8; save"),
        ("x,city,label\n1,Rom,groß\n2,Rom,b\n", r"t\.csv, row 2: column 'label': 'gro\\xdf' is not UTF-8; save"),
        ("x,größe\n1,2\n", r"t\.csv, row 1: the name of column 2, 'gr\\xf6\\xdfe', is not UTF-8; save the file as"),
    ],
)
def test_a_file_that_is_not_utf_8_is_refused_where_it_is_not(text, message):
    Path("t.csv").write_text(text, encoding="latin-1")
    status, told = begin("--data", "t.csv")
    assert status == 2
    assert re.search(message, told), told
    assert not Path("made").exists()


def test_folders_without_classes_are_refused():
    pictures("one")
    shutil.rmtree("one/dark")
    pictures("hollow")
    Path("hollow/empty").mkdir()
    pictures("small", 1)
    pictures("flat/of")
    shutil.copytree("flat/of/dark", "plain")
    Path("rows").mkdir()
    write("rows/t.csv", people(9))
    Path("nothing").mkdir()
    for path, message in (
        ("one", r"one has one class, bright, so that there is nothing to tell apart; put the pictures of each class"),
        ("hollow", r"hollow/empty has 0 pictures; a class needs one"),
        ("small", r"small/bright has 1 picture; a class needs one to train on and one to evaluate on"),
        ("plain", r"plain has no folders of pictures \(it has 0\.png, .*\); put those of each class into a folder"),
        ("rows", r"rows has no folders of pictures \(it has t\.csv\); .*; for rows, name their file"),
        ("nothing", r"nothing has no folders of pictures \(it has nothing\)"),
        ("nowhere", r"there is no file or folder nowhere"),
    ):
        with pytest.raises(UsageError, match=message):
            look(Path(path))


def test_grey_pictures_in_folders_for_parts():
    pictures("all/train", 8, mode="L")
    pictures("all/val", 3, mode="L")
    made, _ = told_of("all")
    values = {key: value for key, (value, _) in made.vars.items()}
    assert values["root"] == Path("all/train").resolve()
    assert values["valid"] == Path("all/val").resolve()
    assert values["split"] is None
    assert (values["size"], values["image_mode"], values["mean"]) == (16, "L", [0.5])


def test_rows_in_time_that_are_several_series_or_not_even():
    series = load(60)
    write("t.csv", {**{name: each * 2 for name, each in series.items()}, "house": ["a"] * 60 + ["b"] * 60})
    made, uses = told_of("t.csv", "load", "forecast")
    assert (uses["time"], uses["house"], uses["load"]) == ("order", "group", "columns and targets")
    assert (made.vars["order"][0], made.vars["group"][0], made.vars["future"][0]) == ("time", "house", 6)
    write("t.csv", {name: each[:20] + each[25:] for name, each in series.items()})
    made, _ = told_of("t.csv", "load", "forecast")
    assert made.vars["order"] == (None, "rows are not evenly apart")
    for columns, message in (
        ({name: each * 2 for name, each in series.items()}, r"'time' has a time twice, or its rows are neither evenly"),
        ({name: each[:9] for name, each in series.items()}, r"t\.csv has 9 rows in time; a forecast needs 20 or more"),
        ({"load": series["load"]}, r"t\.csv has no column of times without gaps"),
    ):
        write("t.csv", columns)
        with pytest.raises(UsageError, match=message):
            told_of("t.csv", "load", "forecast")


def test_options_that_do_not_go_together():
    pictures("pictures")
    write("t.csv", people(30))
    for words, message in (
        (["--target", "y"], "--target and --task need --data PATH"),
        (["--data", "t.csv", "--from", "minimal"], "--data writes a config of its own; leave out --from"),
        (["--data", "pictures", "--target", "y"], "which have no column 'y'; leave out --target"),
        (["--data", "pictures", "--task", "forecast"], "has pictures of classes; --task forecast needs other data"),
        (["--data", "t.csv", "--task", "segmentation"], "rows have no masks; leave out --task"),
        (["--data", "t.csv", "--task", "regression"], "column 'label' has texts, no numbers; leave out --task"),
    ):
        status, told = begin(*words)
        assert status == 2, told
        assert message in told
    assert not Path("made").exists()
    Path("made").mkdir()
    Path("made/mine.txt").write_text("mine")
    assert begin("--data", "t.csv")[0] == 2
    assert [path.name for path in Path("made").iterdir()] == ["mine.txt"]


def test_weights_that_are_on_the_machine_are_begun_with(monkeypatch, tmp_path):
    pictures("pictures")
    assert told_of("pictures")[0].vars["pretrained"][0] is False
    (tmp_path / "none/hub/checkpoints").mkdir(parents=True)
    (tmp_path / "none/hub/checkpoints/resnet18-f37072fd.pth").write_bytes(b"")
    values = told_of("pictures")[0].vars
    assert (values["model"][0], values["pretrained"][0]) == ("resnet18", True)
