"""Random histories of changes for the PostgreSQL sink: runs of INSERTs, UPDATEs and DELETEs in tables of many kinds.

Most changes fit the rows of the target. Some do not: a row that is missing or already there, a value that is too long. The target tells
what then happens; a history knows only which keys it has used.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from subscriber.protocol.messages import Message
from tests.support.sink_postgres import UNCHANGED, Binary, Remote, truncate

TABLES = """
CREATE TYPE mood AS ENUM ('sad', 'ok', 'it''s "fine"');
CREATE TYPE pair AS (a int, b text);
CREATE DOMAIN short AS varchar(5);
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE DOMAIN numbers AS int[];
CREATE FUNCTION shorter(text) RETURNS int[] LANGUAGE sql IMMUTABLE AS 'SELECT ARRAY[1]';

CREATE TABLE plain (id bigint PRIMARY KEY, a int, v varchar(6), t text);
CREATE TABLE typed (
    k text PRIMARY KEY, n name, c "char", p bpchar(4), num numeric(6, 2), m mood, s short, pos positive, arr int[], texts text[],
    nums numbers, b box, r int4range, comp pair, by bytea, j jsonb, bits bit(3), ts timestamp(1), span interval
);
CREATE TABLE arrays (id int PRIMARY KEY, strange text[], small numeric(4, 1)[], chars varchar(3)[], padded char(4)[], bits bit(3)[]);
CREATE TABLE bin (id bigint PRIMARY KEY, v text, b bytea, n int);
CREATE TABLE gen (
    id int PRIMARY KEY, ident int GENERATED ALWAYS AS IDENTITY, v text, twice text GENERATED ALWAYS AS (v || v) STORED, extra serial
);
-- a batch that is rolled back uses numbers of the sequence
CREATE VIEW gen_rows AS SELECT id, ident, v, twice, rank() OVER (ORDER BY extra) FROM gen;
CREATE TABLE more (id int PRIMARY KEY, d text DEFAULT 'd', v text, ident int GENERATED ALWAYS AS IDENTITY);
CREATE VIEW more_rows AS SELECT id, d, v, rank() OVER (ORDER BY ident) FROM more;
CREATE TABLE part (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE part_low PARTITION OF part FOR VALUES FROM (MINVALUE) TO (100);
CREATE TABLE part_rest (v text, id int NOT NULL);
ALTER TABLE part ATTACH PARTITION part_rest DEFAULT;
CREATE TABLE loose (a int, b text);
CREATE TABLE full_key (id int PRIMARY KEY, v text);
CREATE TABLE uniq (id int PRIMARY KEY, u int UNIQUE, v text);
CREATE TABLE numeric_key (id numeric PRIMARY KEY, v text);
CREATE TABLE bare (a int, b text);
CREATE TABLE hot (id int PRIMARY KEY, n int NOT NULL, v text, c varchar(9), f char(4), num numeric(6, 2));
CREATE INDEX ON hot (c, n);
CREATE TABLE hot_full (LIKE hot INCLUDING INDEXES);

CREATE TABLE seen (place bigint, what text, rows bigint);
CREATE TABLE each (id int PRIMARY KEY, v text);
CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    EXECUTE format('INSERT INTO public.seen SELECT (SELECT count(*) FROM public.seen), %L, count(*) FROM public.%I',
                   TG_WHEN || TG_OP || TG_LEVEL, TG_TABLE_NAME);
    RETURN NULL; END $$;
CREATE TRIGGER look AFTER INSERT OR UPDATE OR DELETE ON each FOR EACH ROW EXECUTE FUNCTION look();
ALTER TABLE each ENABLE ALWAYS TRIGGER look;
CREATE TABLE whole (id int PRIMARY KEY, v text);
CREATE TRIGGER look AFTER INSERT OR UPDATE OR DELETE ON whole FOR EACH STATEMENT EXECUTE FUNCTION look();
ALTER TABLE whole ENABLE REPLICA TRIGGER look;
CREATE TABLE choosy (id int PRIMARY KEY, v text);
CREATE FUNCTION choose() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN CASE WHEN NEW.id % 3 > 0 THEN NEW END; END $$;
CREATE TRIGGER choose BEFORE INSERT OR UPDATE ON choosy FOR EACH ROW EXECUTE FUNCTION choose();
ALTER TABLE choosy ENABLE ALWAYS TRIGGER choose;
CREATE TABLE few (id int PRIMARY KEY, v text);
CREATE FUNCTION fewer(int) RETURNS boolean LANGUAGE plpgsql AS
    'BEGIN RETURN (SELECT count(*) FROM public.few) < $1; END';
ALTER TABLE few ADD CHECK (fewer(80));
CREATE TABLE numbered (id int PRIMARY KEY, v text, rows bigint);
CREATE FUNCTION rows_now() RETURNS bigint LANGUAGE plpgsql AS 'BEGIN RETURN (SELECT count(*) FROM public.numbered); END';
ALTER TABLE numbered ALTER rows SET DEFAULT rows_now();
"""

_TEXTS = [
    "",
    "NULL",
    "null",
    "a",
    'q"q',
    "b\\b",
    "\\",
    '"',
    "{}",
    "{a,b}",
    ",",
    ";",
    " lead",
    "trail ",
    "é€𝄞",
    "\t\n\r",
    "x" * 3000,
    "'",
    "\\x41",
]
_TEXTS += ["".join(map(chr, range(1, 256)))]


@dataclass
class _Table:
    remote: Remote
    values: Callable[[random.Random, int], list[object]]
    """The values of a row after its key."""
    key: Callable[[int], object] = lambda number: number
    toast: tuple[int, ...] = ()
    """Indexes of columns that may come as unchanged."""
    changes: bool = True
    keys: int = 200
    """The number of keys."""
    used: set[int] = field(default_factory=set)


def _text(rng: random.Random) -> str | None:
    return rng.choice([*_TEXTS, str(rng.random()), None])


def _maybe(rng: random.Random, *values: object) -> object:
    return rng.choice([None, *values])


def _plain(rng: random.Random, _: int) -> list[object]:
    long = rng.random() < 0.002
    return [_maybe(rng, 0, -1, 2147483647), "too long" if long else _maybe(rng, "abc", "six   ", "six       ", 'a"b\\c'), _text(rng)]


def _typed(rng: random.Random, _: int) -> list[object]:
    return [
        _maybe(rng, "n" * 63, "n" * 80, 'a"'),
        _maybe(rng, "c", "", "\\", "cut", "\\303"),
        _maybe(rng, "a", "abcd", "ab      ", ""),
        _maybe(rng, "1.005", "9999.99", "-0", "NaN"),
        _maybe(rng, "sad", 'it\'s "fine"'),
        _maybe(rng, "short", "with   ", ""),
        _maybe(rng, "1", " 7 "),
        _maybe(rng, "{}", "{1,NULL,3}", "[-2:-1]={1,2}", "{{1,2},{3,4}}", "[0:1][5:5]={{1},{2}}"),
        _maybe(rng, '{a,NULL,"NULL",""}', '{"\\"","\\\\"}', '{"a,b","{}"}'),
        _maybe(rng, "{1,2}", "[3:3]={9}"),
        _maybe(rng, "(1,1),(0,0)", "(3,4),(1,2)"),
        _maybe(rng, "empty", "[1,5)", "(,)"),
        _maybe(rng, '(1,"a ""b""")', "(,)", '(3,"\\\\")'),
        _maybe(rng, "\\x", "\\x00ff5c", "\\x22"),
        _maybe(rng, '{"a": "b\\\\"}', "[1, null]"),
        _maybe(rng, "101", "000"),
        _maybe(rng, "2024-01-01 12:00:00.19", "infinity"),
        _maybe(rng, "1 day -00:00:01", "2 years"),
    ]


