"""Manual pages in section 1, generated from the parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from subscriber.cli.help.arguments import Argument, arguments, summaries, verbs_of

__all__ = ["manual_pages"]


def manual_pages(parser: argparse.ArgumentParser, version: str) -> dict[str, str]:
    """The pages by the name of their file, such as ``subscriber-run.1``."""
    found = verbs_of(parser)
    texts = {(*words, below): text for words, each in found.items() for below, text in summaries(each).items()}
    return {
        f"{'-'.join(('subscriber', *words))}.1": "\n".join([*_page(words, found[words], version, texts.get(words)), ""]) for words in found
    }


def _page(words: tuple[str, ...], parser: argparse.ArgumentParser, version: str, summary: str | None) -> Iterator[str]:
    name = "-".join(("subscriber", *words))
    yield f'.TH {_word(name.upper())} 1 "" "pg-subscriber {_roff(version)}" "pg-subscriber"'
    yield ".SH NAME"
    yield f"{_roff(name)} \\- {_roff(summary or 'the subscriber of PostgreSQL logical replication')}"
    yield ".SH SYNOPSIS"
    yield f".B {_roff(' '.join(('subscriber', *words)))}"
    usage = " ".join(parser.format_usage().split()).removeprefix("usage: ").removeprefix(parser.prog)
    yield _line(usage.strip())
    if parser.description:
        yield ".SH DESCRIPTION"
        yield _line(" ".join(parser.description.split()))
    below = summaries(parser)
    if below:
        yield ".SH " + ("ACTIONS" if words else "VERBS")
        for each, text in below.items():
            yield from _entry(_roff(each), f"{text}; see \\fB{_roff(f'{name}-{each}')}\\fR(1)")
    found = list(arguments(parser))
    if found:
        yield ".SH OPTIONS"
        for argument in found:
            yield from _entry(_names(argument), _roff(argument.help))
    if parser.epilog:
        yield from _epilog(parser.epilog)
    yield ".SH EXIT STATUS"
    yield "0 success, 1 an error, 2 wrong arguments, 130 interrupted by SIGINT, 143 SIGTERM ended a verb that has no clean end."
    yield ".SH ENVIRONMENT"
    yield from _entry("SUBSCRIBER_CONFIG", "the configuration file, for verbs that have \\-\\-config")
    yield from _entry("SUBSCRIBER_PUBLISHER_PASSWORD, SUBSCRIBER_TARGET_PASSWORD", "passwords of the connection strings of this command")
    if words:
        yield ".SH SEE ALSO"
        yield f"\\fB{_roff('-'.join(('subscriber', *words[:-1])))}\\fR(1)"


def _names(argument: Argument) -> str:
    value = f" \\fI{_roff(argument.value)}\\fR" if argument.value else ""
    return ", ".join(f"\\fB{_roff(option)}\\fR{value}" for option in argument.options) or f"\\fI{_roff(argument.value)}\\fR"


def _entry(term: str, text: str) -> Iterator[str]:
    yield ".TP"
    yield term
    yield text if not text.startswith((".", "'")) else f"\\&{text}"


def _epilog(text: str) -> Iterator[str]:
    """The lists of options and settings at the end of the help."""
    for line in text.splitlines():
        name, colon, rest = line.strip().partition(": ")
        if line.startswith("  ") and colon:
            yield from _entry(f"\\fB{_roff(name)}\\fR", _roff(rest))
        elif line.strip():
            yield f".SS {_word(line.strip().rstrip(':'))}"


def _line(text: str) -> str:
    found = _roff(text)
    return f"\\&{found}" if found.startswith((".", "'")) else found


def _word(text: str) -> str:
    return '"' + _roff(text).replace('"', "\\(dq") + '"'


def _roff(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-").replace("…", "...")
