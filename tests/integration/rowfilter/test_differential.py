"""Random tables, filters and changes: the publisher's own row filters and ours give the same messages, byte for byte.

Each table is in a publication without filters and in two with them. Both decode the same WAL. What the second sends must be what our
filters make of what the first sends. The second of the two filters is published for INSERT only, so that filters are combined for each
operation. A filter that this package refuses is left out, and counted; one that it accepts must be accepted by the server, too.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NoReturn

import psycopg
import pytest

from subscriber.protocol.decoder import decode
from subscriber.protocol.encoder import encode
from subscriber.protocol.messages import Delete, Insert, Relation, Update
from subscriber.rowfilter import PublicationFilter, RelationFilters, RowFilterError, combine, parse_filter
from subscriber.types import TypeRegistry
from tests.support.database import Database
from tests.support.row_filters import Generator, Table

pytestmark = pytest.mark.publisher(min=15, lacks="row filters")

CHANGES = 6
Row = Insert | Update | Delete


@pytest.mark.matrix
async def test_random_filters_decide_as_the_server_does(publisher_db: Database, record_property: Callable[[str, object], None]) -> None:
    compared = compare(publisher_db, seed=int(os.environ.get("SUBSCRIBER_ROW_FILTER_SEED", "1")), tables=60)
    record_property("compared", _summary(compared))


@pytest.mark.slow
@pytest.mark.endurance
@pytest.mark.timeout(900)
async def test_many_random_filters(publisher_db: Database, record_property: Callable[[str, object], None]) -> None:
    total: Counter[str] = Counter()
    for seed in range(100, 130):
        total += compare(publisher_db, seed=seed, tables=200)
        publisher_db.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    record_property("compared", _summary(total))


def _summary(counts: Counter[str]) -> str:
    return (
        f"{counts['changes']} changes under {counts['filters']} filters ({counts['deparsed']} as the server prints them), of which"
        f" {counts['passed']} passed; {counts['refused']} filters refused"
    )


class Filtered:
    """A table, and the filters of it that this package accepts."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.accepted: list[str] = []


def compare(database: Database, *, seed: int, tables: int) -> Counter[str]:
    """Compare one set of tables; return how many filters, changes and differences of kind there were."""
    generator = Generator(seed)
    counts: Counter[str] = Counter()
    made = [Filtered(generator.table(number)) for number in range(tables)]
    database.execute(";".join(each.table.ddl() for each in made))
    relations = _relations(database)
    for each in made:
        for columns in (each.table.usable, each.table.columns):
            each.accepted.append(_accepted(generator, relations[each.table.name], columns, counts))
    listed = ", ".join(f"{each.table.name} WHERE ({each.accepted[0]})" for each in made)
    inserts = ", ".join(f"{each.table.name} WHERE ({each.accepted[1]})" for each in made)
    database.execute("CREATE PUBLICATION whole FOR ALL TABLES")
    try:
        database.execute(f"CREATE PUBLICATION filtered FOR TABLE {listed}")
        database.execute(f"CREATE PUBLICATION inserts FOR TABLE {inserts} WITH (publish = 'insert')")
    except psycopg.Error:
        _fail_with_rejected(database, made)
    _compare_deparsed(database, made, relations, counts)
    for slot in ("slot_whole", "slot_filtered"):
        database.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    database.execute("; ".join(statement for each in made for statement in generator.changes(each.table, CHANGES)))
    for binary in (False, True):
        before = _changes(database, "slot_whole", "whole", binary)
        native = _changes(database, "slot_filtered", "filtered,inserts", binary)
        filters = {each.table.name: _combined(relations[each.table.name], each.accepted) for each in made}
        for each in made:
            name = each.table.name
            ours = [change for change in (filters[name].transform(row) for row in before[name]) if change is not None]
            if [encode(row) for row in ours] != [encode(row) for row in native[name]]:
                shown = f"{each.table.columns} key {each.table.key}: {each.accepted}"
                pytest.fail(f"seed {seed}, {name} {shown}: {_differences(ours, native[name])}")
            counts["changes"] += len(before[name])
            counts["passed"] += len(ours)
            counts["transformed"] += sum(type(row) is not Update for row in ours) - sum(type(row) is not Update for row in before[name])
    for slot in ("slot_whole", "slot_filtered"):
        database.execute(f"SELECT pg_drop_replication_slot('{slot}')")
    database.execute("DROP PUBLICATION whole, filtered, inserts")
    return counts


