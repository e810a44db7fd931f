"""Run a verb for the command line. An error becomes one line and an exit status."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NoReturn

import subscriber
from subscriber._implementation import implementation
from subscriber.cli.collector import settle_collector
from subscriber.cli.output import LogFormatter, complain, emit, finish, settle_streams
from subscriber.errors import SubscriberError
from subscriber.printable import printable

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

__all__ = ["main"]

_VERBS: Final = {
    "run": "run one subscription, or those that were created in the target",
    "create": "define a subscription in the target",
    "alter": "change a subscription",
    "drop": "remove a subscription",
    "status": "show the status of subscriptions",
    "recover": "begin again at a new slot after changes were lost",
    "verify": "compare the rows of both sides at one position",
    "migrate": "bring a database to a target, up to the cutover",
    "schema": "copy the publisher's schema to the target, or compare both",
    "cutover": "move the application to the target, and back",
    "sequences": "set the target's sequences to those of the publisher",
    "check": "find problems before the first run",
    "tail": "print committed changes",
    "decode": "print captured pgoutput messages as text",
    "replay": "apply a recording to a target",
    "spark-apply": "apply landed batches to the tables of a lake",
    "demo": "try it out: replicate an embedded publisher under load, then compare both databases",
}
_PACKAGES: Final = {
    "migrate": "migration",
    "schema": "migration",
    "cutover": "migration",
    "sequences": "migration",
    "tail": "streams",
    "decode": "streams",
    "replay": "streams",
}
"""The package of a verb's module below ``verbs``; the others are there directly."""
_INTERMIXED: Final = frozenset({"sequences"})
"""Verbs with an optional NAME, which argparse would otherwise accept only before all options."""


async def _execute(args: argparse.Namespace) -> int:
    task = asyncio.current_task()
    assert task is not None
    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # not possible in a thread
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    status: int = await args.execute(args)
    return status


class _WrongUsage(SystemExit):
    """Arguments that a verb does not take."""

    def __init__(self, message: str) -> None:
        super().__init__(2)
        self.message = message


class _Help(argparse.HelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(
            textwrap.fill(line, width, initial_indent=indent, subsequent_indent=f"{indent}      ") for line in text.splitlines()
        )


class _Parser(argparse.ArgumentParser):
    def __init__(self, **known: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **known})

    def error(self, message: str) -> NoReturn:
        """Print usage and message. The message is escaped, because arguments may contain characters that control a terminal."""
        self.print_usage(sys.stderr)
        self._print_message(f"{self.prog}: error: {printable(message)}\n", sys.stderr)
        raise _WrongUsage(message)

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        # argparse would ignore an error of writing its help
        if file is sys.stdout:
            emit(message)
        else:
            super()._print_message(message, file)


class _VerbParser(_Parser):
    """The parser of one verb. It imports the verb's module when the verb is chosen: importing all of them takes longer than most verbs.

    The actions of a verb (``schema copy``) have such a parser, too, without a module.
    """

    verb = ""
    loaded = False
    intermixed = False
    """Whether its optional NAME may follow options."""

    def load(self) -> None:
        """Add the verb's arguments."""
        if self.loaded:
            return
        self.loaded = True
        if self.verb:
            package = f"{_PACKAGES[self.verb]}." if self.verb in _PACKAGES else ""
            import_module(f"subscriber.cli.verbs.{package}{self.verb.replace('-', '_')}").add_arguments(self)
        # the options are accepted before and after the verb
        self.add_argument("-v", "--verbose", action="count", default=argparse.SUPPRESS, help="log more on stderr")
        self.add_argument("-q", "--quiet", action="store_true", default=argparse.SUPPRESS, help="no confirmations and no progress")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse, which calls it for the chosen verb only."""
        self.load()
        if not self.intermixed:
            return super().parse_known_args(args, namespace)
        # argparse calls this method again, for the options and for the names
        self.intermixed = False
        return self.parse_known_intermixed_args(args, namespace)


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
    settle_streams()
    try:
        status = _run(None)
    except SystemExit as ended:
        # argparse: 0 after --help, 2 for wrong usage
        status = ended.code if isinstance(ended.code, int) else 1
    return finish(status)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        args = _parser().parse_args(arguments)
        _log_to_stderr(args.verbose)
        if _PASSWORDS & os.environ.keys():
            from subscriber.cli.options import add_passwords  # noqa: PLC0415 -- a wrong usage ends before

            add_passwords(args, os.environ)
        if arguments is None:
            settle_collector()
        ended: int = asyncio.run(_execute(args))
    except _WrongUsage as error:
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


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="subscriber", description="The subscriber of PostgreSQL logical replication.")
    parser.add_argument("--version", action="version", version=f"subscriber {subscriber.__version__} ({implementation()})")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log more on stderr; give it twice for debugging")
    parser.add_argument("-q", "--quiet", action="store_true", help="no confirmations and no progress")
    verbs = parser.add_subparsers(metavar="verb", required=True, parser_class=_VerbParser)
    for verb, text in _VERBS.items():
        of_verb = verbs.add_parser(verb, help=text)
        of_verb.verb, of_verb.intermixed = verb, verb in _INTERMIXED
    return parser


def _log_to_stderr(verbosity: int) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    level = [logging.WARNING, logging.INFO, logging.DEBUG][min(verbosity, 2)]
    # only our loggers: drivers log the parameters of their calls (rows, a connection string with its password)
    logging.getLogger(subscriber.__name__).setLevel(level)
