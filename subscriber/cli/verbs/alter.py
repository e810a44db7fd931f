"""``subscriber alter``: ALTER SUBSCRIPTION in the target's catalog, one form at a time."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Sequence
from operator import methodcaller
from typing import Final

from subscriber.cli.notices import confirm
from subscriber.cli.options import add_parameters_argument, add_settings_argument, lsn, table_name
from subscriber.cli.service.configuration_file import add_located_arguments, locate
from subscriber.config import ALTERABLE, BOOLEAN, LIVE, PARAMETERS, Option, Settings, parse_changes
from subscriber.errors import ConfigurationError
from subscriber.protocol.lsn import Lsn
from subscriber.subscription.management.alter import SubscriptionAlteration, accept_target, alter_subscription, set_limits
from subscriber.subscription.management.status import reset_subscription_stats

__all__ = ["add_arguments"]

_Act = Callable[[SubscriptionAlteration], Awaitable[None]]

_REFRESHING: Final = {"copy_data": PARAMETERS["copy_data"]}
_PUBLISHING: Final = {**_REFRESHING, "refresh": Option(default=True, type=BOOLEAN, help="also add and remove tables, as --refresh does")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = "Like ALTER SUBSCRIPTION. Stops the subscription's worker; the launcher starts it again afterwards."
    add_located_arguments(parser)
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--enable", action="store_true", help="let the launcher run the subscription")
    forms.add_argument("--disable", action="store_true", help="stop the subscription")
    forms.add_argument("--connection", metavar="CONNINFO", help="new connection string of the publisher")
    forms.add_argument(
        "--set-publication", action="append", metavar="P", help="subscribe to this publication instead of the current ones; may be repeated"
    )
    forms.add_argument("--add-publication", action="append", metavar="P", help="add this publication; may be repeated")
    forms.add_argument("--drop-publication", action="append", metavar="P", help="remove this publication; may be repeated")
    forms.add_argument("--refresh", action="store_true", help="add newly published tables, and remove those no longer published")
    forms.add_argument(
        "--resync",
        action="append",
        type=table_name,
        metavar="SCHEMA.TABLE",
        help="compare this table's rows with the publisher's, and write what differs; a lake copies it again; may be repeated",
    )
    forms.add_argument(
        "--skip-lsn", type=_lsn_or_none, metavar="LSN", help="skip the transaction that finishes at this LSN; NONE: skip nothing"
    )
    forms.add_argument("--rename", metavar="NEW", help="new name")
    forms.add_argument("--owner", metavar="ROLE", help="apply with the privileges of this role (PostgreSQL targets)")
    forms.add_argument(
        "--accept-target",
        action="store_true",
        help="this database takes the place of the one from which its catalog was restored or upgraded (PostgreSQL targets)",
    )
    forms.add_argument("--reset-stats", action="store_true", help="reset its statistics; the worker keeps running")
    parser.add_argument("--by", choices=("copy",), help="with --resync: replace all rows, without a comparison")
    add_parameters_argument(parser, ALTERABLE, "a parameter; with --refresh: copy_data; with publications: refresh, copy_data")
    add_settings_argument(parser, flags=True)
    parser.set_defaults(stores_connection=True, execute=_execute)


def _lsn_or_none(text: str) -> Lsn | str:
    return "none" if text.lower() == "none" else lsn(text)


async def _execute(args: argparse.Namespace) -> int:
    locate(args)
    await _alter(args)
    confirm(args, f'altered subscription "{args.name}"')
    return 0


async def _alter(args: argparse.Namespace) -> None:
    whole: list[tuple[str, bool, Callable[..., Awaitable[None]]]] = [
        ("--reset-stats", args.reset_stats, reset_subscription_stats),
        ("--accept-target", args.accept_target, accept_target),
    ]
    for form, given, act_on in whole:
        if given:
            _require_no_options(args.options, form)
            await act_on(args.name, target=args.target)
            return
    act = _form(args)
    if act is None:
        changes = parse_changes(args.options)
        if changes.keys() <= LIVE.keys():
            await set_limits(args.name, changes, target=args.target)
            return
        act = methodcaller("set", changes)
    async with alter_subscription(args.name, target=args.target, settings=Settings.parse(args.settings)) as subscription:
        await act(subscription)


def _form(args: argparse.Namespace) -> _Act | None:
    """The form that was chosen; None: only parameters are changed."""
    if args.by is not None and not args.resync:
        raise ConfigurationError("--by needs --resync", hint="name the table: --resync SCHEMA.TABLE --by copy")
    for name in ("set", "add", "drop"):
        publications = getattr(args, f"{name}_publication")
        if publications:
            options = parse_changes(args.options, _PUBLISHING)
            return lambda found: getattr(found, f"{name}_publications")(publications, **options)
    if args.refresh:
        options = parse_changes(args.options, _REFRESHING)
        return lambda found: found.refresh(**options)
    simple: list[tuple[str, bool, _Act]] = [
        ("--enable", args.enable, lambda found: found.enable()),
        ("--disable", args.disable, lambda found: found.disable()),
        ("--connection", args.connection is not None, lambda found: found.set_connection(args.connection)),
        ("--rename", args.rename is not None, lambda found: found.rename(args.rename)),
        ("--owner", args.owner is not None, lambda found: found.set_owner(args.owner)),
        ("--resync", args.resync is not None, lambda found: found.resync(args.resync, copy=args.by is not None)),
        ("--skip-lsn", args.skip_lsn is not None, lambda found: found.skip(None if args.skip_lsn == "none" else args.skip_lsn)),
    ]
    for form, given, act in simple:
        if given:
            _require_no_options(args.options, form)
            return act
    if not args.options:
        raise ConfigurationError("nothing to alter", hint="use --enable, --refresh, -o parameter=value, ...; alter --help lists them")
    return None


def _require_no_options(options: Sequence[str], form: str) -> None:
    if options:
        raise ConfigurationError(f"{form} takes no parameters (-o)", hint=f"run alter twice: once with {form}, once with -o")
