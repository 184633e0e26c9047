"""EarlyStopping, OnPlateau and SaveBest over a resume: they count, end and save as in the uninterrupted run."""

import pytest
from training.resuming import Interrupt, config_of, interrupted, result, resumed, train_with

from emrun import resume_training

NAN = float("nan")

SCORES = '''
from emrun import AbstractHook


class Scores(AbstractHook):
    """Writes a value for each epoch in which `valid` is evaluated."""

    writes = ["score"]

    def __init__(self, values):
        super().__init__()
        self.values = values

    def after_epoch(self, epoch_id, epoch_data):
        if "valid" in epoch_data:
            epoch_data["valid"]["score"] = float(self.values[min(epoch_id, len(self.values) - 1)])
'''

BEST = {"SaveBest": {"variable": "score", "keep": 2}}


CASES = [  # an epoch has five iterations; the run is interrupted between epochs, and in its third and fourth
    ({"patience": 3}, [9, 7, 7, 8, 7], ["valid"], 4, [1, 2]),  # of equal values the earliest is kept
    ({"patience": 3}, [9, NAN, 7, "nan", NAN, NAN], ["valid"], 5, [0, 2]),
    ({"patience": 2}, [9, 0, 7, 0, 8, 0, 8], [{"valid": "2 epochs"}], 6, [2, 4]),
    ({"patience": 1, "not_before": 5}, [9, 7, 8], ["valid"], 5, [1, 2]),
    ({"patience": 1, "not_before": "23 updates"}, [9, 7, 8], ["valid"], 5, [1, 2]),
    ({"patience": None, "threshold": 6, "not_before": "24 iterations"}, [9, 7, 8], ["valid"], 5, [1, 2]),
]


@pytest.mark.campaign  # the tests of these hooks in tests/hooks have a resume each
@pytest.mark.parametrize(
    ("stop", "values", "streams", "epochs", "best"),
    CASES,
    ids=["ties", "NaN", "every second epoch", "not before an epoch", "not before an update", "threshold"],
)
def test_patience_and_the_best_few_over_resumes_are_those_of_the_uninterrupted_run(
    project, stop, values, streams, epochs, best
):
    (project / "scores_of_stopping.py").write_text(SCORES)
    config = config_of(extra_streams=streams)
    config["hooks"] = [
        "ComputeStats", {"scores_of_stopping.Scores": {"values": [str(value) for value in values]}}, BEST,
        {"OnPlateau": {"variable": "score", "long_term": 2, "short_term": 1}},
        {"EarlyStopping": {"variable": "score", **stop}}, {"StopAfter": {"epochs": 9}},
    ]  # fmt: skip
    interrupted(config, project / "straight", None)
    expected = result(project / "straight")
    assert expected["loop"]["epochs_done"] == epochs
    assert [name for name in expected["names"] if name.startswith("best-")] == [f"best-{epoch}" for epoch in best]
    directory = project / "often"
    interrupted(config, directory, "after_epoch 2")
    for event in ("after_batch train", "before_epoch 4"):
        again(directory, event)
    resumed(directory)
    assert repr(result(directory)) == repr(expected)  # NaN is not equal to itself
    assert resume_training(directory) is None


def again(directory, event):
    """Resume, and interrupt at the first event of a name."""
    train_with(resume_training(directory), Interrupt(event))