def _arrays(rng: random.Random, _: int) -> list[object]:
    return [
        _maybe(rng, '{"a\\"b",NULL}', "[5:6]={a,b}"),
        _maybe(rng, "{1.25,NULL}"),
        _maybe(rng, "{abc,NULL}", '{"ab   "}'),
        _maybe(rng, "{abcd,NULL}", '{"ab    ",""}'),
        _maybe(rng, "{101,NULL}", "[3:3]={011}"),
    ]


def _hot(rng: random.Random, _: int) -> list[object]:
    missing = None if rng.random() < 0.002 else rng.randrange(1000)
    return [missing, _text(rng), _maybe(rng, "", "é€𝄞"), _maybe(rng, "a   ", "abcd"), _maybe(rng, "9999.99", "NaN")]


def _binary(rng: random.Random, _: int) -> list[object]:
    texts = [Binary((_text(rng) or "").encode()), None]
    return [rng.choice(texts), _maybe(rng, Binary(bytes(range(256))), Binary(b"")), _maybe(rng, Binary(rng.randbytes(4)))]


def _v(rng: random.Random, _: int) -> list[object]:
    return [_text(rng)]


def _unique(rng: random.Random, key: int) -> list[object]:
    return [_maybe(rng, key, key, key, rng.randrange(1000)), _text(rng)]


