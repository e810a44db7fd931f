"""``subscriber drop``: DROP SUBSCRIPTION in the target's catalog."""

from __future__ import annotations

import argparse

from subscriber.cli.notices import confirm
from subscriber.cli.options import add_connection_option, add_settings_argument
from subscriber.cli.service.configuration_file import add_located_arguments, locate
from subscriber.config import Settings
from subscriber.subscription.management.drop import drop_subscription

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = "Like DROP SUBSCRIPTION: stops the worker and drops the slots, also those of unfinished copies. The rows stay."
    add_located_arguments(parser)
    add_connection_option(parser)
    add_settings_argument(parser)
    parser.set_defaults(execute=_execute)


async def _execute(args: argparse.Namespace) -> int:
    locate(args)
    await drop_subscription(args.name, target=args.target, connection=args.connection, settings=Settings.parse(args.settings))
    confirm(args, f'dropped subscription "{args.name}"')
    return 0
