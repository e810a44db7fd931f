"""Arguments to verbs, errors to one line and an exit status."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Sequence

import subscriber
from subscriber.cli import alter, check, create, decode, demo, drop, run, spark_apply, status, tail
from subscriber.cli.collector import settle_collector
from subscriber.errors import SubscriberError

__all__ = ["main"]

_VERBS = (run, create, alter, drop, status, check, tail, decode, spark_apply, demo)


async def _execute(args: argparse.Namespace) -> int:
    task = asyncio.current_task()
    assert task is not None
    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # not in a thread
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    status: int = await args.execute(args)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; the entry point of ``subscriber``.

    Args:
        arguments: those of the process if None, which then is ours.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="subscriber", description="The subscriber of PostgreSQL logical replication.")
    parser.add_argument("--version", action="version", version=f"subscriber {subscriber.__version__}")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="more of what happens, on stderr; twice for debugging")
    verbs = parser.add_subparsers(metavar="verb", required=True)
    for verb in _VERBS:
        verb.add_parser(verbs)
    for each in verbs.choices.values():
        # before the verb or behind it
        each.add_argument("-v", "--verbose", action="count", default=argparse.SUPPRESS, help="more of what happens, on stderr")
    args = parser.parse_args(arguments)
    level = [logging.WARNING, logging.INFO, logging.DEBUG][min(args.verbose, 2)]
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    # ours alone: what drivers say of their calls shows the parameters (rows, a connection string with its password)
    logging.getLogger(subscriber.__name__).setLevel(level)
    if arguments is None:
        settle_collector()
    try:
        ended: int = asyncio.run(_execute(args))
    except asyncio.CancelledError:
        # SIGTERM of a verb that has nothing to end cleanly: what it was about is taken back
        return 143
    except SubscriberError as error:
        print(f"subscriber: {error.one_line()}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # the reader of our output has gone (`subscriber tail … | head`); nothing is left to be said to it
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130
    return ended
