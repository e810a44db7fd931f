"""``subscriber check``: find problems before the first run. Changes nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from subscriber.cli.options import add_definition_arguments, add_name_option, parameters_of
from subscriber.cli.output import say
from subscriber.cli.service.configuration_file import add_config_argument, chosen
from subscriber.config import Settings, SubscriptionOptions, parse_assignments
from subscriber.errors import SubscriberError
from subscriber.interfaces import Finding
from subscriber.printable import printable
from subscriber.subscription.configured import connection_of, options_of, settings_of, url_of
from subscriber.subscription.setup.checks import check

if TYPE_CHECKING:
    from subscriber.config.file.configuration import Configuration

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = (
        "Checks the publisher and the target for problems that would make this subscription fail. Changes nothing."
        " Prints one line for each error (replication will not work) and each warning (it will work, with a restriction). Exit status 1 if"
        " there is an error."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="with --config: only these subscriptions of the file")
    add_config_argument(parser)
    add_definition_arguments(parser, required=False)
    add_name_option(parser)
    parser.set_defaults(execute=_execute, usage=parser.error)


async def _execute(args: argparse.Namespace) -> int:
    if args.configuration is not None:
        return await _check_configured(args, args.configuration)
    if args.connection is None or args.publication is None or args.target is None or args.names:
        args.usage("--connection, --publication and --target are required, or --config alone or with a NAME")
    findings = await check(
        args.name,
        connection=args.connection,
        publications=args.publication,
        target=args.target,
        options=SubscriptionOptions.parse(parameters_of(args)),
        settings=Settings.parse(args.settings),
    )
    _tell("", findings)
    if not findings and not args.quiet:
        say("no problems found")
    return int(_has_errors(findings))


async def _check_configured(args: argparse.Namespace, configuration: Configuration) -> int:
    """Check each subscription of the file. One that cannot be checked is an error, and the others are checked all the same."""
    names, failed = chosen(configuration, args.names), False
    options, settings = parse_assignments(parameters_of(args)), parse_assignments(args.settings)
    for name, each in configuration.subscriptions.items():
        if names and name not in names:
            continue
        try:
            findings = await check(
                name,
                connection=connection_of(each),
                publications=each.publications,
                target=url_of(each.target),
                options=options_of(each, options),
                settings=settings_of({**each.settings, **settings}),
            )
        except SubscriberError as error:
            findings = [Finding("error", error.one_line(), "")]
        _tell(f'subscription "{name}": ', findings)
        if not findings and not args.quiet:
            say(printable(f'subscription "{name}": no problems found'))
        failed |= _has_errors(findings)
    return int(failed)


def _tell(before: str, findings: Sequence[Finding]) -> None:
    for finding in findings:
        hint = f" (hint: {finding.hint})" if finding.hint else ""
        say(printable(f"{before}{finding.severity}: {finding.message}{hint}"))


def _has_errors(findings: Sequence[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)
