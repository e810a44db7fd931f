"""``subscriber completion``: print the script with which a shell completes the command line."""

from __future__ import annotations

import argparse

from subscriber.cli.help.completion import SHELLS, completion
from subscriber.cli.output import emit
from subscriber.cli.parser import make_parser

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = (
        "Prints a script for completion. bash: source <(subscriber completion bash); zsh: write it to a file _subscriber in $fpath;"
        " fish: write it to ~/.config/fish/completions/subscriber.fish."
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.set_defaults(execute=_execute)


async def _execute(args: argparse.Namespace) -> int:
    emit(completion(args.shell, make_parser()))
    return 0
