"""A plugin for pytest where no extra is installed: a test that fails for want of a library of an extra is skipped.

`tests/release_check.py` runs the tests of the wheel with `-p without_extras`. The report of such a test names the
library, or how the extra is installed.
"""

import re

import pytest

LIBRARIES = (
    "sklearn", "torchmetrics", "torchdata", "pyarrow", "datasets", "PIL", "torchvision", "pooch", "requests", "optuna",
    "matplotlib", "tensorboard", "wandb", "trackio", "mlflow", "onnx", "onnxscript", "onnxruntime", "transformers",
    "tokenizers", "peft",
)  # fmt: skip
"""What the libraries of the extras are imported by."""
MISSING = re.compile(rf"No module named '(?:{'|'.join(LIBRARIES)})\b.*|.*pip install 'emrun\[.*")


def skip_for_want_of_extra(report, place):
    """Make a failed report one of a skip, if it names a library of an extra that is not installed."""
    if report.failed and (found := MISSING.search(f"{report.longrepr}\n{report.longreprtext}")):
        report.outcome = "skipped"
        report.longrepr = (str(place), 0, f"Skipped: needs an extra: {found[0]}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Skip a file that imports a library of an extra."""
    report = yield
    return skip_for_want_of_extra(report, collector.path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Skip a test that uses a library of an extra."""
    report = yield
    return skip_for_want_of_extra(report, item.path)
