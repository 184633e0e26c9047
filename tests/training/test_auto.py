"""What a run finds for `auto` is in its config, from then on."""

import pytest
from campaign import thinned
from training.resuming import FEW_HOOKS, config_of, interrupted, result, resumed, straight

from emrun import load_config
from emrun.storage.run import CONFIG

MODULE = """
import torch
from resume_model import Net


class Small(Net):
    def forward(self, x, y):
        if self.training and len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x, y)
"""

YAML = """
dataset: {class: resume_data.Data, kind: context}
model:
  module: {class: small_model.Small}
  optimizer: {class: Adam, lr: 0.05}
  micro_batch_size: auto  # four examples do not fit
main_loop: {skip_zeroth_epoch: true}
hooks: [StopAfter: {epochs: 1}]
"""


def config_with(size):
    config = config_of(hooks=FEW_HOOKS)
    config["model"] |= {"module": {"class": "small_model.Small"}, "micro_batch_size": size}
    return config


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("at", "size"), thinned([("after_epoch 0", "auto"), ("after_update", 2)], [("after_update", 2)])
)
def test_a_resume_from_before_or_after_the_search_gives_a_run_with_the_number(project, at, size):
    (project / "small_model.py").write_text(MODULE)
    interrupted(config_with("auto"), project / "run", at)
    assert load_config(project / "run")["model"]["micro_batch_size"] == size
    resumed(project / "run")
    assert result(project / "run") == straight(project, config_with(2))


def test_the_number_is_in_the_config_and_the_same_command_resumes(project, emrun_here):
    (project / "small_model.py").write_text(MODULE)
    (project / "c.yaml").write_text(YAML)
    for _ in range(2):
        done = emrun_here("train", "c.yaml", "--output-dir", "run", "--auto-resume", cwd=project)
        assert done.returncode == 0, done.stderr
        assert "micro_batch_size: 2\n" in (project / "run" / CONFIG).read_text()
    assert "nothing to do" in done.stderr
    log = (project / "run" / "train.log").read_text()
    assert "model.micro_batch_size: 2, found with a batch of 4 examples" in log
