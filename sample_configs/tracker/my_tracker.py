import json
from pathlib import Path

from emrun.hooks import AbstractTracker


class AppendRows(AbstractTracker):
    """Appends the rows of a run to a file, in place of a service."""

    def __init__(self, file, **kwargs):
        super().__init__(**kwargs)
        self.file = file

    def begin(self, facts, identity):
        self.run = identity or facts.name
        Path(self.file).touch()
        return self.run

    def newest(self):
        rows = map(json.loads, Path(self.file).read_text().splitlines())
        return max((row["iteration"] for row in rows if row["run"] == self.run), default=-1)

    def write(self, row):
        with Path(self.file).open("a") as file:
            file.write(json.dumps({"run": self.run, "iteration": row.iteration, **row.values}) + "\n")
