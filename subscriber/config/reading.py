"""``name=value`` texts and the types of their values, read and shown as PostgreSQL does.

Booleans are on/off/true/false/yes/no/1/0 and their prefixes; times and sizes may have units.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from subscriber.errors import ConfigurationError

__all__ = [
    "BOOLEAN",
    "SECONDS",
    "SIZE",
    "STRING",
    "TIME",
    "WHOLE",
    "OptionType",
    "choice",
    "parse_assignments",
    "parse_bool",
    "parse_bytes",
    "parse_seconds",
]

_TIME_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE_UNITS: Final = {"B": 1, "kB": 1024, "MB": 1024**2, "GB": 1024**3, "TB": 1024**4}
_INT_MAX: Final = 2**31 - 1
_ASSIGNMENT: Final = re.compile(r"""((?:[^="]|"[^"]*")+)(=)(.*)""", re.DOTALL)
"""A name may be that of a table, with any characters in double quotes."""
_NUMBER: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionType:
    """How the values of an option are written.

    Attributes:
        name: for the reference documentation.
        parse: reads a value; its arguments are the option's name and the text. Raises ConfigurationError.
        show: writes a value as a user writes it.
        unit: the unit of a number that is given without a unit.
        most: the largest number: PostgreSQL's integers have 32 bits, in the unit of the parameter.
        words: all values, if the list is fixed; else empty.
    """

    name: str
    parse: Callable[[str, str], Any]
    show: Callable[[Any], str] = str
    unit: str | None = None
    most: float | None = None
    words: tuple[str, ...] = ()


def parse_bool(name: str, text: str) -> bool:
    """Read a boolean as PostgreSQL does: true/yes/on/1 and false/no/off/0, and their unambiguous prefixes.

    Raises:
        ConfigurationError: with PostgreSQL's message.
    """
    word = text.strip().lower()
    if word and ("true".startswith(word) or "yes".startswith(word) or word in {"on", "1"}):
        return True
    if word and ("false".startswith(word) or "no".startswith(word) or word in {"of", "off", "0"}):
        return False
    raise ConfigurationError(f"{name} requires a Boolean value", hint=f"use {name}=true or {name}=false")


def _parse_quantity(name: str, text: str, units: Mapping[str, float], base: str) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None or (match[2] and match[2] not in units):
        raise ConfigurationError(
            f'invalid value for parameter "{name}": "{text}"', hint=f"a number with one of the units {', '.join(units)}"
        )
    quantity = float(match[1]) * units[match[2] or base]
    if quantity == math.inf:
        raise ConfigurationError(f'invalid value for parameter "{name}": "{text}"', hint="a smaller number")
    return quantity


def parse_seconds(name: str, text: str, base: str = "ms") -> float:
    """Read a time such as ``10s``, ``500ms`` or ``1min``. A number without a unit is in ``base``, as in postgresql.conf."""
    return _parse_quantity(name, text, _TIME_UNITS, base)


def parse_bytes(name: str, text: str) -> int:
    """Read a size such as ``64MB``. A number without a unit is in kB, as in postgresql.conf."""
    return int(_parse_quantity(name, text, _SIZE_UNITS, "kB"))


def _parse_whole(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigurationError(f'invalid value for parameter "{name}": "{text}"', hint="a whole number")
    return int(text)


def _parse_word(words: tuple[str, ...], name: str, text: str) -> str:
    word = text.strip().lower()
    if word not in words:
        raise ConfigurationError(f'unrecognized {name} value: "{text}"', hint=f"one of {', '.join(words)}")
    return word


def _with_unit(units: Mapping[str, float], value: float) -> str:
    """The value in the largest unit that gives a whole number; else in the smallest."""
    if not value:
        return "0"
    smallest = next(iter(units))
    if not math.isfinite(value):
        return f"{value}{smallest}"
    # 0.1 s is 100 ms, although 0.1 is not a multiple of 0.001 in binary
    whole = [unit for unit, factor in units.items() if math.isclose(round(value / factor) * factor, value, rel_tol=1e-14)]
    unit = max(whole, key=units.__getitem__, default=None)
    return f"{value / units[unit]:.0f}{unit}" if unit else f"{value / units[smallest]:g}{smallest}"


_show_seconds: Final = partial(_with_unit, {"ms": 1e-3, "s": 1.0, "min": 60.0})

BOOLEAN: Final = OptionType(name="boolean", parse=parse_bool, show=lambda value: "true" if value else "false")
WHOLE: Final = OptionType(name="integer", parse=_parse_whole, most=_INT_MAX)
STRING: Final = OptionType(name="string", parse=lambda name, text: text)
TIME: Final = OptionType(name="time", parse=parse_seconds, show=_show_seconds, unit="ms", most=_INT_MAX / 1000)
SECONDS: Final = OptionType(name="time", parse=partial(parse_seconds, base="s"), show=_show_seconds, unit="s", most=_INT_MAX // 1000)
"""A time. A number without a unit is in seconds."""
SIZE: Final = OptionType(name="size", parse=parse_bytes, show=partial(_with_unit, _SIZE_UNITS), unit="kB", most=_INT_MAX * 1024)

RATE: Final = OptionType(
    name="bytes per second",
    parse=lambda name, text: float(parse_bytes(name, text.removesuffix("/s"))),
    show=lambda value: f"{_with_unit(_SIZE_UNITS, value)}/s" if value else "0",
    unit="kB/s",
    most=1e15,
)
"""Such as ``10MB/s``."""


def choice(*words: str, parse: Callable[[str, str], str] | None = None) -> OptionType:
    """The type of an option that is one of ``words``.

    Args:
        words: all values.
        parse: reads a value, where other texts than the words are allowed; None: only the words are.
    """
    return OptionType(name="enum", parse=parse or partial(_parse_word, words), words=words)


def parse_assignments(items: Iterable[str], *, case_matters: bool = False) -> dict[str, str]:
    """Split ``name=value`` texts.

    Args:
        items: the texts.
        case_matters: leave names as they are, for Spark's options. PostgreSQL's names become lower case.

    Raises:
        ConfigurationError: a text without ``=``, or a name given twice (native: conflicting or redundant options).
    """
    found: dict[str, str] = {}
    for item in items:
        match = _ASSIGNMENT.fullmatch(item)
        name, equals, value = match.groups() if match is not None else item.partition("=")
        name = name.strip()
        if not case_matters:
            # a key after the name of an option is the user's own
            own, dot, key = name.partition(".")
            name = own.lower() + dot + key
        if not equals or not name:
            raise ConfigurationError(f'"{item}" is not of the form parameter=value', hint="as in copy_data=false")
        if name in found:
            raise ConfigurationError(f'conflicting or redundant options: "{name}" is given twice', hint="specify it once")
        found[name] = value.strip()
    return found
