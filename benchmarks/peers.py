"""Compare emrun with other training frameworks: time of a step, bookkeeping, memory, start and statistics.

    python benchmarks/peers.py [--only bare,typical] [--peers emrun,ignite] [--rounds 20]

Each runner trains in a process of its own and alternates with a raw PyTorch loop that does the same work. Medians are
printed as Markdown tables. Peers that are not installed are skipped; `make bench-peers` installs all of them.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from time import perf_counter

from runners import RAW, RUNNERS, WAYS, WITH_BEGUN, WITH_NULL, WITH_SEVERAL
from runners.first_update import command
from runners.measuring import EPOCHS, LONG, LOSSES, STEPS, Row, alternate, child

BUDGETS = {  # of emrun
    "bare": (1.05, "times the raw loop"),
    "begun": (1.05, "times the raw loop"),
    "begun_long": (1.05, "times the raw loop"),
    "typical": (1.10, "times the raw loop"),
    "null": (2.0, "us a batch"),
    "several": (1 / 0.97, "times the hand-written DDP loop"),
    "several_large": (1 / 0.97, "times the hand-written DDP loop"),
    "memory": (1.1, "times the raw loop"),
    "startup": (1.3, "times plain PyTorch"),
    "metrics": (0.2, "s more than the stream"),
}
MEMORY_BUDGET = 1.0  # MB that statistics may grow by


class Bench:
    """Runs the measurements in processes and prints their tables.

    Args:
        names: the runners.
        rounds: rounds of the bare step; slower tables have half as many, the start of processes a quarter.
    """

    def __init__(self, names: list[str], rounds: int) -> None:
        self._names = names
        self._rounds = rounds
        self._rows: dict[tuple[str, str], Row] = {}
        self.failed: list[str] = []

    def rows(self, table: str, names: Iterable[str]) -> dict[str, Row]:
        """Return the rows of a table, without those of runners that fail; these are listed in `failed`."""
        found = {name: self._row(table, name) for name in names}
        return {name: row for name, row in found.items() if row}

    def _row(self, table: str, name: str) -> Row:
        if (table, name) not in self._rows:
            rounds = self._rounds if table in ("bare", "begun", "null") else max(2, self._rounds // 2)
            print(f"{table}: {name}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as place:
                result = Path(place) / "result.json"
                words = [sys.executable, "-W", "ignore", __file__, "--child", table, name, str(rounds), str(result)]
                status, error = run(words, Path(place), processes=2 if table.startswith("several") else 1)
                if status:
                    self.failed.append(f"{table}: {name}: {error}")
                self._rows[table, name] = json.loads(result.read_text()) if not status else {}
        return self._rows[table, name]

    def bare(self) -> None:
        """Print the table of the bare step."""
        rows = self.rows("bare", self._names)
        self._show_steps(
            f"A bare step: MLP 784-128-10, batches of 32 in memory, SGD, one thread; {STEPS} steps a round", rows
        )
        verdict("bare", rows, "ratio")

    def begun(self) -> None:
        """Print the table of the first steps of a run."""
        self._begun("begun", STEPS)

    def begun_long(self) -> None:
        """Print the table of the first steps of a longer run."""
        self._begun("begun_long", LONG)

    def _begun(self, table: str, steps: int) -> None:
        rows = self.rows(table, [name for name in self._names if name in WITH_BEGUN])
        self._show_steps(f"The first {steps} steps of a run, as a bare step but from its first batch", rows)
        verdict(table, rows, "ratio")

    def typical(self) -> None:
        """Print the table of a step with the usual hooks."""
        rows = self.rows("typical", self._names)
        self._show_steps(
            "A typical step: also a progress bar to a file, mean loss and accuracy, CSV, a checkpoint an epoch; "
            f"{EPOCHS} epochs of {STEPS} steps, the ends of the epochs included",
            rows,
        )
        verdict("typical", rows, "ratio")

    def _show_steps(self, caption: str, rows: dict[str, Row]) -> None:
        """Print the times of a step, beside those of the raw loop."""
        show(
            caption,
            ["", "us a step", "raw loop, us", "times raw", "what differs"],
            [
                [title(n), f"{r['found']:.0f}", f"{r['raw']:.0f}", f"{r['ratio']:.2f}", r["note"]]
                for n, r in rows.items()
            ],
        )

    def null(self) -> None:
        """Print the table of the bookkeeping of a batch."""
        rows = self.rows("null", [name for name in self._names if name in WITH_NULL])
        show(
            "Bookkeeping of a batch: a model that does nothing, over a bare `for` that calls it",
            ["", "us a batch", "what differs"],
            [[title(name), f"{row['more']:.2f}", row["note"]] for name, row in rows.items()],
        )
        verdict("null", rows, "more")

    def several(self) -> None:
        """Print the table of a step of two processes."""
        self._several("several", "MLP 784-128-10")

    def several_large(self) -> None:
        """Print the table of a step of two processes with a larger model, whose gradients have 12 MB."""
        self._several("several_large", "MLP 784-1024-1024-1024-10")

    def _several(self, table: str, model: str) -> None:
        rows = self.rows(table, [name for name in self._names if name in WITH_SEVERAL])
        show(
            f"Two processes on gloo: {model}, batches of 2 x 32 in memory, SGD, one thread each; {STEPS} steps a round",
            ["", "us a step", "DistributedDataParallel loop, us", "times that"],
            [[title(n), f"{r['found']:.0f}", f"{r['raw']:.0f}", f"{r['ratio']:.2f}"] for n, r in rows.items()],
        )
        verdict(table, rows, "ratio")

    def memory(self) -> None:
        """Print the table of peak memory, from the processes of the bare step."""
        base = self.rows("bare", [RAW])[RAW]["rss"]
        rows = self.rows("bare", self._names)
        for row in rows.values():
            row["times"] = row["rss"] / base
        show(
            "Peak memory of the process that trained with the bare loop",
            ["", "MB", "times raw"],
            [
                [title(RAW), f"{base:.0f}", "1.00"],
                *([title(name), f"{row['rss']:.0f}", f"{row['times']:.2f}"] for name, row in rows.items()),
            ],
        )
        verdict("memory", rows, "times")

    def startup(self) -> None:
        """Print the table of the time to the first update, in whole processes."""
        rounds = max(2, self._rounds // 4)
        with tempfile.TemporaryDirectory() as made:
            place = Path(made)
            rows, base = {}, command(RAW, place)
            for name in self._names:
                print(f"startup: {name}", file=sys.stderr, flush=True)
                try:
                    ours = partial(seconds, command(name, place), place)
                    rows[name] = alternate(partial(seconds, base, place), ours, rounds)
                except AssertionError as error:
                    self.failed.append(f"startup: {name}: {error}")
        show(
            "From the start of the process to the first update; emrun: `emrun train` of a config",
            ["", "s", "plain PyTorch, s", "times plain"],
            [[title(n), f"{r['found']:.2f}", f"{r['raw']:.2f}", f"{r['ratio']:.2f}"] for n, r in rows.items()],
        )
        verdict("startup", rows, "ratio")

    def metrics(self) -> None:
        """Print the table of accumulating the mean of many losses."""
        names = [name for name, (_, package) in WAYS.items() if version(package)]
        rows = self.rows("metrics", names)
        show(
            f"The mean of {LOSSES:,} losses in tensors of 32, beside their stream",
            ["", "s more than the stream", "us a batch", "memory, MB more"],
            [
                [WAYS[n][0], f"{r['more']:.2f}", f"{r['more'] / LOSSES * 32e6:.1f}", f"{r['growth']:.0f}"]
                for n, r in rows.items()
            ],
        )
        verdict("metrics", rows, "more")
        if "emrun" in rows:
            growth = rows["emrun"]["growth"]
            held = "held" if growth <= MEMORY_BUDGET else "NOT HELD"
            print(f"\nBudget of emrun: constant memory; {growth:.1f} MB more, {held}.", flush=True)


def seconds(words: list[str], place: Path) -> float:
    """Return the seconds that a command takes; the command must succeed."""
    began = perf_counter()
    status, error = run(words, place)
    taken = perf_counter() - began
    assert status == 0, error
    return taken


def run(words: list[str], place: Path, processes: int = 1) -> tuple[int, str]:
    """Return the exit status of a command and, if it fails, the last line of its output, which goes to a file.

    Args:
        words: the command.
        place: the directory that it runs in.
        processes: how many processes run it; several ones get the environment of torch's launcher.
    """
    offline = {"HF_HUB_OFFLINE": "1", "KERAS_BACKEND": "torch", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile() as output:
        environment = {**os.environ, **offline}
        if processes > 1:
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "bench"}
            environment |= {name: str(value) for name, value in meeting.items()}
            environment |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "GROUP_RANK": "0"}
        started = [
            subprocess.Popen(
                words,
                cwd=place,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else environment,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
            )
            for rank in range(processes)
        ]
        status = max((each.wait() for each in started), key=abs)
        output.seek(0)
        lines = output.read().decode(errors="replace").split("\n") if status else []
    return status, next((line for line in reversed(lines) if line.strip()), "")


def title(name: str) -> str:
    """Return the title of a runner in tables."""
    return "raw PyTorch loop" if name == RAW else RUNNERS[name][0]


def version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    if distribution == "emrun":
        import emrun

        return emrun.__version__
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def show(caption: str, header: list[str], lines: list[list[str]]) -> None:
    """Print a table."""
    print(f"\n### {caption}\n")
    for cells in (header, ["---", *("---:" if cell != "what differs" else "---" for cell in header[1:])], *lines):
        print("|", " | ".join(cells), "|")


def verdict(table: str, rows: dict[str, Row], key: str) -> None:
    """Print whether emrun keeps within the budget of a table."""
    if "emrun" in rows:
        budget, unit = BUDGETS[table]
        found = rows["emrun"][key]
        held = "held" if found <= budget else "NOT HELD"
        print(f"\nBudget of emrun: {budget:.4g} {unit}; {found:.2f}, {held}.", flush=True)


def machine() -> str:
    """Return a description of this machine."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores {models[0] if models else platform.processor()}, {platform.system()}"


