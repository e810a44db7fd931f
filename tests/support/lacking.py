"""What a test needs and this machine lacks: the test is skipped, or fails under ``make test-spark``, which installs everything."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

__all__ = ["lacking"]


def lacking(reason: str) -> NoReturn:
    """Skip the test, or let it fail if ``SUBSCRIBER_TEST_SPARK`` is ``required``."""
    if os.environ.get("SUBSCRIBER_TEST_SPARK") == "required":
        pytest.fail(reason)
    pytest.skip(reason)