def _fail_with_rejected(database: Database, made: Sequence[Filtered]) -> NoReturn:
    """Find the filters that this package accepts and the server does not."""
    rejected = []
    for each in made:
        for text in each.accepted:
            try:
                database.execute(f"CREATE PUBLICATION one FOR TABLE {each.table.name} WHERE ({text}); DROP PUBLICATION one")
            except psycopg.Error as error:
                rejected.append(f"{each.table.columns} {text}: {error}")
    pytest.fail("\n".join(rejected))


def _accepted(generator: Generator, relation: Relation, columns: dict[str, str], counts: Counter[str]) -> str:
    while True:
        text = generator.filter(columns)
        try:
            parse_filter(text).bind(relation, TypeRegistry())
        except RowFilterError as error:
            counts["refused"] += 1
            counts[f"refused: {error}"] += 1
            continue
        counts["filters"] += 1
        return text


def _combined(relation: Relation, texts: Sequence[str]) -> RelationFilters:
    first, second = (parse_filter(text).bind(relation, TypeRegistry()) for text in texts)
    combined = combine([PublicationFilter(first), PublicationFilter(second, frozenset({"insert"}))])
    assert combined is not None
    return combined


def _compare_deparsed(database: Database, made: Sequence[Filtered], relations: dict[str, Relation], counts: Counter[str]) -> None:
    """The server's own text of a filter can be read back, and is used instead."""
    rows = database.fetch(
        "SELECT c.relname, p.pubname, pg_get_expr(r.prqual, r.prrelid) FROM pg_publication_rel AS r"
        " JOIN pg_class AS c ON c.oid = r.prrelid JOIN pg_publication AS p ON p.oid = r.prpubid"
    )
    texts = {(name, publication): text for name, publication, text in rows}
    for each in made:
        for place, publication in enumerate(("filtered", "inserts")):
            text = texts[each.table.name, publication]
            try:
                parse_filter(text).bind(relations[each.table.name], TypeRegistry())
            except RowFilterError as error:
                counts["deparsed refused"] += 1
                counts[f"deparsed refused: {error}: {text}"] += 1
            else:
                counts["deparsed"] += 1
                each.accepted[place] = text


def _relations(database: Database) -> dict[str, Relation]:
    database.execute("CREATE PUBLICATION described FOR ALL TABLES")
    database.execute("SELECT pg_create_logical_replication_slot('described', 'pgoutput')")
    names = [
        name for (name,) in database.fetch("SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace")
    ]
    # a Relation message precedes the first change; a TRUNCATE is the cheapest
    database.execute(f"TRUNCATE {', '.join(names)}")
    found = {}
    for (data,) in database.fetch(_get("described", "described", binary=False)):
        message = decode(bytes(data))
        if isinstance(message, Relation):
            found[message.name] = message
    database.execute("SELECT pg_drop_replication_slot('described')")
    database.execute("DROP PUBLICATION described")
    return found


def _get(slot: str, publications: str, *, binary: bool, function: str = "get") -> str:
    return (
        f"SELECT data FROM pg_logical_slot_{function}_binary_changes('{slot}', NULL, NULL,"
        f" 'proto_version', '1', 'publication_names', '{publications}', 'binary', '{binary}')"
    )


def _changes(database: Database, slot: str, publications: str, binary: bool) -> dict[str, list[Row]]:
    """The row messages of each table, in order."""
    names: dict[int, str] = {}
    found: dict[str, list[Row]] = defaultdict(list)
    for (data,) in database.fetch(_get(slot, publications, binary=binary, function="peek")):
        message = decode(bytes(data))
        if isinstance(message, Relation):
            names[message.relation_id] = message.name
        elif isinstance(message, Insert | Update | Delete):
            found[names[message.relation_id]].append(message)
    return found


def _differences(ours: Sequence[Row], native: Sequence[Row]) -> str:
    mine, theirs = [encode(row) for row in ours], [encode(row) for row in native]
    return f"only ours: {[row for row in mine if row not in theirs]}, only native: {[row for row in theirs if row not in mine]}"
