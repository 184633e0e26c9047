"""The process without emrun in which an export is tried out, begun with what the tests have imported.

A new Python takes seconds to import PyTorch.
"""

from pathlib import Path
from types import SimpleNamespace

IN_A_FORK = Path(__file__).with_name("in_a_fork.py")


def let_fork(patch, warm):
    """Let exports run their programs in forks, which forget emrun, instead of in new processes."""

    def run(command, cwd="/", **options):
        assert command[1:4] == ["-I", "-W", "ignore"]
        return warm.run([str(IN_A_FORK), *command[4:]], cwd, 100)

    for module in ("comparison", "weights"):
        patch.setattr(f"emrun.exports.{module}.subprocess", SimpleNamespace(run=run))
