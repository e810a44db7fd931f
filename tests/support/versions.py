"""With which versions of PostgreSQL the tests run: a pytest plugin.

A test that takes the fixture ``publisher_version`` (by way of ``publisher_db``, for example) runs once for each
``--publisher`` of the command line, one that takes ``target_version`` once for each ``--target``; without these options both are 18.
One that takes both runs once for each pair of them: the first with the first, the second with the second.
With one of them, only tests that take a version are collected: ``make test`` runs all tests with 18, ``make test-all`` runs these
with the other versions. Those that have the mark ``matrix`` depend on what differs between the versions: SQL, a message, a rule of
PostgreSQL. They run with 15 and 17 on each change (``make test-matrix``).

``@pytest.mark.publisher(min=15, lacks="row filters")`` (or ``target``) says that an older server lacks something, not that the test is
a nuisance there: the test is skipped for versions below ``min``, and the end of a run tells how many were, and why.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

from tests.support.database import given_publisher_version

ROLES = ("publisher", "target")
VERSIONS = range(13, 19)
DEFAULT_VERSION = 18


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("subscriber", "versions of PostgreSQL")
    for role in ROLES:
        group.addoption(
            f"--{role}",
            action="append",
            type=int,
            choices=VERSIONS,
            metavar="VERSION",
            help=f"run what depends on the {role}'s version, with this one; may be repeated",
        )


def pytest_configure(config: pytest.Config) -> None:
    for role in ROLES:
        config.addinivalue_line("markers", f"{role}(min, lacks): a {role} older than version `min` lacks what the test is about")


def _versions(config: pytest.Config, role: str) -> list[int]:
    if named := config.getoption(f"--{role}"):
        return sorted(set(named))
    return [(given_publisher_version() if role == "publisher" else None) or DEFAULT_VERSION]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    roles = [role for role in ROLES if f"{role}_version" in metafunc.fixturenames]
    versions = [_versions(metafunc.config, role) for role in roles]
    most = max(map(len, versions), default=0)
    # the shorter list begins again
    rows = [[given[number % len(given)] for given in versions] for number in range(most)]
    if roles:
        ids = ["-".join(f"{role}{version}" for role, version in zip(roles, row, strict=True)) for row in rows]
        metafunc.parametrize([f"{role}_version" for role in roles], rows, ids=ids, indirect=True, scope="session")


@pytest.fixture(scope="session")
def publisher_version(request: pytest.FixtureRequest) -> int:
    """The publisher's major version."""
    return int(request.param)


@pytest.fixture(scope="session")
def target_version(request: pytest.FixtureRequest) -> int:
    """The target's major version."""
    return int(request.param)


def _version_of(item: pytest.Item, role: str) -> int | None:
    callspec: Any = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get(f"{role}_version")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = [role for role in ROLES if config.getoption(f"--{role}")]
    if wanted:
        kept = [item for item in items if any(_version_of(item, role) is not None for role in wanted)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
    for item in items:
        for role in ROLES:
            if (version := _version_of(item, role)) is not None:
                item.user_properties.append((role, version))
            for mark in item.iter_markers(role):
                _skip_if_older(item, role, **mark.kwargs)


def _skip_if_older(item: pytest.Item, role: str, *, min: int, lacks: str) -> None:
    version = _version_of(item, role)
    if version is None:
        raise pytest.UsageError(f"{item.nodeid} has a mark about the {role}'s version, but takes no {role} of several versions")
    if version < min:
        item.add_marker(pytest.mark.skip(reason=f"{role} {version}: it has no {lacks}, {min} has"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """How many tests ran with each version, and what was skipped."""
    if not any(config.getoption(f"--{role}") for role in ROLES):
        return
    outcomes: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            # a module that was skipped as a whole has none
            for role, version in getattr(report, "user_properties", ()):
                if role in ROLES:
                    outcomes[role, version][outcome] += 1
    terminalreporter.section("versions of PostgreSQL")
    for (role, version), counts in sorted(outcomes.items()):
        terminalreporter.line(f"{role} {version}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}")
