"""``subscriber demo``: copy and follow a publisher while a load runs, then check that both databases hold the same rows.

The exit status is 0 if they do, else 1. Everything that was started or made is stopped and removed, also after Ctrl-C and after errors.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from subscriber.apply.progress import CopyProgress, Quiet
from subscriber.cli.output import emit, say
from subscriber.cli.progress import Lines, copy_progress
from subscriber.cli.signals import clean_end
from subscriber.cli.status_text import size
from subscriber.errors import ConfigurationError

if TYPE_CHECKING:
    from subscriber.testing.demonstration.demonstration import Demonstration, Sample
    from subscriber.testing.load.mixed_load import LoadReport
    from subscriber.verification.model import TableReport

__all__ = ["add_arguments"]

_RATE: Final = 60.0
_HUGE_ROWS: Final = 15_000
_LEAST_ROWS: Final = 1_000
_PLAIN_LINE_SECONDS: Final = 4.0
_WIDTH: Final = 130
_TERMINATED: Final = 128 + 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = (
        "Starts an embedded PostgreSQL 18 with tables like those of pgbench, copies them into another database, follows"
        " it while a load runs, and proves that both hold the same rows (exit status 0; 1 if they do not)."
        " Everything is removed afterwards. In your own database, the demo creates a schema subscriber_demo, or tables with this prefix;"
        " sqlite is a new file, mariadb an embedded MariaDB, spark a lake in a temporary directory, applied by Spark on local[2]."
    )
    parser.add_argument(
        "--target",
        metavar="URL",
        help="sqlite, mariadb or spark, or the URL of a database, in which subscriber_demo is created; default: embedded PostgreSQL",
    )
    parser.add_argument(
        "--rows", type=_at_least(_LEAST_ROWS), default=300_000, metavar="N", help="rows of the largest table; default: %(default)s"
    )
    parser.add_argument("--seconds", type=_at_least(1), default=20, metavar="S", help="how long the load runs; default: %(default)s")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="with --target spark: make the lake in this new directory, and keep it")
    parser.set_defaults(execute=_execute)


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return value

    return number


async def _execute(args: argparse.Namespace) -> int:
    try:
        # not imported at the top: it needs an extra that the other verbs do not need
        from subscriber.testing.demonstration.demonstration import Demonstration  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the demo needs {error.name}, which is not installed", hint="pip install 'pg-subscriber[demo]'"
        ) from error
    myself = asyncio.current_task()
    assert myself is not None
    progress: CopyProgress = copy_progress()
    if isinstance(progress, Quiet):
        progress = Lines()
    with clean_end(lambda: _cancel(myself)) as ending:
        try:
            async with Demonstration(
                target=args.target, rows=args.rows, rate=_RATE, huge_rows=_HUGE_ROWS, progress=progress, keep=args.keep
            ) as demonstration:
                equal = await _tell(demonstration, args.seconds)
                kept = f" except the lake in {args.keep}" if args.keep is not None else ""
                say(f"\nStopping and removing everything that the demo created{kept}.")
        except asyncio.CancelledError:
            say("\nInterrupted; everything that the demo created was removed.")
            return ending.status or _TERMINATED
    return 0 if equal else 1


def _cancel(task: asyncio.Task[object]) -> None:
    task.cancel()


async def _tell(demonstration: Demonstration, seconds: int) -> bool:
    _heading("1. Two databases")
    publisher, target = await demonstration.start()
    say(f"   publisher: {publisher.description} (embedded)")
    say(f"   target:    {target.description}")
    rows = await demonstration.make_tables()
    if demonstration.makes_tables:
        say(f"   Ten tables made on the publisher, schema subscriber_demo, with {rows:,} rows; the subscription makes those of the target:")
    else:
        say(f"   Ten tables made on both, schema subscriber_demo; those of the publisher hold {rows:,} rows:")
    say("   pgbench's four, TOASTed documents, a partitioned table, one with a column of every type, one without a key.")

    _heading("2. The initial copy: each table from a snapshot of its own, several at a time")
    took = await demonstration.copy()
    say(f"   All tables are copied and caught up after {took:.1f} s ({rows / took:,.0f} rows/s).")

    _heading(f"3. Following: a load runs on the publisher for {seconds} s")
    say("   Four sessions, at random: single rows, batches, huge transactions (streamed to us while they still run), savepoints rolled")
    say("   back, key changes, TRUNCATE, rows moving between partitions, PREPARE TRANSACTION with COMMIT or ROLLBACK PREPARED later.")
    await _show_load(demonstration, seconds)
    took = await demonstration.catch_up()
    prepared = await demonstration.compare_prepared()
    equal = prepared is None or prepared.equal
    say(f"   The load has ended. Everything it committed was durable in the target {took:.2f} s later.")
    if prepared is None:
        say("   The target has max_prepared_transactions = 0: what is prepared came to it at COMMIT PREPARED.")
    else:
        say(
            f"   Still prepared, neither committed nor rolled back: {len(prepared.publisher)} transactions on the publisher,"
            f" {len(prepared.target)} in the target: {'the same' if equal else 'NOT THE SAME'}."
        )
    _print_report(await demonstration.finish_prepared(), await demonstration.streamed())
    await demonstration.catch_up()

    _heading(f"4. The proof: {demonstration.proof}")
    comparisons = await demonstration.compare()
    _print_comparisons(comparisons)
    prepared = await demonstration.compare_prepared()
    differing = [comparison.table.name for comparison in comparisons if not comparison.equal]
    if not equal or (prepared is not None and not prepared.equal):
        differing.append("prepared transactions")
    say(f"\n   DIFFERENT: {', '.join(differing)}." if differing else "\n   Both databases hold the same rows.")
    if demonstration.examples:
        _heading("5. Examples: programs, and what they print")
        for example in demonstration.examples:
            say("\n" + textwrap.indent(example.text, "   "))
            say(textwrap.indent((await asyncio.to_thread(example.run)).rstrip(), "   "))
    return not differing


def _heading(text: str) -> None:
    say(f"\n{text}")


async def _show_load(demonstration: Demonstration, seconds: int) -> None:
    terminal = sys.stdout.isatty()
    due = 0.0
    async with contextlib.aclosing(demonstration.follow(seconds)) as samples:
        previous: Sample | None = None
        async for sample in samples:
            line = _sample_line(sample, previous)
            if terminal:
                emit(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")
            elif sample.seconds >= due:
                say(line)
                due = sample.seconds + _PLAIN_LINE_SECONDS
            previous = sample
    if terminal:
        say("")


def _sample_line(sample: Sample, previous: Sample | None) -> str:
    since = previous.seconds if previous else 0.0
    passed = max(sample.seconds - since, 1e-3)
    rate = (sample.transactions - (previous.transactions if previous else 0)) / passed
    rows = (sample.applied - (previous.applied if previous else 0)) / passed
    return (
        f"   {sample.seconds:3.0f} s: {sample.transactions:,} transactions ({rate:,.0f}/s),"
        f" {sample.applied:,} rows applied ({rows:,.0f}/s);"
        f" behind: {size(sample.behind_bytes)}, {sample.behind_seconds:.2f} s"
    )


def _print_report(report: LoadReport, streamed: int) -> None:
    # keep a number and its kind on one line
    kinds = ", ".join(f"{number:,} {kind}".replace(" ", "\xa0") for kind, number in report.kinds.most_common())
    say(f"   In all {report.transactions:,} transactions changed {report.rows:,} rows; {streamed:,} of them were streamed.")
    said = textwrap.fill(f"By kind: {kinds}.", width=_WIDTH, initial_indent="   ", subsequent_indent="   ", break_on_hyphens=False)
    say(said.replace("\xa0", " "))
    say(f"   Of those prepared, {report.committed_prepared:,} were committed, {report.rolled_back_prepared:,} rolled back.")


def _print_comparisons(comparisons: list[TableReport]) -> None:
    say(f"   {'table':<14} {'publisher':>12} {'target':>12}")
    for found in comparisons:
        verdict = "same" if found.equal else f"DIFFERENT: {found.left_out or found.summary}"
        say(f"   {found.table.name:<14} {found.publisher_rows:>12,} {found.target_rows:>12,}   {verdict}")
