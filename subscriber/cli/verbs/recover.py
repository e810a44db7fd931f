"""``subscriber recover``: begin again at a new slot, with the rows that the target has."""

from __future__ import annotations

import argparse

from subscriber.cli.notices import confirm
from subscriber.cli.options import add_connection_option, add_settings_argument
from subscriber.cli.output import emit
from subscriber.cli.service.configuration_file import add_located_arguments, locate
from subscriber.config import Settings
from subscriber.subscription.management.recover import recover

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = (
        "After changes are lost (the slot was dropped or invalidated, a server was restored): says what happened, and lets the next run"
        " create a new slot, compare all tables with the publisher, and write only what differs. Readers never see an empty table."
        " A lake copies its tables into new versions."
    )
    add_located_arguments(parser)
    add_connection_option(parser)
    parser.add_argument("--dry-run", action="store_true", help="show what happened and what would be compared, and change nothing")
    parser.add_argument(
        "--force",
        action="store_true",
        help="also if nothing seems to be lost, if the slot may be another target's, or with origin = none",
    )
    parser.add_argument(
        "--accept-target",
        action="store_true",
        help="the target was restored or copied from another database, whose place it takes (PostgreSQL targets)",
    )
    parser.add_argument(
        "--accept-publisher",
        action="store_true",
        help="the publisher is another server than before, and takes its place (an upgrade, a dump that was restored)",
    )
    add_settings_argument(parser)
    parser.set_defaults(execute=_execute)


async def _execute(args: argparse.Namespace) -> int:
    locate(args)
    found = await recover(
        args.name,
        target=args.target,
        connection=args.connection,
        settings=Settings.parse(args.settings),
        dry_run=args.dry_run,
        force=args.force,
        accept_target=args.accept_target,
        accept_publisher=args.accept_publisher,
    )
    lines = [f"what happened: {found.reason}"]
    if args.dry_run:
        for table in found.tables:
            rows = "an unknown number of rows" if table.estimated_rows is None else f"about {table.estimated_rows:,} rows"
            how = "compared by its key" if table.primary_key or table.key_columns else "compared as a whole"
            how = "copied into new versions" if found.copies else how
            lines.append(f"{table.name}: {how}, {rows}, {table.size / 1024**2:,.0f} MB")
    lines += [f"{table}: not published any more; its rows stay" for table in found.unpublished]
    emit("".join(f"{line}\n" for line in lines))
    if not args.dry_run:
        does = "copies" if found.copies else "compares"
        confirm(args, f'the next run of subscription "{args.name}" {does} {len(found.tables)} tables at a new slot')
    return 0
