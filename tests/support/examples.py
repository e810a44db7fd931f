"""How many examples a property test tries: a few by default, many under the marker ``endurance``."""

from __future__ import annotations

from collections.abc import Callable
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
