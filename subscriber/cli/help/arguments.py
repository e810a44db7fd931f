"""The verbs and their arguments, as the parser declares them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Argument", "arguments", "summaries", "verbs_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument of a verb.

    Attributes:
        options: its option strings; empty: a positional argument.
        value: how its value is written; empty: it takes none.
        choices: all values, if they are fixed.
        help: as ``--help`` shows it.
    """

    options: tuple[str, ...]
    value: str
    choices: tuple[str, ...]
    help: str


def verbs_of(parser: argparse.ArgumentParser) -> dict[tuple[str, ...], argparse.ArgumentParser]:
    """The parsers of all verbs, and of their actions, by words. The empty tuple is the program itself."""
    found: dict[tuple[str, ...], argparse.ArgumentParser] = {(): parser}
    for action in parser._actions:  # noqa: SLF001 -- argparse has no other way to read a parser
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for name, below in action.choices.items():
                below.load()
                found |= {(name, *words): each for words, each in verbs_of(below).items()}
    return found


def summaries(parser: argparse.ArgumentParser) -> dict[str, str]:
    """What follows the parser's words: its verbs or actions, and their help."""
    return {
        each.dest: each.help or ""
        for action in parser._actions  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction)  # noqa: SLF001
        for each in action._choices_actions  # noqa: SLF001
    }


def arguments(parser: argparse.ArgumentParser) -> Iterator[Argument]:
    """The arguments of one parser, without its verbs or actions."""
    for action in parser._actions:  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction) or action.help == argparse.SUPPRESS:  # noqa: SLF001
            continue
        choices = tuple(map(str, action.choices or ()))
        shown = action.metavar if isinstance(action.metavar, str) else "{" + ",".join(choices) + "}" if choices else action.dest.upper()
        yield Argument(
            options=tuple(action.option_strings),
            value="" if action.nargs == 0 else shown,
            choices=choices,
            help=(action.help or "") % {"default": action.default, "prog": parser.prog},
        )
