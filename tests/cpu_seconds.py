"""The CPU seconds of the tests: only these repeat on a machine that does other work too.

Every run of the tests prints its CPU seconds, those of its children included, at its end. The table of folders and of
the longest files in `cpu_seconds.md` is written by `python tests/cpu_seconds.py`, which runs all tests.
"""

import json
import os
import re
import resource
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from tabulate import tabulate

TESTS = Path(__file__).parent
TABLE = TESTS / "cpu_seconds.md"
LONG = 1.0  # CPU seconds of a file that the table lists
SLOW = 0.08  # CPU seconds of a test in the mean of its file, above which the file is slow
_TICK = os.sysconf("SC_CLK_TCK")
_KEY = "cpu_seconds"


def of_process_tree():
    """Return the CPU seconds of this process, its living descendants and all that these have waited for."""
    ticks, left = 0, [str(os.getpid())]
    while left:
        place = Path("/proc") / left.pop()
        with suppress(OSError):  # it has ended
            ticks += sum(map(int, (place / "stat").read_text().rpartition(")")[2].split()[11:15]))
            for thread in (place / "task").iterdir():
                left += (thread / "children").read_text().split()
    return ticks / _TICK


def longest_first(items):
    """Sort tests by the CPU seconds of their files in the table, so that no worker ends with a long file alone.

    Tests of files whose mean is more than `SLOW` are marked as slow.
    """
    rows = re.findall(r"^\| `(.+?)` +\| +(\d+) \| +([\d.]+) \|", TABLE.read_text(), re.MULTILINE)
    seconds = {name: float(each) for name, _, each in rows}
    slow = {name for name, count, each in rows if float(each) > SLOW * int(count)}
    items.sort(key=lambda item: seconds.get(item.nodeid.partition("::")[0], 0.0), reverse=True)
    for item in items:
        if item.nodeid.partition("::")[0] in slow:
            item.add_marker("slow")


class Meter:
    """Measures the tests of this process, or adds up what its workers have measured."""

    def __init__(self, config):
        self.config = config
        self.file = config.getoption("--cpu-seconds")
        self.seconds, self.tests = Counter(), Counter()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        """Measure a test with its fixtures, if a table is wanted."""
        if self.file is None:
            return (yield)
        before = of_process_tree()
        try:
            return (yield)
        finally:
            name = item.nodeid.partition("::")[0]
            self.seconds[name] += of_process_tree() - before
            self.tests[name] += 1

    def pytest_sessionfinish(self):
        """Hand what was measured to the process that has started this worker."""
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput[_KEY] = json.dumps([self.seconds, self.tests])

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        """Add what a worker has measured."""
        if measured := getattr(node, "workeroutput", {}).get(_KEY):
            for total, part in zip((self.seconds, self.tests), json.loads(measured), strict=True):
                total.update(part)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter):
        """Print the total; workers have ended, and so count as children that were waited for."""
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        user, system = (sum(getattr(each, name) for each in used) for name in ("ru_utime", "ru_stime"))
        terminalreporter.write_line(
            f"{user + system:.0f} CPU seconds with children: {user:.0f} user, {system:.0f} system"
        )
        if self.file is not None:
            Path(self.file).write_text(self.table(user + system))

    def table(self, total):
        """Return the page: CPU seconds by folder, and of the longest files."""
        folders, tests = Counter(), Counter()
        for name, seconds in self.seconds.items():
            folder = name.split("/")[1] if name.count("/") > 1 else "the root"
            folders[folder] += seconds
            tests[folder] += self.tests[name]
        measured = self.seconds.total()
        rows = [[name, tests[name], part, f"{part / measured:.0%}"] for name, part in folders.most_common()]
        rows.append(["all", tests.total(), measured, "100%"])
        files = [[f"`{name}`", self.tests[name], part] for name, part in self.seconds.most_common() if part >= LONG]
        heads = ["folder", "tests", "CPU seconds", "share"], ["file", "tests", "CPU seconds"]
        parts = (tabulate(*each, tablefmt="github", floatfmt=".1f") for each in zip((rows, files), heads, strict=True))
        return "\n\n".join((
            "# CPU seconds of the tests",
            f"Children included; {total:.0f} in all, with starting, collecting and measuring. Written by "
            "`python tests/cpu_seconds.py`.",
            *parts,
        )) + "\n"  # fmt: skip


if __name__ == "__main__":
    command = [Path(sys.executable).with_name("pytest"), "-n", "2", "--dist", "worksteal", "--cpu-seconds", TABLE]
    sys.exit(subprocess.run(command, cwd=TESTS.parent, check=False).returncode)
