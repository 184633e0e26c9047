"""Streams that use again what they gave away, read ahead by a thread or a worker, in trainings by the command."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "streams" / "reusing_streams.py"
SPEC = importlib.util.spec_from_file_location("reusing_streams", FILE)
streams = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(streams)

PARTS = """
import json
from emrun import AbstractHook, AbstractModel
from emrun.base.encoding import digest


class Nothing(AbstractModel):
    input_names = ()
    output_names = ()

    def run(self, batch, train, stream):
        return {}

    def save(self, directory):
        (directory / "nothing").touch()

    def load(self, directory):
        pass


class Note(AbstractHook):
    changes_batches = False

    def __init__(self, output_dir):
        super().__init__()
        self.place = output_dir

    def before_training(self):
        self.seen = []

    def before_batch(self, batch):
        self.seen.append(digest({**batch}))

    def after_epoch(self):
        (self.place / "seen.json").write_text(json.dumps(self.seen))
"""

CONFIG = {
    "seed": 5,
    "dataset": {"class": "reusing_streams.Data"},
    "model": {"class": "parts.Nothing"},
    "main_loop": {"skip_zeroth_epoch": True, "on_unused_sources": "ignore"},
    "hooks": ["parts.Note", {"StopAfter": {"epochs": 1}}],
}
READERS = ["buffer=8", "workers=1"]


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.fault("a stream uses again what it gave away, and is read ahead")
def test_a_stream_that_uses_things_again_gives_the_same_batches(tmp_path, small, trials):
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "config.yaml").write_text(json.dumps(CONFIG))
    shutil.copy(FILE, tmp_path)
    no_checksum = ("a_sparse_tensor", "a_memoryview")
    kinds = [kind for kind in streams.KINDS if kind not in no_checksum]
    cases = [(kind, READERS[(index + other) % 2]) for other in (0, 1) for index, kind in enumerate(kinds)]
    cases.remove(("a_view_of_one_dict", "workers=1"))  # cannot be pickled, which is an error that says so
    for trial in trials(cases, small=4):
        kind, reader = trial.case

        def train(name, *settings, kind=kind):
            return small.command(
                "train", "-q", "config.yaml", f"dataset.kind={kind}", "--output-dir", name, *settings, cwd=tmp_path
            )

        with trial:
            name = f"{kind}-{reader}"
            done = train(name, f"main_loop.{reader}", "main_loop.start_method=fork")
            assert (done.returncode, done.stderr) == (0, "")
            assert train(f"{name}-straight").returncode == 0
            seen, straight = ((tmp_path / each / "seen.json").read_text() for each in (name, f"{name}-straight"))
            assert seen == straight
