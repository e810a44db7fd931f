"""Fixtures of tests of ``apply_workers``."""

from __future__ import annotations

import pytest

from tests.support.apply_workers import Counts, always_in_groups


@pytest.fixture
def many_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """See :func:`always_in_groups`."""
    always_in_groups(monkeypatch)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)