def _tables() -> list[_Table]:
    numbers = iter(range(1, 100))

    def remote(name: str, *columns: str, identity: str = "d") -> Remote:
        types: dict[str, int | tuple[int, int]] = {"id": 20 if name in {"plain", "bin"} else 23}
        if name.startswith("hot"):
            types |= {"n": 23, "c": (1043, 13), "f": (1042, 8), "num": (1700, (6 << 16 | 2) + 4)}
        return Remote(name, *columns, identity=identity, relation_id=next(numbers), types=types)

    types = ("n", "c", "p", "num", "m", "s", "pos", "arr", "texts", "nums", "b", "r", "comp", "by", "j", "bits", "ts", "span")
    return [
        _Table(remote("plain", "*id", "a", "v", "t"), _plain, toast=(3,)),
        _Table(remote("plain", "*id", "a", "v", "t"), _plain, toast=(2, 3)),
        _Table(remote("typed", "*k", *types), _typed, key=lambda number: f"key {number} \\\"'{{}}"),
        _Table(remote("arrays", "*id", "strange", "small", "chars", "padded", "bits"), _arrays),
        _Table(remote("bin", "*id", "v", "b", "n"), _binary, key=lambda number: Binary(number.to_bytes(8, "big"))),
        _Table(remote("gen", "*id", "ident", "v"), lambda rng, key: [key, _text(rng)]),
        _Table(remote("more", "v", "*id"), _v),
        _Table(remote("part", "*id", "v"), _v, toast=(1,)),
        _Table(remote("loose", "a", "b", identity="f"), _v),
        _Table(remote("full_key", "id", "v", identity="f"), _v, toast=(1,)),
        _Table(remote("uniq", "*id", "u", "v"), _unique, toast=(2,)),
        _Table(remote("numeric_key", "*id", "v"), _v, key=lambda number: f"{number}.0" if number % 5 == 0 else f"{number}.00"),
        _Table(remote("bare", "a", "b"), _v, changes=False),
        _Table(remote("each", "*id", "v"), _v),
        _Table(remote("whole", "*id", "v"), _v),
        _Table(remote("choosy", "*id", "v"), _v),
        _Table(remote("few", "*id", "v"), _v),
        _Table(remote("numbered", "*id", "v"), _v),
        _Table(remote("hot", "*id", "n", "v", "c", "f", "num"), _hot, toast=(2,), keys=12),
        _Table(remote("hot_full", "id", "n", "v", "c", "f", "num", identity="f"), _hot, toast=(2,), keys=12),
    ]


class ChangeHistory:
    """Makes batches: lists of transactions, which are lists of messages."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._tables = _tables()
        self._described: set[int] = set()
        self._before: list[set[int]] = []

    def batch(self) -> list[list[Message]]:
        """The next batch."""
        rng = self._rng
        self._before = [set(table.used) for table in self._tables]
        transactions: list[list[Message]] = [[]]
        focus = rng.choice(self._tables)
        for _ in range(rng.randint(1, 8)):
            table = focus if rng.random() < 0.6 else rng.choice(self._tables)
            if table.remote.relation_id not in self._described:
                self._described.add(table.remote.relation_id)
                transactions[-1].append(table.remote.relation)
            for message in self._run(table, rng.choice((1, 2, 4, 9, 25))):
                transactions[-1].append(message)
                if rng.random() < 0.05:
                    transactions.append([])
        return [messages for messages in transactions if messages]

    def failed(self) -> None:
        """Forget the latest batch, because the target rejected it."""
        self._described.clear()
        for table, used in zip(self._tables, self._before, strict=True):
            table.used = used

    def _run(self, table: _Table, length: int) -> list[Message]:
        rng, remote = self._rng, table.remote
        if rng.random() < 0.08:
            table.used.clear()
            return [truncate(remote, restart=rng.random() < 0.5)]
        kind = rng.choice(("insert", "insert", "update", "update", "delete")) if table.changes else "insert"
        unchanged = {index for index in table.toast if rng.random() < 0.4}
        made: list[Message] = []
        for _ in range(length):
            if kind == "insert":
                made += self._insert(table)
            elif kind == "update":
                made += self._update(table, unchanged if rng.random() < 0.95 else set())
            else:
                made += self._delete(table)
        return made

    def _row(self, table: _Table, number: int) -> list[object]:
        values = [table.key(number), *table.values(self._rng, number)]
        return list(reversed(values)) if table.remote.relation.columns[0].name == "v" else values

    def _old(self, table: _Table, number: int) -> list[object]:
        if table.remote.full:
            return self._row(table, number)
        nulls = [None] * (table.remote.width - 1)
        return [*nulls, table.key(number)] if table.remote.relation.columns[0].name == "v" else [table.key(number), *nulls]

    def _existing(self, table: _Table) -> int:
        if table.used and self._rng.random() < 0.997:
            return self._rng.choice(sorted(table.used))
        return self._rng.randrange(table.keys)

    def _insert(self, table: _Table) -> list[Message]:
        number = self._rng.randrange(table.keys)
        if number in table.used and table.changes and self._rng.random() < 0.999:
            free = set(range(table.keys + 50 if table.keys > 50 else table.keys)) - table.used
            if not free:
                return []
            number = self._rng.choice(sorted(free))
        table.used.add(number)
        return [table.remote.insert(*self._row(table, number))]

    def _update(self, table: _Table, unchanged: set[int]) -> list[Message]:
        number, rng = self._existing(table), self._rng
        new = [UNCHANGED if index in unchanged else value for index, value in enumerate(self._row(table, number))]
        if table.remote.full:
            old = self._old(table, number)
            if table.remote.relation.columns[0].name == "id" and rng.random() < 0.02:
                table.used.add(number + 1)
                new[0] = table.key(number + 1)
            return [table.remote.update(*new, old=old)]
        if rng.random() < 0.02:
            other = rng.randrange(table.keys)
            table.used.discard(number)
            table.used.add(other)
            return [table.remote.update(*self._row(table, other), old=self._old(table, number))]
        return [table.remote.update(*new)]

    def _delete(self, table: _Table) -> list[Message]:
        number = self._existing(table)
        table.used.discard(number)
        return [table.remote.delete(*self._old(table, number))]
