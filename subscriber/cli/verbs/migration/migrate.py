"""``subscriber migrate``: everything up to the cutover."""

from __future__ import annotations

import argparse
from dataclasses import replace

from subscriber.cli.notices import confirm
from subscriber.cli.options import add_name_argument, add_parameters_argument, add_sequences_argument, add_settings_argument
from subscriber.cli.output import say
from subscriber.cli.progress import Bars, copy_progress
from subscriber.cli.signals import clean_end
from subscriber.cli.verbs.migration.schema import SchemaNarrator, add_copy_options, schema_options
from subscriber.config import PARAMETERS, Settings, SubscriptionOptions
from subscriber.config.reading import parse_assignments
from subscriber.errors import raise_all
from subscriber.printable import printable
from subscriber.subscription.migration import Migration
from subscriber.walreceiver.new_publication import TableChoice

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = (
        "Brings a database to a target, up to the cutover: creates the publication, the schema and the subscription, copies the rows,"
        " builds the indexes, follows the changes, and compares all rows. Then it runs the subscription until `subscriber cutover` is"
        " complete. It prints how long each step took. Started again after an error or a crash, it continues."
    )
    add_name_argument(parser)
    parser.add_argument("--from", dest="connection", required=True, metavar="CONNINFO", help="connection string of the publisher")
    parser.add_argument("--to", dest="target", required=True, metavar="URL", help="URL of the target")
    parser.add_argument("--publication", metavar="P", help="created for all tables if it does not exist; default: NAME")
    _add_choice(parser, "--table", "publish only tables that match this pattern, as pg_dump has them; may be repeated")
    _add_choice(parser, "--exclude-table", "do not publish tables that match this pattern, and do not move their rows; may be repeated")
    parser.add_argument(
        "--foreign-keys",
        choices=["not-valid", "skip"],
        default="not-valid",
        help="how foreign keys are created that refer to tables without rows, because these are left out; default: %(default)s",
    )
    parser.add_argument(
        "--max-rate",
        metavar="RATE",
        help="copy at most so many bytes per second, such as 20MB/s; 0: no limit; max_copy_rate, as `alter -o` changes it",
    )
    parser.add_argument("--no-verify", action="store_true", help="do not compare the rows")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="change nothing; print sizes, the expected time and what must change; status 1 if something must be corrected first",
    )
    parser.add_argument("--no-disk-check", action="store_true", help="start although the disk of the target seems to be too small")
    parser.add_argument("--until-ready", action="store_true", help="end when everything is ready for the cutover")
    add_sequences_argument(parser, "set by the cutover")
    add_copy_options(parser, ", and tables are copied")
    add_parameters_argument(parser, PARAMETERS, "a parameter of CREATE SUBSCRIPTION … WITH (…)")
    add_settings_argument(parser)
    parser.set_defaults(execute=_execute, stores_connection=True)


def _add_choice(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    parser.add_argument(name, action="append", default=[], metavar="PATTERN", help=text)


def _settings(args: argparse.Namespace) -> Settings:
    settings = Settings.parse(args.settings)
    named = parse_assignments(args.settings)
    if args.jobs is None or "max_sync_workers_per_subscription" in named:
        return settings
    return replace(settings, max_sync_workers_per_subscription=args.jobs)


async def _execute(args: argparse.Namespace) -> int:
    progress = copy_progress()
    migration = Migration(
        args.name,
        connection=args.connection,
        target=args.target,
        publication=args.publication or args.name,
        choice=TableChoice(args.table, args.exclude_table),
        options=SubscriptionOptions.parse(args.options),
        settings=_settings(args),
        schema=replace(schema_options(args), left_out_keys=args.foreign_keys),
        verification=not args.no_verify,
        sequences=args.sequences,
        tell=lambda line: confirm(args, printable(line)),
        schema_progress=SchemaNarrator(args),
        copy_progress=progress if isinstance(progress, Bars) else None,
        tell_progress=progress.note if isinstance(progress, Bars) else None,
        disk_check=not args.no_disk_check,
        max_rate=None if args.max_rate is None else float(PARAMETERS["max_copy_rate"].type.parse("max-rate", args.max_rate)),
    )
    if args.dry_run:
        plan = await migration.plan()
        for line in plan.lines():
            say(printable(line))
        raise_all(plan.problems)
        return 0
    try:
        with clean_end(migration.stop) as ending:
            await migration.run(wait=not args.until_ready)
    finally:
        if isinstance(progress, Bars):
            progress.close()
    return ending.status
