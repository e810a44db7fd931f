"""Sessions in the target that are lost while there is nothing to apply: the worker notices, says so, and connects again."""

from __future__ import annotations

import re

import pytest

from tests.integration.frozen_proxy import frozen_proxy
from tests.integration.program import Program, running
from tests.integration.sqlalchemy_targets import ALL, Replica

KINDS = ["native", "postgresql", "mariadb"]
LOST = "WARNING subscriber.subscription.following"


def end_sessions(pair: Replica) -> None:
    """Of all but the test's own."""
    if pair.target.kind == "mariadb":
        for (number,) in pair.target.fetch(
            "SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id()",
        ):
            pair.target.execute(f"KILL {number}")
    else:
        pair.target.fetch(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


def comes_back(pair: Replica, program: Program) -> None:
    """It has said so, while nothing was to be applied; and it works."""
    program.says(LOST)
    pair.publisher.execute("INSERT INTO t VALUES (2000, 'after')")
    pair.target.wait(ALL, pair.publisher.fetch(ALL))
    assert "Traceback" not in program.errors


@pytest.mark.parametrize("other_target", KINDS, indirect=True)
def test_sessions_that_were_terminated(other_replica: Replica) -> None:
    pair = other_replica
    with running(*pair.arguments()) as program:
        pair.target.follows()
        end_sessions(pair)
        comes_back(pair, program)


@pytest.mark.endurance
@pytest.mark.parametrize("other_target", KINDS, indirect=True)
def test_sessions_that_a_firewall_has_forgotten(other_replica: Replica) -> None:
    pair = other_replica
    match = re.search(r"@([^:/]+):(\d+)/", pair.target.url)
    assert match is not None
    with frozen_proxy(match[1], int(match[2])) as proxy:
        url = pair.target.url.replace(f":{match[2]}/", f":{proxy.port}/")
        with running(*pair.arguments(target=url)) as program:
            pair.target.follows()
            proxy.freeze()
            comes_back(pair, program)
            assert "did not answer within" in program.errors
