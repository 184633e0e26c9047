"""`emrun verify-run`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from emrun.base.arguments import resolved
from emrun.base.censor import hidden
from emrun.cli.console import overrides_argument, run_argument, terminal_log
from emrun.cli.failures import import_torch, unwound_by_sigterm
from emrun.cli.output import print_json, table, with_json
from emrun.cli.resume import ranks_before
from emrun.runs.finding import find_run


@click.command()
@run_argument
@overrides_argument
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@with_json
def verify_run(directory: Path, overrides: tuple[str, ...], quiet: bool, as_json: bool) -> int:
    """Prove that the run in DIRECTORY still gives what it recorded, or say what differs and why.

    The checkpoint best, or else latest, is evaluated again as the training has evaluated it, and its statistics are
    compared with metrics.jsonl. The first 20 steps are trained again and compared with steps.jsonl. Both must be the
    same to the last bit. Each has a process of its own, on as many ranks as the run had. Then code, data, device and
    packages are compared with what the run has recorded, the worst difference first. The run directory is only read.
    Modules are imported as by emrun eval; if the directory where the run was started is gone, from the run directory.
    An OVERRIDE such as dataset.path=/new/place says where data are now.

    Exit status: 0 what could be compared is the same, 1 something differs or nothing could be compared, 2 wrong usage
    or config.
    """
    sys.dont_write_bytecode = True
    with terminal_log(quiet=quiet), unwound_by_sigterm():
        run = find_run(resolved(directory))
        ranks_before(run.directory, lambda count: "verify it on a machine with as many")
        import_torch()
        from emrun.diagnosis.run_verification import verify_run as verify

        report = verify(run, list(overrides))
    if as_json:
        print_json(report)
        return 0 if report["same"] else 1
    lines = [table([list(row.values()) for row in report["rows"]], ["part", "result", ""])]
    for severity, texts in report["differences"].items():
        if texts:
            lines += [f"\n{severity}:", *(f"  {text}" for text in texts)]
    lines += [f"\nnote: {note}" for note in report["notes"]]
    if report["cause"]:
        lines.append(f"\nlikely cause: {report['cause']}")
    has_compared = report["same"] or report["cause"]
    verdict = f"the run {'gives' if report['same'] else 'does not give'} what it recorded"
    click.echo(hidden("\n".join([*lines, f"\n{verdict if has_compared else 'nothing could be compared'}"])))
    return 0 if report["same"] else 1
