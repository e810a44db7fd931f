"""Tests that take minutes are not among the last ones, when one worker would run one and the others nothing. A pytest plugin."""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # in the order that was drawn; spread over the first ones, so that they do not all run at the same time
    long = [item for item in items if item.get_closest_marker("crash") is not None]
    if not long:
        return
    rest = [item for item in items if item.get_closest_marker("crash") is None]
    step = max(len(rest) * 3 // 4 // len(long), 1)
    items[:] = []
    for place, item in enumerate(rest):
        if place % step == 0 and long:
            items.append(long.pop())
        items.append(item)
    items += long
