"""What the scenarios demand, said so that a failure tells what was expected and what was found."""

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
    """The error that :func:`refused` waited for."""

    error: SubscriberError


@contextlib.contextmanager
def refused(kind: type[SubscriberError], what: str, *, sqlstate: str | None = None) -> Iterator[Caught]:
    """The block has to raise an error of this kind, on one line.

    Args:
        kind: the class of :mod:`subscriber.errors` that tells the caller what to do.
        what: was asked for.
        sqlstate: that the error has to bear.

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
        raise AssertionError(f"{what}: {kind.__name__} was expected, and nothing was raised")
