"""``subscriber create``: CREATE SUBSCRIPTION in the target's catalog."""

from __future__ import annotations

import argparse

from subscriber.cli.notices import confirm
from subscriber.cli.options import add_definition_arguments, add_name_argument, parameters_of
from subscriber.config import Settings, SubscriptionOptions
from subscriber.printable import counted
from subscriber.subscription.management.create import create_subscription

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = (
        "Like CREATE SUBSCRIPTION: creates the replication slot, and stores the subscription with its tables in the target."
        ' "subscriber run --target" runs it.'
    )
    add_name_argument(parser)
    add_definition_arguments(parser)
    parser.set_defaults(execute=_execute, stores_connection=True)


async def _execute(args: argparse.Namespace) -> int:
    tables = await create_subscription(
        args.name,
        connection=args.connection,
        publications=args.publication,
        target=args.target,
        options=SubscriptionOptions.parse(parameters_of(args)),
        settings=Settings.parse(args.settings),
    )
    confirm(args, f'created subscription "{args.name}"; {counted(len(tables), "table")}')
    return 0
