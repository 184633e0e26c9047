"""Run directories as emrun writes them, without a training."""

from datetime import datetime, timedelta, timezone

import pytest

from emrun.config.yaml_tree import parse
from emrun.record.metrics_log import MetricsLog
from emrun.storage.files import flush_lines
from emrun.storage.run import create_run

BEGIN = datetime(2026, 11, 20, 21, 3, 1, tzinfo=timezone(timedelta(hours=1)))
CONFIG = """\
seed: 42
dataset: {class: Digits, batch_size: 32}
vars: {width: 32}
model:
  module: {class: my_model.Net, channels: 32, width: "${vars.width}"}
  optimizer:
    class: AdamW
    lr: 0.003   # low
hooks:
  - ComputeStats: {variables: [loss, accuracy]}
  - LogVariables
  - SaveBest: {variable: accuracy, condition: max}
  - StopAfter: {epochs: 3}
"""


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """Return a function that makes a run in `log`, with an epoch for each value of the accuracy."""
    monkeypatch.delenv("EMRUN_OUTPUT_DIR_FORMAT", raising=False)

    def make(name, accuracies=(), *, status="finished", config=CONFIG, minutes=2, where="log", steps=(), files=()):
        """`status` may be `running`, with a lock that `run.release()` gives back, or `killed`; `files`: see hooks."""
        times = iter([BEGIN, *[BEGIN + timedelta(minutes=minutes)] * 1000])
        place = tmp_path / where / name
        options = {"seed": 42, "clock": lambda: next(times), "plain": parse(config, "").plain()}
        run = create_run(config, name, output_root=place.parent, output_dir=place, **options)
        run.claim(files)
        if status in ("running", "killed"):  # another run writes its trace when it ends
            run.trace.write()
        record = MetricsLog(run.directory)
        for epoch, accuracy in enumerate(accuracies):
            statistics = {"loss": {"mean": 1.0 - accuracy}, "accuracy": {"mean": accuracy, "std": 0.5}}
            run.trace.count(epoch, 10 * epoch)
            data = {"train": {"loss": {"mean": 0.5}}, "valid": statistics}
            record.add_epoch(epoch, 10 * epoch, 10 * epoch, 1.5, data)
        record.steps.begin()
        for chunk in steps:
            record.steps.append(chunk)
        if status == "killed":
            flush_lines()
            run.release()
        elif status != "running":
            epoch = max(0, len(accuracies) - 1)
            run.end(status, int(status == "failed"), f"{status} here", epoch, 10 * epoch)
        return run

    return make
