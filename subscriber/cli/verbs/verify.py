"""``subscriber verify``: compare the rows of both sides at one LSN while replication runs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import subscriber
from subscriber.cli.options import add_connection_option, table_name
from subscriber.cli.output import complain, emit, say
from subscriber.cli.service.configuration_file import add_located_arguments, locate
from subscriber.errors import ConfigurationError
from subscriber.interfaces import TableName
from subscriber.printable import counted, printable
from subscriber.protocol.lsn import Lsn
from subscriber.subscription.comparison.verify import verify
from subscriber.subscription.management.repair import repair, require_repairable, why_not_repairable
from subscriber.verification.model import RowDifference, RowKind, TableReport, VerificationLimits, VerificationReport

__all__ = ["add_arguments"]

_SHOWN: Final = 20
"""How many rows of a table are shown as text. The JSON report has all."""
_LINE_SECONDS: Final = 2.0
_METHOD: Final = "64-bit hashes of the values of all compared columns, added up over ranges of rows; rows one by one where these differ"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = (
        "Compares the tables of a running subscription with the publisher's, both as of one LSN. Apply is held only until the snapshots are"
        " open. Exit status 1 if a table differs or could not be compared."
    )
    add_located_arguments(parser)
    add_connection_option(parser)
    parser.add_argument(
        "--table", action="append", type=table_name, default=[], metavar="SCHEMA.TABLE", help="only this table; may be repeated"
    )
    parser.add_argument("--jobs", type=_positive, default=2, metavar="N", help="sessions on each side; default: %(default)s")
    parser.add_argument("--max-rate", type=_positive, metavar="ROWS", help="read at most so many rows per second on each side")
    parser.add_argument(
        "--max-differences", type=_positive, default=1000, metavar="N", help="name at most so many rows of a table; default: %(default)s"
    )
    parser.add_argument("--show-values", action="store_true", help="show the values of differing rows, not only their keys and columns")
    parser.add_argument("--changed", action="store_true", help="read only rows that changed since a table was last found equal")
    parser.add_argument("--repair", action="store_true", help="make the differing rows of the target equal to those of the publisher")
    parser.add_argument("--dry-run", action="store_true", help="with --repair: only show which rows would be changed")
    parser.add_argument("--certificate", type=_file, metavar="FILE", help="write what was compared, how and when, as a JSON object")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(execute=_execute)


def _file(text: str) -> Path:
    path = Path(text).absolute()
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f'directory "{path.parent}" does not exist')
    return path


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number above 0')
    return int(text)


class _ProgressLines:
    """Tells the progress on standard error, at most every two seconds. A :class:`subscriber.verification.model.Progress`."""

    def __init__(self) -> None:
        self._total = self._rows = 0
        self._began = self._last_line = time.monotonic()

    def waiting(self, what: str) -> None:
        complain(f"waiting: {what}")

    def opened(self, lsn: Lsn | None, held_seconds: float, tables: int, rows: int) -> None:
        self._total = rows
        self._began = self._last_line = time.monotonic()
        complain(f"comparing {tables} tables as of {lsn}; apply was held for {held_seconds * 1000:.0f} ms")

    def advanced(self, table: TableName, rows: int) -> None:
        self._rows += rows
        now = time.monotonic()
        if now - self._last_line >= _LINE_SECONDS:
            self._last_line = now
            percent = f", about {min(self._rows * 100 // self._total, 100)} %" if self._total else ""
            complain(f"{table}: {self._rows:,} rows compared{percent}, {self._rows / (now - self._began):,.0f} rows/s")

    def finished(self, report: TableReport) -> None:
        pass


async def _execute(args: argparse.Namespace) -> int:
    locate(args)
    if args.dry_run and not args.repair:
        raise ConfigurationError("--dry-run belongs to --repair", hint="verify changes nothing without --repair")
    if args.repair:
        require_repairable(args.target)
    quiet = args.quiet or not sys.stderr.isatty()
    limits = VerificationLimits(
        jobs=args.jobs,
        max_rate=args.max_rate,
        max_differences=args.max_differences,
        show_values=args.show_values,
    )
    report = await verify(
        args.name,
        target=args.target,
        connection=args.connection,
        tables=args.table,
        limits=limits,
        progress=None if quiet else _ProgressLines(),
        changed=args.changed,
    )
    if args.certificate:
        _certify(report, args.certificate)
    if not args.json:
        _show(report, quiet=args.quiet, would=args.dry_run)
    repaired: dict[TableName, int] = {}
    again: VerificationReport | None = None
    try:
        if args.repair and not args.dry_run:
            repaired = await repair(report, target=args.target)
            complete = [each for each in report.results if each.table in repaired and not each.more]
            if complete:
                names = [each.table for each in complete]
                where = {"target": args.target, "connection": args.connection}
                again = await verify(args.name, **where, tables=names, limits=limits, changed=True, repaired=complete)
    finally:
        if args.json:
            rows_of = {str(table): rows for table, rows in repaired.items()}
            emit(json.dumps({**report.to_json(), "repaired": rows_of, "after": again and again.to_json()}) + "\n")
    if not args.json:
        for table, rows in repaired.items():
            say(printable(f"{table}: {counted(rows, 'row')} repaired"))
        for differing in report.differing if args.repair else ():
            if (reason := why_not_repairable(differing)) is not None:
                say(printable(reason.one_line()))
        if again is not None:
            _show(again, quiet=args.quiet, would=False)
    equal = {table.table for each in (report, again) if each is not None for table in each.tables if table.equal}
    return 0 if all(table.table in equal for table in report.tables) else 1


def _certify(report: VerificationReport, path: Path) -> None:
    ended = datetime.now(UTC)
    certificate = {
        "program": f"pg-subscriber {subscriber.__version__}",
        "began_at": (ended - timedelta(seconds=report.seconds)).isoformat(),
        "ended_at": ended.isoformat(),
        "method": _METHOD,
        **report.to_json(),
    }
    try:
        # a reader never sees half of it
        written = path.with_name(f".{path.name}.new")
        written.write_text(json.dumps(certificate, indent=2) + "\n", encoding="utf-8", errors="backslashreplace")
        written.replace(path)
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}", hint="choose another FILE") from None


def _show(report: VerificationReport, *, quiet: bool, would: bool) -> None:
    for table in report.tables:
        if table.left_out is not None:
            say(printable(f"{table.table}: not compared: {table.left_out}"))
        elif not table.equal:
            _show_table(table, would=would)
    compared = [table for table in report.tables if table.left_out is None]
    rows = sum(table.publisher_rows for table in compared)
    differing = len(report.differing)
    when = "in two passes" if report.lsn is None else f"as of {report.lsn}"
    if not quiet or differing:
        found = f"{differing} of them differ{'s' if differing == 1 else ''}" if differing else "all equal"
        tables = f"{counted(len(compared), 'table')} with {counted(rows, 'row')} compared {when} in {report.seconds:.1f} s: {found}"
        say(tables if compared else "no table was compared")


def _show_table(table: TableReport, *, would: bool) -> None:
    rows = f"{table.publisher_rows:,} rows on the publisher, {table.target_rows:,} in the target"
    say(printable(f"{table.table}: {rows}: {table.summary}"))
    for each in table.differences[:_SHOWN]:
        action = {RowKind.MISSING: "insert ", RowKind.EXTRA: "delete ", RowKind.DIFFERENT: "update "}[each.kind] if would else ""
        say(printable(f"  {action}{_described(each)}"))
    if len(table.differences) > _SHOWN:
        say(f"  and {len(table.differences) - _SHOWN:,} more (--json shows them)")


def _described(row: RowDifference) -> str:
    key = ", ".join(f"{name}={value}" for name, value in row.key.items()) or f"{counted(row.count, 'row')} without a key"
    columns = f" in {', '.join(row.columns)}" if row.columns else ""
    values = "".join(
        f"; {side}: " + ", ".join(f"{name}={value}" for name, value in found.items() if not row.columns or name in row.columns)
        for side, found in (("publisher", row.publisher), ("target", row.target))
        if found is not None
    )
    return f"{row.kind.value}: {key}{columns}{values}"
