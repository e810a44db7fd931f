"""How many examples a property test tries: a few by default, many under the marker ``endurance``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy


def few_and_many(few: int, many: int) -> pytest.MarkDecorator:
    """Run the test with a few, and with many only in ``make test-all``."""
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=[pytest.mark.endurance, pytest.mark.timeout(600)])])


def property_test(
    few: int, many: int, *strategies: SearchStrategy[Any], **named: SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """As ``hypothesis.given``, with a few examples, and with many only in ``make test-all``."""

    def decorate(check: Callable[..., None]) -> Callable[[int], None]:
        @few_and_many(few, many)
        def test(examples: int) -> None:
            settings(max_examples=examples)(given(*strategies, **named)(check))()

        test.__name__, test.__qualname__, test.__doc__, test.__module__ = (
            check.__name__,
            check.__qualname__,
            check.__doc__,
            check.__module__,
        )
        return test

    return decorate


def seeds(few: int, many: int) -> pytest.MarkDecorator:
    """Run the test with the first seeds, and with the others only in ``make test-all``."""
    return some_and_others(["seed"], [(seed,) for seed in range(few)], [(seed,) for seed in range(few, many)])


def some_and_others(names: Sequence[str], some: Iterable[Sequence[object]], others: Iterable[Sequence[object]]) -> pytest.MarkDecorator:
    """Run the test with some values, and with others only in ``make test-all``."""
    return pytest.mark.parametrize(
        names, [*(pytest.param(*row) for row in some), *(pytest.param(*row, marks=pytest.mark.endurance) for row in others)]
    )
