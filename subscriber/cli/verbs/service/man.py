"""``subscriber man``: write the manual pages."""

from __future__ import annotations

import argparse
from pathlib import Path

import subscriber
from subscriber.cli.help.manual import manual_pages
from subscriber.cli.notices import confirm
from subscriber.cli.output import emit
from subscriber.cli.parser import make_parser
from subscriber.config import suggestion
from subscriber.errors import ConfigurationError

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = (
        "Prints the manual page of the program or of a verb: subscriber man run | man -l -. With --directory, writes all pages, for example"
        " to /usr/local/share/man/man1."
    )
    parser.add_argument("words", metavar="VERB", nargs="*", help="a verb, with its action if it has one; default: the program")
    parser.add_argument("--directory", metavar="DIR", help="write all pages into this directory")
    parser.set_defaults(execute=_execute, usage=parser.error)


async def _execute(args: argparse.Namespace) -> int:
    pages = manual_pages(make_parser(), subscriber.__version__)
    if args.directory is None:
        name = "-".join(("subscriber", *args.words)) + ".1"
        if name not in pages:
            known = [" ".join(each.removesuffix(".1").split("-")[1:]) for each in pages if each != "subscriber.1"]
            raise ConfigurationError(f'there is no verb "{" ".join(args.words)}"', hint=suggestion(" ".join(args.words), known))
        emit(pages[name])
        return 0
    if args.words:
        args.usage("--directory writes all pages: leave out the verb")
    for name, text in pages.items():
        try:
            (Path(args.directory) / name).write_text(text, "utf-8")
        except OSError as error:
            raise ConfigurationError(f"cannot write {Path(args.directory) / name}: {error.strerror}", hint="create the directory") from None
    confirm(args, f"{len(pages)} manual pages in {args.directory}")
    return 0
