"""Run a verb for the command line. An error becomes one line and an exit status."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from subscriber.cli.collector import pause_collector, settle_collector
from subscriber.cli.output import complain, finish, settle_streams
from subscriber.cli.parser import WrongUsage, make_parser
from subscriber.cli.signals import on_hangup
from subscriber.errors import SubscriberError

if TYPE_CHECKING:
    from subscriber.config.file.configuration import Configuration

__all__ = ["main"]


async def _execute(args: argparse.Namespace) -> int:
    task = asyncio.current_task()
    assert task is not None
    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # not possible in a thread
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with on_hangup(partial(_reopen_log, args)):
        status: int = await args.execute(args)
    return status


def _set_up_log(args: argparse.Namespace) -> None:
    from subscriber.cli.service.logs import set_up  # noqa: PLC0415 -- --help and a wrong usage end before

    set_up(args)


def _reopen_log(args: argparse.Namespace) -> None:
    try:
        _set_up_log(args)
    except SubscriberError as error:
        complain(error.one_line())


_PASSWORDS: Final = {"SUBSCRIBER_PUBLISHER_PASSWORD", "SUBSCRIBER_TARGET_PASSWORD"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; the entry point of ``subscriber``.

    Args:
        arguments: None: those of the process. Then the process is ours, and its streams may be changed.

    Returns:
        The exit status.
    """
    if arguments is not None:
        return _run(arguments)
    pause_collector()
    settle_streams()
    try:
        status = _run(None)
    except SystemExit as ended:
        # argparse: 0 after --help, 2 for wrong usage
        status = ended.code if isinstance(ended.code, int) else 1
    return finish(status)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        args = make_parser().parse_args(arguments)
        if hasattr(args, "config"):
            args.configuration = _configuration(args)
        _set_up_log(args)
        if _PASSWORDS & os.environ.keys() or getattr(args, "target_port", None) or getattr(args, "target_user", None):
            from subscriber.cli.options import add_passwords, complete_target  # noqa: PLC0415 -- a wrong usage ends before

            complete_target(args)
            add_passwords(args, os.environ)
        if arguments is None:
            settle_collector()
        ended: int = asyncio.run(_execute(args))
    except WrongUsage as error:
        from subscriber.cli.monitoring import Severity, conclude, is_check, line  # noqa: PLC0415 -- only `status` needs it otherwise

        if not is_check(sys.argv[1:] if arguments is None else arguments):
            raise
        return conclude(Severity.UNKNOWN, line(Severity.UNKNOWN, error.message))
    except asyncio.CancelledError:
        # SIGTERM of a verb that has no clean end: its cancellation has undone its work
        return 143
    except SubscriberError as error:
        for each in error.lines():
            complain(each)
        return 1
    except BrokenPipeError:
        # the reader of our output has closed the pipe (`subscriber tail … | head`)
        return 0
    except KeyboardInterrupt:
        return 130
    return ended


def _configuration(args: argparse.Namespace) -> Configuration | None:
    from subscriber.cli.service.configuration_file import configuration_of  # noqa: PLC0415 -- not for all verbs

    try:
        return configuration_of(args, os.environ)
    except SubscriberError as error:
        if getattr(args, "check", False):
            raise WrongUsage(error.one_line()) from None
        raise
