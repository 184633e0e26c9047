"""Hooks that look at the results of evaluations: a run that is interrupted or killed has the same files in the end."""

import json

HOOKS = '''
import os
import signal
from pathlib import Path

from emrun import AbstractHook
from emrun.hooks import AccumulateVariables


class SendOnce(AbstractHook):
    """Sends the signal in the file `send` to this process at an iteration of a stream, and deletes the file."""

    def after_batch(self, stream_name):
        file = Path("send")
        name, at, stream = file.read_text().split() if file.exists() else ("", 99, "")
        if stream_name == stream and self.main_loop.iterations_done >= int(at):
            file.unlink()
            os.kill(os.getpid(), getattr(signal, name))


class Sums(AccumulateVariables):
    """Writes the sum of all labels."""

    writes = ("sum",)

    def after_epoch(self, epoch_data):
        for stream, values in self.accumulated.items():
            epoch_data[stream]["sum"] = int(sum(values["flat"]))
'''
CONFIG = """
seed: 1
dataset: {class: Digits, flat: true, batch_size: 100}
model:
  module: {class: torch.nn.Linear, in_features: 64, out_features: 10}
  inputs: [image]
  outputs: [logits]
  loss: {class: torch.nn.CrossEntropyLoss, inputs: [logits, label]}
  optimizer: {class: SGD, lr: 0.5}
main_loop: {extra_streams: [valid]}
hooks:
  - result_hooks.SendOnce
  - ClassificationMetrics: {predicted_variable: logits, gt_variable: label}
  - SaveConfusionMatrix: {labels_name: label, predictions_name: logits}
  - Flatten: {variables: {label: flat}}
  - result_hooks.Sums: {variables: [flat]}
  - SaveFile: {files: [config.yaml]}
  - SaveBest: {variable: f1, condition: max}
  - SaveEvery: {every: 4 iterations, keep: 1}
  - StopAfter: {epochs: 2}
"""


def results(run):
    """Return the statistics of each epoch, and the files that the hooks wrote."""
    lines = [json.loads(line)["streams"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    files = [*run.glob("confusion_matrix*"), *run.glob("files/*")]
    return lines, {path.relative_to(run).as_posix(): path.read_bytes() for path in files}


def test_a_run_that_was_stopped_and_resumed_has_the_same_results(emrun, tmp_path):
    (tmp_path / "result_hooks.py").write_text(HOOKS)
    (tmp_path / "config.yaml").write_text(CONFIG)
    assert emrun("train", "config.yaml", "-q", "--output-dir", "straight").returncode == 0
    lines, files = results(tmp_path / "straight")
    assert len(lines) == 3
    assert sorted(files)[-3:] == [
        "confusion_matrix_epoch_2_valid.csv", "confusion_matrix_epoch_2_valid.png", "files/config.yaml",
    ]  # fmt: skip
    for number, stop in enumerate(["SIGINT 22 train", "SIGKILL 23 train", "SIGTERM 15 valid"]):
        run = tmp_path / f"run-{number}"
        (tmp_path / "send").write_text(stop)
        stopped = emrun("train", "config.yaml", "-q", "--output-dir", run)
        assert stopped.returncode != 0, stop
        assert not (tmp_path / "send").exists()
        assert results(run) != (lines, files), stop
        resumed = emrun("resume", run, "-q")
        assert resumed.returncode == 0, resumed.stderr
        assert results(run) == (lines, files), stop
