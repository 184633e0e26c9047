"""Which examples one of two configs gets right and the other does not."""

import json

import pytest

from emrun.launch.pairs import changed_examples

CONFIG = """\
seed: 1
dataset: {class: Digits, batch_size: 32}
model: {module: {class: my_model.Net}, optimizer: {class: AdamW, lr: 0.003}}
hooks:
  - ComputeStats: {variables: [loss, accuracy]}
  - SavePredictions: {stream: valid, file: p.%s, variables: [accuracy]}
  - StopAfter: {epochs: 3}
"""


def write_predictions(run, ending, values):
    rows = [{"id": f"e{number}", "accuracy": value} for number, value in enumerate(values)]
    lines = [json.dumps(row) for row in rows]
    if ending == "csv":
        lines = ["id,accuracy", *(f"{row['id']},{float(row['accuracy'])}" for row in rows)]
    (run / f"p.{ending}").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_examples_are_fixed_or_broken_by_most_pairs(make_run, ending):
    rows = {"a": [0, 0, 1, 1, 0], "b": [1, 0, 1, 0, 0], "c": [0, 1, 1, 1, 0], "d": [1, 0, 1, 0, 1]}
    runs = {name: make_run(name, [0.5], config=CONFIG % ending).directory for name in rows}
    for name, values in rows.items():
        write_predictions(runs[name], ending, values)
    other = make_run("other", [0.5]).directory
    found = changed_examples([[runs["a"], runs["b"]], [runs["c"], runs["d"]], [runs["a"], other]], "valid", "accuracy")
    assert found == {"stream": "valid", "pairs": 2, "fixed": ["e0"], "broken": ["e3"]}
    write_predictions(runs["b"], ending, [0.25, 1, 1, 1, 1])  # not right or wrong
    assert changed_examples([[runs["a"], runs["b"]]], "valid", "accuracy") is None
    assert changed_examples([[runs["a"], runs["c"]]], "test", "accuracy") is None


@pytest.mark.parametrize(
    ("ending", "content"), [("csv", f"id,accuracy\n{'e' * 200_000},1.0\n"), ("jsonl", '["accuracy"]\n')]
)
def test_a_file_that_is_not_one_of_predictions_has_no_examples(make_run, ending, content):
    runs = [make_run(name, [0.5], config=CONFIG % ending).directory for name in "ab"]
    for run in runs:
        (run / f"p.{ending}").write_text(content)
    assert changed_examples([runs], "valid", "accuracy") is None
