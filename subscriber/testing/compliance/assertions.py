"""The assertions of the scenarios. A failure reports what was expected and what was found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from subscriber.errors import SubscriberError

__all__ = ["Caught", "demand", "equal", "refused"]


def demand(condition: object, what: str) -> None:
    """Fail with ``what`` unless the condition holds.

    Raises:
        AssertionError
    """
    if not condition:
        raise AssertionError(what)


def equal(found: object, expected: object, what: str) -> None:
    """Fail unless both are equal.

    Raises:
        AssertionError
    """
    if found != expected:
        raise AssertionError(f"{what}\n    expected: {expected!r}\n    found:    {found!r}")


class Caught:
    """The error that :func:`refused` caught."""

    error: SubscriberError


@contextlib.contextmanager
def refused(kind: type[SubscriberError], what: str, *, sqlstate: str | None = None) -> Iterator[Caught]:
    """Assert that the block raises an error of this kind, on one line.

    Args:
        kind: a class of :mod:`subscriber.errors`.
        what: the action, for the message of a failure.
        sqlstate: that the error must have.

    Raises:
        AssertionError
    """
    caught = Caught()
    try:
        yield caught
    except kind as error:
        caught.error = error
        demand("\n" not in error.one_line(), f"{what}: the error is not one line")
        if sqlstate is not None:
            equal(error.sqlstate, sqlstate, f"{what}: SQLSTATE of {error.one_line()!r}")
    else:
        raise AssertionError(f"{what}: {kind.__name__} was expected, but nothing was raised")
