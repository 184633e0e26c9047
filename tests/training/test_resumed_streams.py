"""Streams that a resume continues, and those that it cannot repeat, of which it warns."""

import shutil

import pytest
from training.resuming import DATA, config_of, interrupted, result, resumed, stopped

from emrun import create_training, resume_training
from emrun.config.config import read_config
from emrun.training.create import train


def test_a_stream_that_cannot_be_repeated_logs_a_warning(project, caplog):
    (project / "wild_data.py").write_text(
        DATA + "\nimport random\n_rng = random.SystemRandom()\n\n\nclass Wild(Data):\n"
        "    def plain(self):\n        for _ in range(5):\n            yield self._batch([0] * 4, _rng.random())\n"
    )
    config = {**config_of("plain"), "dataset": {"class": "wild_data.Wild", "kind": "plain"}}
    events = interrupted(config, project / "run", None)
    shutil.rmtree(project / "run")
    interrupted(config, project / "run", events.index("before_epoch 1") + 8)
    resumed(project / "run")
    assert "this resume is not exact: stream 'train'" in caplog.text


def test_a_changed_value_is_named_as_the_cause(project, caplog):
    train(create_training(config_of(), output_dir=project / "run", overrides=["hooks.StopAfter.iterations=3"]))
    seed = int(read_config(project / "run")["seed"])
    train(resume_training(project / "run", [f"seed={seed + 1}", "~hooks.StopAfter.iterations"]))
    what = "stream 'train' gives other values of 'x', 'y' than before, as this resume changes seed: "
    assert f"this resume is not exact: {what}{seed} -> {seed + 1}" in caplog.messages


MEMORY = '''

class Memory(Data):
    """The same object for every pass; its random numbers continue from pass to pass."""

    def stateful(self):
        if not hasattr(self, "stream"):
            self.stream = Endless(self)
        return self.stream

    def plain(self):
        if not hasattr(self, "rng"):
            self.rng = np.random.default_rng(7)
        for _ in range(5):
            yield self._batch(self.rng.integers(0, 20, size=4))


class Endless(Stateful):
    def __iter__(self):
        self.index %= 5
        return super().__iter__()
'''


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_stream_with_a_state_continues_after_a_pass(project, epochs):
    (project / "memory_data.py").write_text(DATA + MEMORY)
    config = {**config_of("stateful"), "dataset": {"class": "memory_data.Memory", "kind": "stateful"}}
    train(create_training(config, output_dir=project / "straight", overrides=["hooks.StopAfter.epochs=3"]))
    directory = stopped(project, config, epochs)
    train(resume_training(directory, ["hooks.StopAfter.epochs=3"]))
    assert result(directory) == result(project / "straight")


def test_a_stream_with_a_hidden_state_logs_a_warning_after_a_pass(project, caplog):
    (project / "memory_data.py").write_text(DATA + MEMORY)
    config = {**config_of("plain"), "dataset": {"class": "memory_data.Memory", "kind": "plain"}}
    directory = stopped(project, config, epochs=2)
    train(resume_training(directory, ["hooks.StopAfter.epochs=3"]))
    assert "this resume is not exact: stream 'train'" in caplog.text


@pytest.mark.parametrize(("buffer", "told"), [(0, False), (2, True)])
def test_global_random_numbers_in_a_reader_thread_log_a_warning(project, caplog, buffer, told):
    (project / "global_data.py").write_text(
        DATA + "\n\nclass Global(Data):\n    def plain(self):\n        for _ in range(5):\n"
        "            yield self._batch(np.random.randint(0, 20, size=4))\n"
    )
    config = {**config_of("plain", buffer=buffer), "dataset": {"class": "global_data.Global", "kind": "plain"}}
    events = interrupted(config, project / "run", None)
    shutil.rmtree(project / "run")
    interrupted(config, project / "run", events.index("before_epoch 1") + 8)
    resumed(project / "run")
    assert ("this resume is not exact: stream 'train'" in caplog.text) == told
