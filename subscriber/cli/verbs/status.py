"""``subscriber status``: show the status of a target's subscriptions, once or live, as text or as JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from typing import Final

from subscriber.cli.monitoring import MaxLag, Severity, conclude, judge, line
from subscriber.cli.options import add_target_argument
from subscriber.cli.output import complain, emit, say
from subscriber.cli.service.configuration_file import add_config_argument, connections_of, target_urls
from subscriber.cli.signals import clean_end
from subscriber.cli.status_text import describe
from subscriber.errors import SubscriberError, TargetError
from subscriber.subscription.management.status import SubscriptionStatus, subscription_status
from subscriber.subscription.management.status_json import status_as_json

__all__ = ["add_arguments"]

_log = logging.getLogger(__name__)

_CLEAR: Final = "\x1b[H\x1b[2J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = "Reads the target's catalog, and asks each publisher that it can connect to. Changes nothing."
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these subscriptions")
    add_config_argument(parser)
    add_target_argument(parser, required=False)
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print one JSON object, even if something fails")
    shape.add_argument("--watch", action="store_true", help="repeat until interrupted")
    shape.add_argument(
        "--check", action="store_true", help="one line and an exit status for monitoring: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN"
    )
    parser.add_argument("--max-lag", metavar="LAG", help="with --check: CRITICAL beyond this time or size, such as 30s or 16MB")
    parser.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="with --watch: seconds between two reports; default: 1")
    parser.set_defaults(execute=_execute, usage=parser.error)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 86400:
        raise argparse.ArgumentTypeError(f'"{text}" is not a number of seconds from 0.1 to 86400')
    return value


async def _execute(args: argparse.Namespace) -> int:
    if args.check:
        return await _check(args)
    if args.max_lag is not None:
        args.usage("--max-lag needs --check")
    if args.json:
        return await _json(args)
    if args.watch:
        return await _watch(args)
    found, errors = await _statuses(args)
    if found or not errors:
        say(describe(found))
    for error in errors:
        complain(error.one_line())
    return 1 if errors else 0


async def _statuses(args: argparse.Namespace) -> tuple[list[SubscriptionStatus], list[SubscriberError]]:
    """The statuses in all targets, and why some cannot be read. With one target, its error is raised."""
    urls = target_urls(args)
    if len(urls) == 1 and args.configuration is None:
        return await subscription_status(urls[0], args.names), []
    found: list[SubscriptionStatus] = []
    errors: list[SubscriberError] = []
    asked = [subscription_status(url, connections=connections_of(args, url)) for url in urls]
    for result in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(result, SubscriberError):
            errors.append(result)
        elif isinstance(result, BaseException):
            raise result
        else:
            found += result
    if args.names:
        found = [status for status in found if status.observation.definition.name in args.names]
        for name in sorted({*args.names} - {status.observation.definition.name for status in found}):
            if not errors:
                errors.append(TargetError(f'subscription "{name}" does not exist in the targets of the configuration file'))
    return found, errors


async def _check(args: argparse.Namespace) -> int:
    try:
        limit = MaxLag() if args.max_lag is None else MaxLag.parse(args.max_lag)
        found, errors = await _statuses(args)
        if errors:
            raise errors[0]
        severity, text = judge(found, limit)
    except SubscriberError as error:
        severity, text = Severity.UNKNOWN, line(Severity.UNKNOWN, error.one_line())
    except Exception:  # noqa: BLE001 -- it ends the process all the same
        # Python would exit with 1, which means WARNING
        _log.exception("the check failed")
        severity, text = Severity.UNKNOWN, line(Severity.UNKNOWN, "the check failed; standard error has the traceback")
    return conclude(severity, text)


async def _json(args: argparse.Namespace) -> int:
    try:
        found, errors = await _statuses(args)
    except SubscriberError as failed:
        found, errors = [], [failed]
    # a program that parses the output gets the reason in JSON too
    error = errors[0] if errors else None
    reason = None if error is None else {"message": str(error), "hint": error.hint, "sqlstate": error.sqlstate}
    say(_dump({"error": reason, "subscriptions": [status_as_json(status) for status in found]}))
    for each in errors:
        complain(each.one_line())
    return 1 if errors else 0


def _dump(value: object) -> str:
    return json.dumps(value, indent=2, allow_nan=False)


async def _watch(args: argparse.Namespace) -> int:
    stop = asyncio.Event()
    with clean_end(stop.set) as ending:
        while not stop.is_set():
            text = await _look(args)
            if sys.stdout.isatty():
                emit(_CLEAR)
            say(text)
            waiting = asyncio.ensure_future(stop.wait())
            await asyncio.wait({waiting}, timeout=args.interval)
            waiting.cancel()
    return ending.status


async def _look(args: argparse.Namespace) -> str:
    try:
        found, errors = await _statuses(args)
    except SubscriberError as error:
        found, errors = [], [error]
    # a target may become available again
    return "\n\n".join([*([describe(found)] if found or not errors else []), *(f"subscriber: {each.one_line()}" for each in errors)])
