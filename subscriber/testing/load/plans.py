"""Plans of the mixed load's transactions. They are pure data, so that a seed always gives the same transactions.

How deadlocks and endless waits are avoided:

* Every session has its own rows: a slice of the initial keys, and new keys that no other session creates.
* A slice contains *shelves*. The rows of a prepared transaction stay locked until it ends. So each prepared transaction works on a shelf
  of its own, and no other transaction touches that shelf meanwhile.
* All sessions use the rows of ``branches``. A transaction touches one of them right before its COMMIT, and is never prepared.
* Transactions that touch ``scratch`` and ``scratch_items`` touch nothing else, and truncate first if at all.
* In ``tags`` any of several equal rows may be changed in the target, so nothing is ever prepared there.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Final

from subscriber.testing.load.tables import FIRST_FRESH_KEY, SPECIMEN_NAMES, SPECIMEN_VALUES

__all__ = ["SHELVES", "WEIGHTS", "Ending", "Keys", "Kind", "Plan", "Release", "RollbackTo", "Savepoint", "Statement", "Step", "make_plan"]

SHELVES: Final = 2
"""How many transactions of one session may be prepared at the same time."""

_KEYS_PER_SESSION: Final = 1_000_000_000
_SESSIONS_PER_RUN: Final = 1_000


class Kind(StrEnum):
    """Kinds of transactions."""

    TPCB = "tpcb"
    """pgbench's transaction: three updates and an insert."""
    INSERT = "insert"
    UPDATE = "update"
    DELETE = "delete"
    KEY_CHANGE = "key change"
    TOAST = "unchanged toast"
    PARTITION_MOVE = "partition move"
    TAGS = "identity full"
    TRUNCATE = "truncate"
    BATCH = "batch"
    ROLLBACK = "rollback"
    SAVEPOINTS = "savepoints"
    PREPARED = "two-phase"
    HUGE = "huge"
    HUGE_ROLLBACK = "huge rollback"
    HUGE_SAVEPOINTS = "huge savepoints"
    HUGE_PREPARED = "huge two-phase"


WEIGHTS: Final[dict[Kind, float]] = {
    Kind.TPCB: 25,
    Kind.INSERT: 15,
    Kind.UPDATE: 15,
    Kind.DELETE: 8,
    Kind.KEY_CHANGE: 4,
    Kind.TOAST: 6,
    Kind.PARTITION_MOVE: 4,
    Kind.TAGS: 3,
    Kind.TRUNCATE: 1,
    Kind.BATCH: 5,
    Kind.ROLLBACK: 3,
    Kind.SAVEPOINTS: 5,
    Kind.PREPARED: 5,
    Kind.HUGE: 0.3,
    Kind.HUGE_ROLLBACK: 0.3,
    Kind.HUGE_SAVEPOINTS: 0.3,
    Kind.HUGE_PREPARED: 0.3,
}
"""Frequency of each kind, relative to the others."""


