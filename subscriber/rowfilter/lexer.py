"""Split a row filter into tokens, as PostgreSQL's lexer does, for the part of its syntax that row filters may use.

Comments, escape strings, dollar quotes, bit strings, parameters, Unicode escapes and the number formats of PostgreSQL 16 are refused, so
that all versions read a filter alike. Source: PostgreSQL manual, Lexical Structure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from subscriber.rowfilter.filter_errors import unsupported

__all__ = ["RESERVED", "Token", "tokens_of"]

_OPERATORS: Final = "~!@#^&|`?+-*/%<>="
_TOKEN: Final = re.compile(
    rf"""
    (?P<space>[ \t\n\r\f]+)
  | (?P<quoted>"(?:[^"\0]|"")+")
  | (?P<string>'(?:[^'\0]|'')*')
  | (?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
  | (?P<word>[A-Za-z_][A-Za-z_0-9$]*)
  | (?P<cast>::)
  | (?P<mark>[(),\[\].])
  | (?P<operator>[{re.escape(_OPERATORS)}]+)
    """,
    re.VERBOSE,
)
_KNOWN: Final = frozenset({"=", "<>", "!=", "<", "<=", ">", ">=", "+", "-", "*", "/", "%", "||", "~~", "!~~"})
_LONG: Final = frozenset("~!@#%^&|`?")
"""An operator may end with + or - only if it has one of these characters."""
_MOST: Final = 10_000
"""Tokens of a filter."""

# pg_get_keywords(), categories R and T, of PostgreSQL 18: the later ones are not reserved before 16.
_WORDS: Final = """
    all analyse analyze and any array as asc asymmetric authorization binary both case cast check collate collation column concurrently
    constraint create cross current_catalog current_date current_role current_schema current_time current_timestamp current_user default
    deferrable desc distinct do else end except false fetch for foreign freeze from full grant group having ilike in initially inner
    intersect into is isnull join lateral leading left like limit localtime localtimestamp natural not notnull null offset on only or order
    outer overlaps placing primary references returning right select session_user similar some symmetric system_user table tablesample then
    to trailing true union unique user using variadic verbose when where window with
"""
RESERVED: Final = frozenset(_WORDS.split())
"""Words that name a column only in quotes."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token.

    Attributes:
        kind: ``word`` (a keyword or an unquoted name, in lower case), ``quoted``, ``string``, ``number`` or ``mark`` (all others).
        text: as written; the name or the value if it is quoted.
    """

    kind: str
    text: str


def tokens_of(text: str) -> list[Token]:
    """Split a filter into tokens.

    Raises:
        RowFilterError: row filters may not use a token here.
    """
    found: list[Token] = []
    position = 0
    before = "space"
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise unsupported(f'"{text[position]}" in this place')
        kind = str(match.lastgroup)
        raw = match[0]
        if kind == "operator" and ("--" in raw or "/*" in raw):
            raise unsupported("it has a comment")
        if (before, kind) in _ATTACHED:
            # E'…', U&'…', 1_000, 1..2, 'a''b' is one string already
            raise unsupported("two words without a space between them, or a prefix of a constant")
        if kind == "operator":
            found += [Token("mark", each) for each in _operators(raw)]
        elif kind != "space":
            found.append(_token(kind, raw))
        before = kind
        position = match.end()
        if len(found) > _MOST:
            raise unsupported("it is too long")
    return found


_ATTACHED: Final = frozenset(
    {
        ("word", "string"),
        ("word", "quoted"),
        ("number", "word"),
        ("number", "quoted"),
        ("number", "number"),
        ("number", "string"),
        ("string", "string"),
        ("string", "word"),
        ("quoted", "string"),
        ("quoted", "word"),
        ("quoted", "quoted"),
        ("string", "quoted"),
        ("string", "number"),
        ("quoted", "number"),
    }
)
"""Tokens that must not follow each other without a space."""


def _token(kind: str, raw: str) -> Token:
    match kind:
        case "word":
            return Token("word", raw.lower())
        case "quoted":
            return Token("quoted", raw[1:-1].replace('""', '"'))
        case "string":
            return Token("string", raw[1:-1].replace("''", "'"))
        case "number":
            return Token("number", raw)
    return Token("mark", raw)


def _operators(raw: str) -> list[str]:
    """Split a run of operator characters: the longest operator first, without a + or - at its end that begins a number."""
    found: list[str] = []
    signs: list[str] = []
    while len(raw) > 1 and raw[-1] in "+-" and not _LONG & set(raw):
        signs.insert(0, raw[-1])
        raw = raw[:-1]
    for each in (raw, *signs):
        if each not in _KNOWN:
            raise unsupported(f"operator {each}")
        found.append(each)
    return found
