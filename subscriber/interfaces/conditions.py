"""Conditions over rows: SQL that does not hold values of rows, because other users can see a statement while it runs, and in the log."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

__all__ = ["EVERY_ROW", "PARAMETER", "SETTING", "SETTING_NAME", "Condition"]

PARAMETER: Final = "${}"
"""A value as a parameter of the statement."""
SETTING_NAME: Final = "subscriber.value{}"
SETTING: Final = f"pg_catalog.current_setting('{SETTING_NAME}')"
"""A value as a setting of the session, for COPY, which has no parameters."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Which rows of a table.

    Attributes:
        pieces: SQL before, between and after the values.
        values: the values, as text.
    """

    pieces: tuple[str, ...] = ("",)
    values: tuple[str, ...] = ()

    def sql(self, value: str = PARAMETER) -> str:
        """The condition in SQL; empty: all rows. ``value`` stands for each value: ``PARAMETER`` or ``SETTING``."""
        names = [value.format(number) for number in range(1, len(self.values) + 1)]
        return "".join(itertools.chain.from_iterable(itertools.zip_longest(self.pieces, names, fillvalue="")))


EVERY_ROW: Final = Condition()
