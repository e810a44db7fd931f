"""The parser of the command line, and the list of its verbs."""

from __future__ import annotations

import argparse
import sys
import textwrap
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NoReturn

import subscriber
from subscriber._implementation import implementation
from subscriber.cli.output import emit
from subscriber.log_fields import LOG_OPTIONS
from subscriber.printable import printable

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

__all__ = ["VERBS", "VerbParser", "WrongUsage", "make_parser"]

VERBS: Final = {
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
    "config": "check and show the configuration file",
    "doctor": "collect a support bundle, without passwords and rows",
    "tail": "print committed changes",
    "decode": "print captured pgoutput messages as text",
    "replay": "apply a recording to a target",
    "spark-apply": "apply landed batches to the tables of a lake",
    "demo": "try it out: replicate an embedded publisher under load, then compare both databases",
    "completion": "print the script with which a shell completes the command line",
    "man": "print or write the manual pages",
}
_PACKAGES: Final = {
    "migrate": "migration",
    "schema": "migration",
    "cutover": "migration",
    "sequences": "migration",
    "tail": "streams",
    "decode": "streams",
    "replay": "streams",
    "config": "service",
    "doctor": "service",
    "completion": "service",
    "man": "service",
}
"""The package of a verb's module below ``verbs``; the others are there directly."""
_INTERMIXED: Final = frozenset({"sequences"})
"""Verbs with an optional NAME, which argparse would otherwise accept only before all options."""


class WrongUsage(SystemExit):
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
        """Print usage and message, without passwords. It is escaped: arguments may contain characters that control a terminal."""
        from subscriber.redaction import redacted  # noqa: PLC0415 -- most calls have no error

        where, colon, what = message.partition(": ")
        message = f"{where}{colon}{redacted(what)}"
        self.print_usage(sys.stderr)
        self._print_message(f"{self.prog}: error: {printable(message)}\n", sys.stderr)
        raise WrongUsage(message)

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        # argparse would ignore an error of writing its help
        if file is sys.stdout:
            emit(message)
        else:
            super()._print_message(message, file)


class VerbParser(_Parser):
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
        _add_log_arguments(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse, which calls it for the chosen verb only."""
        self.load()
        if not self.intermixed:
            return super().parse_known_args(args, namespace)
        # argparse calls this method again, for the options and for the names
        self.intermixed = False
        return self.parse_known_intermixed_args(args, namespace)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the program. A verb adds its arguments when it is chosen."""
    parser = _Parser(prog="subscriber", description="The subscriber of PostgreSQL logical replication.")
    parser.add_argument("--version", action="version", version=f"subscriber {subscriber.__version__} ({implementation()})")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log more on stderr; give it twice for debugging")
    parser.add_argument("-q", "--quiet", action="store_true", help="no confirmations and no progress")
    _add_log_arguments(parser)
    verbs = parser.add_subparsers(metavar="verb", required=True, parser_class=VerbParser)
    for verb, text in VERBS.items():
        of_verb = verbs.add_parser(verb, help=text)
        of_verb.verb, of_verb.intermixed = verb, verb in _INTERMIXED
    return parser


def _add_log_arguments(parser: argparse.ArgumentParser) -> None:
    for name, (words, text) in LOG_OPTIONS.items():
        parser.add_argument(
            f"--log-{name}",
            choices=words or None,
            metavar=None if words else name.upper(),
            default=argparse.SUPPRESS,
            help=f"{text}; default: {words[0] if words else 'standard error'}",
        )
