"""Types of subscription parameters whose values are not only numbers, times or words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal

from subscriber.config.reading import TIME, OptionType, choice, parse_bool, parse_seconds
from subscriber.config.table_names import read_name, written_name
from subscriber.errors import ConfigurationError

__all__ = [
    "CONFLICT_LOG",
    "COPY_DATA",
    "COPY_DATA_WORDS",
    "NO_SLOT",
    "SLOT_NAME",
    "STREAMING",
    "SYNCHRONOUS_COMMIT",
    "TIMEOUT",
    "CopyData",
    "OnError",
    "OriginFilter",
    "Streaming",
    "SynchronousCommit",
    "check_slot_name",
    "read_conflict_log",
]

Streaming = Literal["off", "on", "parallel"]
SynchronousCommit = Literal["off", "local", "remote_write", "remote_apply", "on"]
OriginFilter = Literal["none", "any"]
OnError = Literal["retry", "disable", "park"]
CopyData = bool | Literal["reconcile"]

NO_SLOT: Final = "none"
"""The value of ``slot_name`` that means NONE. The parameter cannot name a slot ``none``."""

_VALID_SLOT_NAME: Final = re.compile(r"[a-z0-9_]{1,63}", re.ASCII)


def check_slot_name(name: str) -> None:
    """Reject a text that cannot be the name of a replication slot.

    Raises:
        ConfigurationError: with PostgreSQL's message and hint.
    """
    if not _VALID_SLOT_NAME.fullmatch(name):
        raise ConfigurationError(
            f'replication slot name "{name}" contains an invalid character or is empty or too long',
            hint="Replication slot names may only contain lower case letters, numbers, and the underscore character."
            " Choose another name, or set slot_name.",
        )


def _slot_name(_: str, text: str) -> str:
    if text.lower() == NO_SLOT:
        return NO_SLOT
    check_slot_name(text)
    return text


SLOT_NAME: Final = OptionType(name="slot name, none", parse=_slot_name)


def _switch(*more: str, message: str, hint: str) -> OptionType:
    """The type of an option that was a boolean in earlier versions of PostgreSQL and now has more values."""

    def parse(name: str, text: str) -> str:
        word = text.strip().lower()
        if word in more:
            return word
        try:
            return "on" if parse_bool(name, text) else "off"
        except ConfigurationError:
            raise ConfigurationError(message.format(name=name, text=text), hint=hint) from None

    return choice("off", *more, "on", parse=parse)


STREAMING: Final = _switch("parallel", message='{name} requires a Boolean value or "parallel"', hint="one of off, on, parallel")
SYNCHRONOUS_COMMIT: Final = _switch(
    "local",
    "remote_write",
    "remote_apply",
    message='invalid value for parameter "{name}": "{text}"',
    hint="Available values: local, remote_write, remote_apply, on, off.",
)


COPY_DATA_WORDS: Final[Mapping[str, CopyData]] = {"true": True, "false": False, "reconcile": "reconcile"}
"""The values of ``copy_data``, as they are stored."""


def _parse_copy_data(name: str, text: str) -> CopyData:
    if text.strip().lower() == "reconcile":
        return "reconcile"
    try:
        return parse_bool(name, text)
    except ConfigurationError:
        raise ConfigurationError(f'{name} requires a Boolean value or "reconcile"', hint="one of true, false, reconcile") from None


def _show_copy_data(value: CopyData) -> str:
    return next(word for word, known in COPY_DATA_WORDS.items() if known == value)


COPY_DATA: Final = OptionType(name="boolean, reconcile", parse=_parse_copy_data, show=_show_copy_data)


TIMEOUT: Final = replace(TIME, parse=lambda name, text: -1.0 if text == "-1" else parse_seconds(name, text))


_LOG_EXAMPLE: Final = "conflict_log=public.conflicts"


def read_conflict_log(text: str) -> tuple[str, str]:
    """Schema and name of the table."""
    return read_name(text, _LOG_EXAMPLE)


def _parse_conflict_log(_: str, text: str) -> str:
    return "" if text in {"", "none"} else written_name(read_conflict_log(text))


CONFLICT_LOG: Final = OptionType(name="schema.table", parse=_parse_conflict_log)
