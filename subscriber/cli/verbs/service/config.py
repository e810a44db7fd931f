"""``subscriber config``: check and show the configuration file, its JSON schema, and a unit of systemd that uses it."""

from __future__ import annotations

import argparse
import json
import os

from subscriber.cli.options import add_parameters_argument, add_settings_argument
from subscriber.cli.output import say
from subscriber.cli.service.configuration_file import VARIABLE, load
from subscriber.cli.service.effective import EffectiveValue, effective, stored
from subscriber.cli.service.systemd_unit import systemd_unit
from subscriber.config import PARAMETERS, parse_assignments
from subscriber.config.file.configuration import Configuration
from subscriber.config.file.json_schema import json_schema
from subscriber.printable import counted, printable
from subscriber.subscription.configured import connection_of, settings_of, subscription_of, url_of
from subscriber.subscription.targets import observe_target

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = "Checks and shows the configuration file."
    actions = parser.add_subparsers(metavar="action", required=True)
    check = actions.add_parser("check", help="check the file, without connecting")
    check.description = "Reads the file and what it refers to, and checks every value. Connects to nothing: subscriber check --config does."
    _add_file(check)
    check.set_defaults(execute=_check)
    show = actions.add_parser("show", help="show the file's values, without passwords")
    show.description = "Shows the values of the file. A password is never shown."
    _add_file(show)
    show.add_argument(
        "--effective",
        action="store_true",
        help="all values that hold, and where each comes from; asks the targets whose launcher is run",
    )
    show.add_argument("--json", action="store_true", help="print JSON")
    add_parameters_argument(show, PARAMETERS, "as run takes it")
    add_settings_argument(show)
    show.set_defaults(execute=_show)
    schema = actions.add_parser("schema", help="print the JSON schema of the file, for editors")
    schema.description = "Prints the JSON schema of the file. Editors complete and check TOML with it."
    schema.set_defaults(execute=_schema)
    systemd = actions.add_parser("systemd", help="print a unit of systemd that runs the file")
    systemd.description = "Prints a hardened unit of systemd that runs the subscriptions of the file."
    _add_file(systemd)
    systemd.add_argument("--user", default="subscriber", metavar="NAME", help="the user that runs it; default: %(default)s")
    systemd.set_defaults(execute=_systemd)


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", nargs="?", help=f"the configuration file; default: ${VARIABLE}")
    parser.add_argument("--config", dest="also", metavar="FILE", help="the same as FILE")
    parser.set_defaults(usage=parser.error)


def _file(args: argparse.Namespace) -> str:
    file: str | None = args.file or args.also or os.environ.get(VARIABLE)
    if file is None:
        args.usage(f"FILE is required, unless {VARIABLE} names it")
        raise AssertionError  # usage does not return
    return file


async def _check(args: argparse.Namespace) -> int:
    configuration = load(_file(args), os.environ)
    _validate(configuration)
    if not args.quiet:
        counts = (configuration.subscriptions, "subscription"), (configuration.targets, "target")
        say(f"{', '.join(counted(len(found), noun) for found, noun in counts)}: no problems found")
    return 0


def _validate(configuration: Configuration) -> None:
    for target in configuration.targets.values():
        url_of(target)
    for each in configuration.subscriptions.values():
        connection_of(each)
        subscription_of(each, {}, {}, None)


async def _show(args: argparse.Namespace) -> int:
    configuration = load(_file(args), os.environ)
    options, settings = parse_assignments(args.options), parse_assignments(args.settings)
    if args.effective:
        settings_of({**configuration.settings, **settings})
        rows = list(effective(configuration, options, settings, args.given_log))
        for name, target in configuration.targets.items():
            if target.launcher:
                found = await observe_target(url_of(target))
                rows += stored(name, [each.definition for each in found if not each.by_command_line])
    else:
        rows = [EffectiveValue(key, text, "file") for key, text in configuration.given.items()]
    if args.json:
        say(json.dumps({row.key: {"value": row.value, "source": row.source} for row in rows}, indent=2))
        return 0
    for row in rows:
        say(printable(f"{row.key} = {row.value}" + (f"  ({row.source})" if args.effective else "")))
    return 0


async def _schema(args: argparse.Namespace) -> int:
    say(json.dumps(json_schema(), indent=2))
    return 0


async def _systemd(args: argparse.Namespace) -> int:
    file = _file(args)
    # the secrets are those of the service, which this user may not have
    say(systemd_unit(file, load(file, os.environ, needs_secrets=False), args.user).rstrip("\n"))
    return 0
