"""``subscriber check``: find problems before the first run. Changes nothing."""

from __future__ import annotations

import argparse

from subscriber.cli.options import add_definition_arguments, add_name_option, parameters_of
from subscriber.cli.output import say
from subscriber.config import Settings, SubscriptionOptions
from subscriber.printable import printable
from subscriber.subscription.setup.checks import check

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = (
        "Checks the publisher and the target for problems that would make this subscription fail. Changes nothing."
        " Prints one line for each error (replication will not work) and each warning (it will work, with a restriction). Exit status 1 if"
        " there is an error."
    )
    add_definition_arguments(parser)
    add_name_option(parser)
    parser.set_defaults(execute=_execute)


async def _execute(args: argparse.Namespace) -> int:
    findings = await check(
        args.name,
        connection=args.connection,
        publications=args.publication,
        target=args.target,
        options=SubscriptionOptions.parse(parameters_of(args)),
        settings=Settings.parse(args.settings),
    )
    for finding in findings:
        hint = f" (hint: {finding.hint})" if finding.hint else ""
        say(printable(f"{finding.severity}: {finding.message}{hint}"))
    errors = sum(finding.severity == "error" for finding in findings)
    if not findings and not args.quiet:
        say("no problems found")
    return 1 if errors else 0
