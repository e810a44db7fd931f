"""``subscriber run``: one command is a replica. It makes what is missing, and goes on from where it was when there."""

from __future__ import annotations

import argparse

from subscriber.cli.options import Verbs, add_publisher_arguments, add_settings_argument, add_target_argument, lsn
from subscriber.cli.progress import Bars, copy_progress
from subscriber.cli.signals import clean_end
from subscriber.config import Settings, SubscriptionOptions
from subscriber.subscription.facade import Subscription
from subscriber.subscription.status import Until

__all__ = ["add_parser"]


def add_parser(verbs: Verbs) -> None:
    """Describe the verb's arguments."""
    parser = verbs.add_parser(
        "run",
        help="keep a replica",
        description="Copies the published tables into the target and follows the changes. What is missing is made (slot, catalog,"
        " position); what is there is gone on from. SIGTERM and SIGINT end it cleanly: what was applied is durable and"
        " acknowledged, the slot stays.",
    )
    add_publisher_arguments(parser)
    add_target_argument(parser)
    until = parser.add_mutually_exclusive_group()
    until.add_argument(
        "--until-caught-up", action="store_true", help="end when everything that is committed on the publisher now is in the target"
    )
    until.add_argument("--until-lsn", type=lsn, metavar="LSN", help="end when everything committed up to this LSN is in the target")
    add_settings_argument(parser)
    parser.set_defaults(execute=_execute)


async def _execute(args: argparse.Namespace) -> int:
    progress = copy_progress()
    subscription = Subscription(
        args.name,
        connection=args.connection,
        publications=args.publication,
        target=args.target,
        options=SubscriptionOptions.parse(args.options),
        settings=Settings.parse(args.settings),
        progress=progress,
    )
    until = Until(args.until_lsn) if args.until_caught_up or args.until_lsn is not None else None
    with clean_end(subscription.stop) as ending:
        try:
            await subscription.run(until)
        finally:
            if isinstance(progress, Bars):
                progress.close()
    return ending.status
