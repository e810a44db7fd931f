"""What was done while a schema was copied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["SchemaProgress", "SchemaStep", "Section", "StepState"]


class Section(StrEnum):
    """What is created before the rows are copied, and what after it."""

    PRE_DATA = "pre-data"
    """Tables, types, functions, and the keys by which changes are applied."""
    POST_DATA = "post-data"
    """All other indexes and constraints, triggers, rules and policies."""


class StepState(StrEnum):
    """What happened to an object."""

    BEGUN = "begun"
    """Work on it has begun."""
    CREATED = "created"
    """It was created, or brought up to date."""
    EXISTS = "exists"
    """The target had it already."""


@dataclass(frozen=True, slots=True)
class SchemaStep:
    """One object, and what happened to it.

    Attributes:
        what: its kind and name, for example ``index app.orders_customer``.
        state: what happened.
        seconds: how long it took.
        number: how many objects of the section are done.
        total: how many objects the section has.
    """

    what: str
    state: StepState
    seconds: float
    number: int
    total: int


SchemaProgress = Callable[[SchemaStep], None]
"""Told about each object."""
