"""What the topics about large transactions share: the publisher streams what is larger than 64 kB (subscriber/testing/server.py)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tests.native.native import BothSubscriptions, Nodes

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text, n int)"


def fill(first: int, last: int, table: str = "t") -> str:
    """Some hundred rows are enough to be streamed."""
    return f"INSERT INTO {table} (id, v) SELECT i, repeat(md5(i::text), 12) FROM generate_series({first}, {last}) AS i"


def was_streamed(both: BothSubscriptions) -> bool:
    """Whether the publisher has streamed to both."""
    names = f"'{both.name}', '{both.replica.subscription.name}'"
    query = f"SELECT count(*) FROM pg_stat_replication_slots WHERE slot_name IN ({names}) AND stream_txns > 0"
    return bool(both.publisher.value(query) == 2)


async def follow_transactions(nodes: Nodes, transactions: Sequence[Sequence[str]], counts: dict[str, int], **options: Any) -> None:
    """Run transactions statement by statement, each while small ones of others commit in between; both targets follow.

    Args:
        nodes: gets tables ``t`` and ``u``, with more columns in the targets (a, b, c, and own).
        transactions: their statements, from BEGIN to the last.
        counts: conditions on rows of t, and of how many they are true at the end.
        options: of both subscriptions.
    """
    nodes.everywhere(f"{TABLE}; CREATE TABLE u (id int PRIMARY KEY, v text, n int); CREATE TABLE between (id serial PRIMARY KEY, at int)")
    nodes.in_targets("ALTER TABLE t ADD a int, ADD b int, ADD c int, ADD own text DEFAULT 'own'; ALTER TABLE u ADD a int, ADD b int")
    nodes.publisher.execute(f"{fill(-50, -1)}; {fill(-50, -1, 'u')}; CREATE PUBLICATION pub FOR ALL TABLES")
    async with nodes.followed(**options) as both:
        for statements in transactions:
            with nodes.publisher.connect() as session:
                for number, statement in enumerate(statements):
                    session.execute(statement.encode())
                    nodes.publisher.execute(f"INSERT INTO between (at) VALUES ({number})")
        # a column that the publisher drops stays as it was in the targets: only what it still has is compared with it
        await both.equal()
        for condition, count in counts.items():
            assert await both.value(f"SELECT count(*) FROM t WHERE {condition}") == count
        assert was_streamed(both) == (options["streaming"] != "off")
        status = both.replica.subscription.status
        assert (status.statistics.confl_update_missing, status.statistics.confl_delete_missing) == (0, 0)
        # decoding an ALTER TABLE that is rolled back, a publisher may lose sight of the table (docs/reference/publishers.md)
        errors = [*both.native_errors(), *([str(status.last_error)] if status.last_error else [])]
        assert all(re.search("could not map (filenumber|filenode) ", error) for error in errors)