def names_of(text: str | None, known: Iterable[str]) -> list[str]:
    """Return the names in the value of an option; without a value, all names."""
    names = text.split(",") if text else list(known)
    for name in names:
        if name not in known:
            raise SystemExit(f"{name!r} is not one of {', '.join(known)}")
    return names


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"tables, separated by commas: {','.join(BUDGETS)}")
    parser.add_argument("--peers", help=f"runners, separated by commas: {','.join(RUNNERS)}")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        table, name, rounds, result = arguments.child
        row = child(table, name, int(rounds))
        if os.environ.get("RANK", "0") == "0":
            Path(result).write_text(json.dumps(row))
        return
    tables, names = names_of(arguments.only, BUDGETS), names_of(arguments.peers, RUNNERS)
    versions = {name: version(RUNNERS[name][1]) for name in names}
    there = [name for name in names if versions[name]]
    torch = version("torch")
    print(f"{datetime.date.today()}, {machine()}, Python {platform.python_version()}, torch {torch}")
    print(", ".join(f"{RUNNERS[name][1]} {versions[name]}" for name in there), flush=True)
    if missing := [title(name) for name in names if not versions[name]]:
        print(f"Not installed: {', '.join(missing)}")
    bench = Bench(there, arguments.rounds)
    for table in tables:
        getattr(bench, table)()
    if bench.failed:
        raise SystemExit("\n".join(["failed:", *bench.failed]))


if __name__ == "__main__":
    main()
