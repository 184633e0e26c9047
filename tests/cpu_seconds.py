"""The CPU seconds of the tests: only these repeat on a machine that does other work too.

Every run of the tests prints its CPU seconds, those of its children included, at its end. The tables in
`cpu_seconds.md`, of folders, files and tests, are written by `python tests/cpu_seconds.py`, which runs all cases of all
tests that are not marked for campaigns.

From the table of tests follows what `make test` runs: where a test has cases that take more than `CASE` each, it runs
as many as take `SHARE` together, at least one, spread evenly; the others are left to campaigns, as if they were marked.
The marker `whole` keeps all cases of a test, where each has a subject of its own, such as a page or a sample. A run of
few tests, such as that of a folder, has all cases too.
"""

import json
import os
import re
import resource
import subprocess
import sys
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path

import pytest
from tabulate import tabulate

TESTS = Path(__file__).parent
TABLE = TESTS / "cpu_seconds.md"
LONG = 1.0  # CPU seconds of a file that the table lists
SLOW = 0.08  # CPU seconds of a test in the mean of its file, above which the file is slow
CASE = 0.25  # CPU seconds of a case in the mean of its test, above which a part of the cases is left to campaigns
SHARE = 1.5  # CPU seconds of the cases of such a test that are not
MANY = 5000  # tests of a run that leaves cases to campaigns
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


def leave_to_campaigns(items):
    """Mark the cases that a run of the tests has no time for, see above; nothing where there are few tests."""
    if len(items) < MANY:
        return
    rows = re.findall(r"^\| `([^`]+::\w+)` +\| +\d+ \| +[\d.]+ \| +(\d+) \|", TABLE.read_text(), re.MULTILINE)
    cases = defaultdict(list)
    for item in items:
        if not any(item.iter_markers("campaign")) and not any(item.iter_markers("whole")):
            cases[test_of(item.nodeid)].append(item)
    for name, count in rows:
        stay, there = int(count), cases[name]
        kept = {len(there) * number // stay for number in range(stay)}
        for number, item in enumerate(there):
            if number not in kept:
                item.add_marker("campaign")


def test_of(nodeid):
    """Return the name of a test without that of its case."""
    return nodeid.partition("[")[0]


def staying(count, seconds):
    """Return how many of the cases of a test stay in every run of all tests, which take these CPU seconds together."""
    if seconds <= SHARE or seconds <= CASE * count:
        return count
    return max(1, int(count * SHARE / seconds))


class Meter:
    """Measures the tests of this process, or adds up what its workers have measured."""

    def __init__(self, config):
        self.config = config
        self.file = config.getoption("--cpu-seconds")
        self.seconds, self.tests, self.whole = Counter(), Counter(), Counter()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        """Measure a test with its fixtures, if a table is wanted."""
        if self.file is None:
            return (yield)
        before = of_process_tree()
        try:
            return (yield)
        finally:
            name = test_of(item.nodeid)
            self.seconds[name] += of_process_tree() - before
            self.tests[name] += 1
            self.whole[name] += any(item.iter_markers("whole"))

    def pytest_sessionfinish(self):
        """Hand what was measured to the process that has started this worker."""
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput[_KEY] = json.dumps([self.seconds, self.tests, self.whole])

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        """Add what a worker has measured."""
        if measured := getattr(node, "workeroutput", {}).get(_KEY):
            for total, part in zip((self.seconds, self.tests, self.whole), json.loads(measured), strict=True):
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
        """Return the page: CPU seconds by folder, of the longest files, and of tests whose cases do not all stay."""
        folders, files, cases = defaultdict(list), defaultdict(list), []
        for name, seconds in self.seconds.items():
            count = self.tests[name]
            stay = count if self.whole[name] else staying(count, seconds)
            row = [count, seconds, stay, seconds * stay / count]
            file = name.partition("::")[0]
            files[f"`{file}`"].append(row)
            folders[file.split("/")[1] if file.count("/") > 1 else "the root"].append(row)
            if stay < count:
                cases.append([f"`{name}`", *row])
        by_folder, by_file = (
            sorted(([name, *map(sum, zip(*rows, strict=True))] for name, rows in each.items()), key=_by_seconds)
            for each in (folders, files)
        )
        by_folder.append(["all", *(sum(row[column] for row in by_folder) for column in range(1, 5))])
        tables = [
            ("folder", by_folder),
            ("file", [row for row in by_file if row[2] >= LONG]),
            ("test", sorted(cases, key=_by_seconds)),
        ]
        columns = ["cases", "CPU seconds", "in `make test`", "CPU seconds"]
        parts = (tabulate(rows, [head, *columns], tablefmt="github", floatfmt=".1f") for head, rows in tables)
        return "\n\n".join((
            "# CPU seconds of the tests",
            f"Children included; {total:.0f} in all, with starting, collecting and measuring. Written by "
            "`python tests/cpu_seconds.py`, which says what the last table is for.",
            *parts,
        )) + "\n"  # fmt: skip


def _by_seconds(row):
    return -row[2]


if __name__ == "__main__":
    command = [Path(sys.executable).with_name("pytest"), "-n", "2", "--dist", "worksteal", "--cpu-seconds", TABLE]
    sys.exit(subprocess.run(command, cwd=TESTS.parent, check=False).returncode)
