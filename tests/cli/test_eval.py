"""`emrun eval` as an installed command in a process of its own."""

import json


def test_an_evaluation_prints_a_table_of_each_stream_and_what_the_training_wrote(emrun, tmp_path):
    config = {
        "seed": 1,
        "dataset": {"class": "Majority", "n": 50},
        "model": {
            "module": {"class": "torch.nn.Linear", "in_features": 11, "out_features": 2},
            "inputs": ["x"],
            "outputs": ["logits"],
            "loss": {"class": "torch.nn.MSELoss", "inputs": ["logits", "logits"]},
            "metrics": {"size": {"import": "torch.norm", "inputs": ["logits"]}},
            "optimizer": {"class": "SGD", "lr": 0.1},
        },
        "main_loop": {"extra_streams": ["valid"], "on_unused_sources": "ignore"},
        "hooks": [{"ComputeStats": {"variables": ["size"]}}, {"StopAfter": {"epochs": 1}}],
    }
    (tmp_path / "config.json.yaml").write_text(json.dumps(config))  # JSON is YAML
    assert emrun("train", "-q", "config.json.yaml", "--output-dir", "run").returncode == 0
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    done = emrun("eval", "-q", "run", "valid", "train")
    assert done.returncode == 0
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0] == ["stream", "variable", "value"]
    assert rows[2] == ["valid", "size", f"{last['streams']['valid']['size']['mean']:.6g}"]
    assert [row[0] for row in rows[2:]] == ["valid", "train"]
    assert sorted(path.name for path in (tmp_path / "run" / "eval").iterdir()) == ["train-1", "valid-1"]