class Ending(StrEnum):
    """How a transaction ends."""

    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"
    PREPARE = "PREPARE TRANSACTION"


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement. Its names are found by search_path."""

    query: str
    parameters: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Savepoint:
    """SAVEPOINT."""

    name: str


@dataclass(frozen=True, slots=True)
class RollbackTo:
    """ROLLBACK TO SAVEPOINT."""

    name: str


@dataclass(frozen=True, slots=True)
class Release:
    """RELEASE SAVEPOINT."""

    name: str


Step = Statement | Savepoint | RollbackTo | Release


@dataclass(slots=True)
class Plan:
    """One transaction, without its BEGIN.

    Attributes:
        shelf: the shelf of a prepared transaction.
        gains: blocks of accounts that exist once it is committed.
    """

    kind: Kind
    ending: Ending = Ending.COMMIT
    shelf: int | None = None
    steps: list[Step] = field(default_factory=list)
    gains: list[range] = field(default_factory=list)

    def run(self, query: str, *parameters: int) -> None:
        """Add a statement."""
        self.steps.append(Statement(query, parameters))


class Keys:
    """The keys of one session.

    Args:
        run: number of this run of the load in the database, from 1. Keys of other runs are not used again.
        session: from 0.
        sessions: number of sessions.
        sizes: initial rows of each table.
    """

    def __init__(self, *, run: int, session: int, sessions: int, sizes: dict[str, int]) -> None:
        self.session = session
        self.sizes = sizes
        self._sessions = sessions
        self._next = FIRST_FRESH_KEY + (run * _SESSIONS_PER_RUN + session) * _KEYS_PER_SESSION
        self._blocks: deque[range] = deque(maxlen=500)

    def fresh(self, number: int = 1) -> range:
        """Return keys that were never used."""
        block = range(self._next, self._next + number)
        self._next += number
        return block

    def initial(self, table: str, shelf: int | None) -> range:
        """Return keys of initial rows: half of the session's slice, or a shelf of the rest."""
        size = self.sizes[table]
        low, high = size * self.session // self._sessions, size * (self.session + 1) // self._sessions
        middle = low + (high - low) // 2
        if shelf is None:
            return range(low + 1, middle + 1)
        rest = high - middle
        return range(middle + rest * shelf // SHELVES + 1, middle + rest * (shelf + 1) // SHELVES + 1)

    def gained(self, plan: Plan) -> None:
        """Note that a plan was committed."""
        self._blocks.extend(plan.gains)

    def take_block(self, most: int) -> range | None:
        """Remove and return the largest block of at most so many inserted accounts, to be deleted; None while there are few."""
        fitting = [block for block in self._blocks if len(block) <= most]
        if len(self._blocks) < 8 or not fitting:
            return None
        block = max(fitting, key=len)
        self._blocks.remove(block)
        return block


def make_plan(kind: Kind, rng: random.Random, keys: Keys, *, huge_rows: int, shelf: int | None = None) -> Plan:
    """Plan a transaction.

    Args:
        kind: of transaction.
        rng: source of the choices.
        keys: that it may touch.
        huge_rows: approximate number of rows of a huge transaction.
        shelf: a free shelf, for kinds that are prepared.
    """
    plan = Plan(kind)
    match kind:
        case Kind.TPCB:
            _tpcb(plan, rng, keys)
        case Kind.INSERT:
            rng.choice(_INSERTS)(plan, rng, keys)
        case Kind.UPDATE:
            rng.choice(_UPDATES)(plan, rng, keys)
        case Kind.DELETE:
            _delete(plan, rng, keys)
        case Kind.KEY_CHANGE:
            _key_change(plan, rng, keys)
        case Kind.TOAST:
            _toast(plan, rng, keys)
        case Kind.PARTITION_MOVE:
            _partition_move(plan, rng, keys)
        case Kind.TAGS:
            _tags(plan, rng, keys)
        case Kind.TRUNCATE:
            _truncate(plan, rng)
        case Kind.BATCH | Kind.HUGE:
            _batch(plan, rng, keys, huge_rows if kind is Kind.HUGE else rng.randint(100, 800))
        case Kind.ROLLBACK | Kind.HUGE_ROLLBACK:
            plan.ending = Ending.ROLLBACK
            rows = huge_rows if kind is Kind.HUGE_ROLLBACK else rng.randint(1, 300)
            (_batch if rng.random() < 0.5 else _savepoints)(plan, rng, keys, rows)
        case Kind.SAVEPOINTS | Kind.HUGE_SAVEPOINTS:
            _savepoints(plan, rng, keys, huge_rows if kind is Kind.HUGE_SAVEPOINTS else rng.randint(5, 100))
        case Kind.PREPARED | Kind.HUGE_PREPARED:
            plan.ending, plan.shelf = Ending.PREPARE, shelf
            rows = huge_rows if kind is Kind.HUGE_PREPARED else rng.randint(1, 100)
            (_batch if rng.random() < 0.5 else _savepoints)(plan, rng, keys, rows)
            _toast(plan, rng, keys)
            _partition_move(plan, rng, keys)
    return plan


# --- single-row changes


def _pick(rng: random.Random, keys: Keys, table: str, plan: Plan) -> int:
    return rng.choice(keys.initial(table, plan.shelf))


def _tpcb(plan: Plan, rng: random.Random, keys: Keys) -> None:
    aid, tid = _pick(rng, keys, "accounts", plan), _pick(rng, keys, "tellers", plan)
    bid, delta = rng.randint(1, keys.sizes["branches"]), rng.randint(-5000, 5000)
    plan.run("UPDATE accounts SET abalance = abalance + %s WHERE aid = %s", delta, aid)
    plan.run("UPDATE tellers SET tbalance = tbalance + %s WHERE tid = %s", delta, tid)
    plan.run(
        "INSERT INTO history VALUES (%s, %s, %s, %s, timestamp '2020-01-01' + %s::int * interval '1 ms', NULL)",
        *(tid, bid, aid, delta, rng.randrange(10**9)),
    )
    plan.run("UPDATE branches SET bbalance = bbalance + %s WHERE bid = %s", delta, bid)


def _insert_accounts(plan: Plan, keys: Keys, rows: int) -> range:
    block = keys.fresh(rows)
    plan.run("INSERT INTO accounts SELECT i, i %% 100, 0, md5(i::text) FROM generate_series(%s::bigint, %s) i", block[0], block[-1])
    plan.gains.append(block)
    return block


def _insert_account(plan: Plan, _rng: random.Random, keys: Keys) -> None:
    _insert_accounts(plan, keys, 1)


def _insert_document(plan: Plan, rng: random.Random, keys: Keys) -> None:
    plan.run(
        "INSERT INTO documents SELECT %s, 'new', 0, string_agg(md5(i || '/' || %s::bigint), '') FROM generate_series(1, %s) i",
        *(keys.fresh()[0], rng.randrange(10**9), rng.choice([1, 50, 150, 1000])),
    )


def _insert_measurement(plan: Plan, rng: random.Random, keys: Keys) -> None:
    plan.run("INSERT INTO measurements VALUES (%s, %s, %s / 7.0)", keys.fresh()[0], rng.randrange(6), rng.randrange(10**6))


def _insert_specimen(plan: Plan, rng: random.Random, keys: Keys) -> None:
    plan.run(_INSERT_SPECIMEN, keys.fresh()[0], rng.randrange(10**6))


def _update_account(plan: Plan, rng: random.Random, keys: Keys) -> None:
    plan.run(
        "UPDATE accounts SET abalance = %s, filler = md5(%s::text) WHERE aid = %s",
        *(rng.randrange(10**6), rng.randrange(10**6), _pick(rng, keys, "accounts", plan)),
    )


def _update_document(plan: Plan, rng: random.Random, keys: Keys) -> None:
    plan.run(
        "UPDATE documents SET body = (SELECT string_agg(md5(i || '/' || %s::bigint), '') FROM generate_series(1, %s) i) WHERE id = %s",
        *(rng.randrange(10**9), rng.choice([0, 1, 150, 600]), _pick(rng, keys, "documents", plan)),
    )


def _update_measurement(plan: Plan, rng: random.Random, keys: Keys) -> None:
    plan.run("UPDATE measurements SET reading = %s / 7.0 WHERE id = %s", rng.randrange(10**6), _pick(rng, keys, "measurements", plan))


def _update_specimen(plan: Plan, rng: random.Random, keys: Keys) -> None:
    plan.run(_UPDATE_SPECIMEN, rng.randrange(10**6), _pick(rng, keys, "specimens", plan))


def _delete(plan: Plan, rng: random.Random, keys: Keys) -> None:
    table, key = rng.choice([("accounts", "aid"), ("documents", "id"), ("measurements", "id"), ("specimens", "id")])
    plan.run(f"DELETE FROM {table} WHERE {key} = %s", _pick(rng, keys, table, plan))


def _key_change(plan: Plan, rng: random.Random, keys: Keys) -> None:
    table, key = rng.choice([("accounts", "aid"), ("documents", "id"), ("measurements", "id"), ("specimens", "id")])
    plan.run(f"UPDATE {table} SET {key} = %s WHERE {key} = %s", keys.fresh()[0], _pick(rng, keys, table, plan))


def _toast(plan: Plan, rng: random.Random, keys: Keys) -> None:
    document = _pick(rng, keys, "documents", plan)
    plan.run("UPDATE documents SET title = 'title ' || %s::bigint, revision = revision + 1 WHERE id = %s", rng.randrange(10**6), document)


def _partition_move(plan: Plan, rng: random.Random, keys: Keys) -> None:
    first = _pick(rng, keys, "measurements", plan)
    last = min(first + rng.choice([0, 0, 20]), keys.initial("measurements", plan.shelf)[-1])
    plan.run("UPDATE measurements SET region = (region + %s) %% 6 WHERE id BETWEEN %s AND %s", rng.randint(1, 5), first, last)


_INSERT_SPECIMEN: Final = (
    f"INSERT INTO specimens (id, {SPECIMEN_NAMES}) SELECT id, {SPECIMEN_VALUES} FROM (VALUES (%s::bigint, %s::bigint)) AS given (id, n)"
)
_UPDATE_SPECIMEN: Final = (
    f"UPDATE specimens SET ({SPECIMEN_NAMES}) = (SELECT {SPECIMEN_VALUES} FROM (VALUES (%s::bigint)) AS given (n)) WHERE id = %s"
)
_INSERTS: Final = (_insert_account, _insert_document, _insert_measurement, _insert_specimen)
_UPDATES: Final = (_update_account, _update_document, _update_measurement, _update_specimen)


# --- side tables


def _tags(plan: Plan, rng: random.Random, keys: Keys) -> None:
    mine = keys.session
    one_of_them = "ctid = (SELECT ctid FROM tags WHERE owner = %s ORDER BY ctid LIMIT 1)"
    match rng.randrange(5):
        case 0 | 1:
            plan.run("INSERT INTO tags SELECT %s, 'a duplicate', 0 FROM generate_series(1, %s)", mine, rng.randint(1, 5))
        case 2:
            plan.run(f"UPDATE tags SET label = NULL, amount = amount + %s WHERE {one_of_them}", rng.randint(1, 3), mine)
        case 3:
            plan.run(f"DELETE FROM tags WHERE {one_of_them}", mine)
        case _:
            plan.run("UPDATE tags SET amount = amount + 1 WHERE owner = %s", mine)
            plan.run("DELETE FROM tags WHERE owner = %s AND amount > 4", mine)


def _truncate(plan: Plan, rng: random.Random) -> None:
    if rng.random() < 0.7:
        plan.run("TRUNCATE scratch, scratch_items" + rng.choice(["", " RESTART IDENTITY"]))
    plan.run(
        "INSERT INTO scratch (id, note) SELECT i, md5(i::text) FROM generate_series(1, %s) i ON CONFLICT DO NOTHING", rng.randint(1, 60)
    )
    plan.run("INSERT INTO scratch_items SELECT id, k FROM scratch, generate_series(1, 3) k ON CONFLICT DO NOTHING")
    plan.run("DELETE FROM scratch WHERE id %% 7 = %s", rng.randrange(7))


# --- many rows


def _batch(plan: Plan, rng: random.Random, keys: Keys, rows: int) -> None:
    """Insert, update and delete blocks, about so many rows in total."""
    third = max(rows // 3, 1)
    block = _insert_accounts(plan, keys, rows - 2 * third if rows > 2 else 1)
    initial = keys.initial("accounts", plan.shelf)
    first = rng.choice(initial)
    last = min(first + third - 1, initial[-1])
    plan.run("UPDATE accounts SET abalance = abalance + %s WHERE aid BETWEEN %s AND %s", rng.randint(1, 99), first, last)
    plan.run("UPDATE accounts SET filler = md5(filler) WHERE aid BETWEEN %s AND %s", block[0], block[-1])
    if plan.shelf is None and (old := keys.take_block(rows)) is not None:
        plan.run("DELETE FROM accounts WHERE aid BETWEEN %s AND %s", old[0], old[-1])
    if rng.random() < 0.5:  # delete and insert the same keys
        end = min(first + third // 4, last)
        plan.run("DELETE FROM accounts WHERE aid BETWEEN %s AND %s", first, end)
        plan.run("INSERT INTO accounts SELECT i, 0, %s, 'again' FROM generate_series(%s::bigint, %s) i", rng.randrange(99), first, end)


def _savepoints(plan: Plan, rng: random.Random, keys: Keys, rows: int) -> None:
    """A tree of subtransactions up to five deep, some rolled back, with about so many rows in total."""
    names = (f"s{number}" for number in count(1))

    def work() -> None:
        small = rng.choice((*_INSERTS, *_UPDATES, _toast, _partition_move))
        small(plan, rng, keys)
        block = _insert_accounts(plan, keys, max(rows // 20, 1))
        if rng.random() < 0.5:
            middle = block[len(block) // 2]
            plan.run("UPDATE accounts SET abalance = abalance + 1 WHERE aid BETWEEN %s AND %s", middle, block[-1])
            plan.run("DELETE FROM accounts WHERE aid BETWEEN %s AND %s", block[0], middle - 1)

    _tree(plan, rng, work, names, rng.randint(2, 5))


def _tree(plan: Plan, rng: random.Random, work: Callable[[], None], names: Iterator[str], depth: int) -> None:
    work()
    for _ in range(rng.randint(1, 2) if depth else 0):
        name = next(names)
        plan.steps.append(Savepoint(name))
        _tree(plan, rng, work, names, depth - 1)
        fate = rng.randrange(4)
        if fate in {0, 1}:
            plan.steps.append(RollbackTo(name))
        if fate == 1:  # further work is a new subtransaction under the old name
            work()
        if fate == 2:
            plan.steps.append(Release(name))
    work()
