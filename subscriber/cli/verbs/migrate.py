"""``subscriber migrate``: everything up to the cutover."""

from __future__ import annotations

import argparse

from subscriber.cli.notices import confirm
from subscriber.cli.options import add_name_argument, add_parameters_argument, add_settings_argument
from subscriber.cli.progress import Bars, copy_progress
from subscriber.cli.signals import clean_end
from subscriber.cli.verbs.schema import SchemaNarrator, add_copy_options, schema_options
from subscriber.config import PARAMETERS, Settings, SubscriptionOptions
from subscriber.printable import printable
from subscriber.subscription.migration import Migration

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
    parser.add_argument("--no-verify", action="store_true", help="do not compare the rows")
    parser.add_argument("--until-ready", action="store_true", help="end when everything is ready for the cutover")
    add_copy_options(parser)
    add_parameters_argument(parser, PARAMETERS, "a parameter of CREATE SUBSCRIPTION … WITH (…)")
    add_settings_argument(parser)
    parser.set_defaults(execute=_execute, stores_connection=True)


async def _execute(args: argparse.Namespace) -> int:
    progress = copy_progress()
    migration = Migration(
        args.name,
        connection=args.connection,
        target=args.target,
        publication=args.publication or args.name,
        options=SubscriptionOptions.parse(args.options),
        settings=Settings.parse(args.settings),
        schema=schema_options(args),
        verification=not args.no_verify,
        tell=lambda line: confirm(args, printable(line)),
        schema_progress=SchemaNarrator(args),
        copy_progress=progress,
    )
    try:
        with clean_end(migration.stop) as ending:
            await migration.run(wait=not args.until_ready)
    finally:
        if isinstance(progress, Bars):
            progress.close()
    return ending.status
