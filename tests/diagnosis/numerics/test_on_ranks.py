"""Processes that share a batch have the gradients of one; here they are forks, in tests/cli/test_check.py new ones."""

import pytest
from campaign import thinned
from faulty_models import TOKENS, config_of
from in_ranks import in_ranks

from emrun.config.import_finder import Imported
from emrun.config.plan import Plan
from emrun.config.yaml_text import dump
from emrun.diagnosis.numerics.gradients import Step
from emrun.diagnosis.numerics.on_ranks import compared, leave, measure_on_ranks
from emrun.diagnosis.recorded_trainings import Job
from emrun.storage.run import Run
from emrun.stream_context import StreamContext
from emrun.training.build import assemble

NORM = {"class": "torch.nn.BatchNorm1d", "num_features": 5}


CASES = [
    ({"module": {"class": "faulty_models.Net", "rate": 0.5}, "accumulate": 2}, "same"),
    ({"module": {"class": "faulty_models.Tokens", "how": "weighted"}, **TOKENS}, "same"),
    ({"module": {"class": "faulty_models.Net", "part": NORM}}, "differs"),
    ({"module": {"class": "faulty_models.Net", "part": NORM}, "sync_batch_norm": True}, "same"),
]


@pytest.mark.parametrize(("model", "result"), thinned(CASES, CASES[1:3]))
def test_ranks_have_the_gradients_of_one_process(tmp_path, model, result):
    config = config_of(model)
    training = assemble(Plan.of(config, Imported()), tmp_path, Run(tmp_path))
    step = Step.of(training)
    batch = next(iter(training.dataset.train_stream(StreamContext("train", seed=0, epoch=1))))
    leave(step, batch, tmp_path)
    (tmp_path / "config.yaml").write_text(dump(config.root))
    job = Job(str(tmp_path), str(tmp_path), [], "ranks", ranks=2, measures=True)
    in_ranks(2, measure_on_ranks, job)
    assert compared(step.measure(batch), tmp_path).result == result
