"""The queries of this program's own subscriber (``walreceiver``, ``subscription/setup``, ``waits``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from subscriber.testing.fake_publisher.backend.results import BOOL, INT4, INT8, NAME, OID, TEXT, Result, known, literals, result
from subscriber.testing.fake_publisher.catalog.published import attribute_numbers, published_by
from subscriber.testing.fake_publisher.replication.slots import slot_row
from subscriber.waits import WAIT_COLUMNS

if TYPE_CHECKING:
    from subscriber.testing.fake_publisher.backend.session import Session

__all__ = ["QUERIES"]

_JSON: Final = 114
_LSN: Final = 3220
_XID_BITS: Final = 0xFFFF_FFFF


def _slots(session: Session, values: Mapping[str, str]) -> Result:
    publisher = session.publisher
    name, prefix = values.get("name"), values.get("prefix")
    found = [slot for slot in publisher.slots.values() if slot.name == name or (prefix is not None and slot.name.startswith(prefix))]
    rows = [(json.dumps(slot_row(slot, publisher.caps)),) for slot in sorted(found, key=lambda slot: slot.name)]
    return result({"to_json": _JSON}, rows)


def _observe_slot(session: Session, values: Mapping[str, str]) -> Result:
    publisher = session.publisher
    slot = publisher.slots.get(values["name"])
    if slot is None:
        return result({"to_json": _JSON, "pg_wal_lsn_diff": INT8, "lsn": _LSN, "coalesce": TEXT}, [])
    end = publisher.wal.end
    lag = None if slot.active_pid is None else 0
    row = (json.dumps(slot_row(slot, publisher.caps)), end - slot.restart_lsn, end, lag)
    return result({"to_json": _JSON, "pg_wal_lsn_diff": INT8, "lsn": _LSN, "coalesce": TEXT}, [row])


def _published_tables(session: Session, values: Mapping[str, str]) -> Result:
    wanted = literals(values.get("only", ""))
    pairs = set(zip(wanted[::2], wanted[1::2], strict=True))
    rows = []
    for publication, covered, table in published_by(session, values["names"]):
        shape = table.shape
        if pairs and (shape.name.namespace, shape.name.name) not in pairs:
            continue
        numbers = attribute_numbers(session, publication, covered, table) if values["attrs"] != "NULL" else None
        attributes = None if numbers is None else " ".join(map(str, numbers))
        changes = ("update" in publication.publish, "delete" in publication.publish)
        stored = sum(len(value or b"") for row in table.rows.values() for value in row)
        size = 8192 * (stored // 8192 + 1) if table.rows else 0
        name = (shape.name.namespace, shape.name.name)
        rows.append((shape.oid, *name, "r", shape.replica_identity, size, len(table.rows), *changes, attributes, covered.where))
    rows.sort(key=lambda row: (row[1], row[2]))
    fields = {"oid": OID, "nspname": NAME, "relname": NAME, "relkind": 18, "relreplident": 18, "size": INT8, "reltuples": INT8}
    return result(fields | {"pubupdate": BOOL, "pubdelete": BOOL, "attrs": TEXT, "pg_get_expr": TEXT}, rows)


def _columns(session: Session, values: Mapping[str, str]) -> Result:
    rows = []
    for oid in map(int, values["oids"].split(",")):
        table = session.publisher.table_by_oid(oid)
        if table is None:
            continue
        shape = table.shape
        for column in shape.columns:
            place = shape.primary_key.index(column.name) + 1 if column.name in shape.primary_key else 0
            key = column.name in shape.identity_columns
            facts = (column.type_oid, column.modifier, column.not_null, bool(column.generated), key, place)
            rows.append((oid, column.number, column.name, *facts))
    fields = {"attrelid": OID, "attnum": 21, "attname": NAME, "atttypid": OID, "atttypmod": INT4, "attnotnull": BOOL}
    return result(fields | {"generated": BOOL, "key": BOOL, "place": INT4}, rows)


def _types(session: Session, values: Mapping[str, str]) -> Result:
    added = session.publisher.types.added
    rows = []
    for oid in map(int, values["oids"].split(",")):
        fact = added.get(oid)
        if fact is not None:
            attributes = [[part.name, part.type_oid, part.modifier] for part in fact.attributes]
            lists = (json.dumps(attributes) if attributes else None, json.dumps(fact.labels) if fact.labels else None)
            rows.append((oid, fact.namespace, fact.name, fact.kind.value, fact.modifier, fact.delimiter, fact.element, *lists))
    fields = {"oid": OID, "nspname": NAME, "typname": NAME, "typtype": 18, "typtypmod": INT4, "typdelim": 18, "element": OID}
    return result(fields | {"attributes": _JSON, "labels": _JSON}, rows)


def _publications(session: Session, values: Mapping[str, str]) -> Result:
    return result({"pubname": NAME}, [(name,) for name in literals(values["names"]) if name in session.publisher.publications])


def _decoding(session: Session, values: Mapping[str, str]) -> Result:
    names = ("wal_level", "effective_wal_level", "output_plugin_libraries")
    level, effective, libraries = (
        session.publisher.parameter(session, name) if session.publisher.knows_parameter(session, name) else None for name in names
    )
    return result({"standby": BOOL, "wal_level": TEXT, "effective": TEXT, "libraries": TEXT}, [(False, level, effective, libraries)])


def _headroom(session: Session, values: Mapping[str, str]) -> Result:
    publisher = session.publisher
    senders = sum(found.replication for found in publisher.sessions.values())
    ours = int(values["name"] in publisher.slots)
    limits = (publisher.parameter(session, "max_replication_slots"), publisher.parameter(session, "max_wal_senders"))
    row = (len(publisher.slots), limits[0], senders, limits[1], ours)
    return result({"slots": INT8, "max_replication_slots": TEXT, "senders": INT8, "max_wal_senders": TEXT, "ours": INT8}, [row])


def _readable(session: Session, values: Mapping[str, str]) -> Result:
    oids = {int(pair.split(",")[0]) for pair in values["wanted"].split("(") if pair}
    rows = [(oid, session.user, True, False, True) for oid in sorted(oids) if session.publisher.table_by_oid(oid)]
    return result({"oid": OID, "current_user": NAME, "usage": BOOL, "row_security": BOOL, "select": BOOL}, rows)


def _nothing(session: Session, values: Mapping[str, str]) -> Result:
    return result({"found": TEXT}, [])


def _no_waits(session: Session, values: Mapping[str, str]) -> Result:
    return result(dict.fromkeys(WAIT_COLUMNS, TEXT), [])


def _database_oid(session: Session, values: Mapping[str, str]) -> Result:
    return result({"oid": TEXT, "pg_is_in_recovery": TEXT}, [("16384", "false")])


def _wal_end(session: Session, values: Mapping[str, str]) -> Result:
    return result({"lsn": _LSN}, [(session.publisher.wal.end,)])


def _set_memory(session: Session, values: Mapping[str, str]) -> Result:
    session.set_parameter("logical_decoding_work_mem", values["size"])
    return result({"set_config": TEXT}, [(values["size"],)])


def _working(session: Session, values: Mapping[str, str]) -> Result:
    # a fake session works for no longer than it takes to answer; a slot that is created waits for transactions
    return result({}, [()] if int(values["pid"]) in session.publisher.sessions else [])


def _outcome(session: Session, values: Mapping[str, str]) -> Result:
    publisher = session.publisher
    found = [publisher.transaction_status(int(xid) & _XID_BITS) for xid in values["xids"].split(",")]
    return result({"pg_xact_status": TEXT}, [(status,) for status in found if status is not None])


def _rolled_back(session: Session, values: Mapping[str, str]) -> Result:
    publisher = session.publisher
    slot = publisher.slots.get(values["slot"])
    asked = values["xids"].split(",") if slot is not None and slot.active_pid is not None else []
    answers = {xid: publisher.transaction_status(int(xid)) for xid in asked}
    known_answers = [] if publisher.faults.hides_outcome() else [answer for answer in answers.values() if answer is not None]
    aborted = ",".join(xid for xid, answer in answers.items() if answer == "aborted")
    return result({"count": TEXT, "known": TEXT, "string_agg": TEXT}, [(len(answers), len(known_answers), aborted or None)])


def _plugin_relation(session: Session, values: Mapping[str, str]) -> Result:
    table = session.publisher.table_by_oid(int(values["oid"]))
    if table is None:
        return result({"relkind": 18, "string_agg": TEXT, "exists": BOOL}, [])
    known_names = set(literals(values["names"]))
    generated = ", ".join(column.name for column in table.shape.columns if column.generated and column.name not in known_names)
    listed = any(
        table.shape.name in publication.tables and publication.tables[table.shape.name].columns is not None
        for publication in session.publisher.publications.values()
    )
    return result({"relkind": 18, "string_agg": TEXT, "exists": BOOL}, [("r", generated or None, listed)])


def _relation(session: Session, values: Mapping[str, str]) -> Result:
    return result({}, [()] if session.publisher.table_by_oid(int(values["oid"])) is not None else [])


QUERIES: Final = (
    known("SELECT pg_catalog.to_json(s) FROM pg_catalog.pg_replication_slots AS s WHERE slot_name = '{name}' ORDER BY slot_name", _slots),
    known(
        """SELECT pg_catalog.to_json(s) FROM pg_catalog.pg_replication_slots AS s
           WHERE pg_catalog.starts_with(slot_name::text, '{prefix}') ORDER BY slot_name""",
        _slots,
    ),
    known(
        """SELECT pg_catalog.to_json(s), pg_catalog.pg_wal_lsn_diff(w.lsn, s.restart_lsn)::int8, w.lsn, ...
           WHERE s.slot_name = '{name}'""",
        _observe_slot,
    ),
    known(
        """WITH published AS MATERIALIZED (... WHERE p.pubname IN ({names})), roots AS ...(
           SELECT c.oid, n.nspname, c.relname, c.relkind, c.relreplident, published.pubupdate, published.pubdelete,
               {attrs} AS attributes, {filter} AS row_filter
           FROM published JOIN ... AND (n.nspname, c.relname) IN ({only})) SELECT chosen.oid, ... ORDER BY ...""",
        _published_tables,
    ),
    known(
        """WITH published AS MATERIALIZED (... WHERE p.pubname IN ({names})), roots AS ...(
           SELECT c.oid, n.nspname, c.relname, c.relkind, c.relreplident, published.pubupdate, published.pubdelete,
               {attrs} AS attributes, {filter} AS row_filter
           FROM published JOIN ... SELECT chosen.oid, ... ORDER BY ...""",
        _published_tables,
    ),
    known(
        """WITH identity AS MATERIALIZED (... WHERE c.oid IN ({oids}))
           SELECT a.attrelid, a.attnum, a.attname, a.atttypid, a.atttypmod, a.attnotnull, a.attgenerated <> '',
               COALESCE(a.attnum = ANY (i.indkey), false), COALESCE(pg_catalog.array_position(con.conkey, a.attnum), 0)
           FROM ... ORDER BY a.attrelid, a.attnum""",
        _columns,
    ),
    known(
        """SELECT t.oid, n.nspname, t.typname, CASE WHEN item.oid IS NOT NULL THEN 'a' ELSE t.typtype END, t.typtypmod, t.typdelim, ...
           WHERE t.oid IN ({oids}) AND t.typtype <> 'p'""",
        _types,
    ),
    known("SELECT pubname FROM pg_catalog.pg_publication WHERE pubname IN ({names})", _publications),
    known("SELECT pg_catalog.pg_is_in_recovery(), pg_catalog.current_setting('wal_level'), ...", _decoding),
    known(
        """SELECT (SELECT pg_catalog.count(*) FROM pg_catalog.pg_replication_slots),
           pg_catalog.current_setting('max_replication_slots'), ... WHERE slot_name = '{name}')""",
        _headroom,
    ),
    known(
        "SELECT c.oid, current_user, pg_catalog.has_schema_privilege(...) FROM (VALUES {wanted}) AS wanted (relid, attname) ...", _readable
    ),
    known("SELECT n.nspname FROM pg_catalog.pg_class AS c JOIN ... WHERE c.relname = 'pg_subscription' AND ...", _nothing),
    known("SELECT p.oid::pg_catalog.regprocedure, p.proname FROM pg_catalog.pg_proc AS p JOIN ... 'EXECUTE') ORDER BY 1", _nothing),
    known("SELECT FROM pg_catalog.pg_locks AS l JOIN pg_catalog.pg_database AS d ON ... WHERE l.locktype = 'advisory' AND ...", _nothing),
    known(
        """SELECT oid::pg_catalog.text, pg_catalog.pg_is_in_recovery()::pg_catalog.text FROM pg_catalog.pg_database
           WHERE datname = pg_catalog.current_database()""",
        _database_oid,
    ),
    known(
        """SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
           ELSE pg_catalog.pg_current_wal_flush_lsn() END""",
        _wal_end,
    ),
    known("SELECT pg_current_wal_flush_lsn()::text", _wal_end),
    known(
        "SELECT pg_catalog.set_config(name, greatest(setting::int8, {size})::text, false) FROM pg_catalog.pg_settings WHERE ...",
        _set_memory,
    ),
    known("SELECT FROM pg_catalog.pg_stat_activity WHERE pid = {pid} AND (wait_event_type IS DISTINCT FROM ...", _working),
    known(
        """WITH snapshot AS (...), found AS (... FROM snapshot, pg_catalog.unnest('{{xids}}'::int8[]) ...)
           SELECT pg_catalog.pg_xact_status((next - age)::text::xid8) FROM found WHERE ...""",
        _outcome,
    ),
    known("SELECT FROM pg_catalog.pg_class WHERE oid = {oid}", _relation),
    known("WITH root AS MATERIALIZED (SELECT DISTINCT c.oid FROM pg_catalog.pg_publication AS p, ...", _nothing),
    known(
        """WITH here AS MATERIALIZED (... WHERE slot_name = '{slot}' AND active)), answers AS MATERIALIZED (...'{{xids}}'::int8[]) ...
           SELECT pg_catalog.count(*)::text, ...""",
        _rolled_back,
    ),
    known("SELECT c.relkind, (SELECT string_agg(...ANY (ARRAY[{names}]::text[])), ... WHERE c.oid = {oid}", _plugin_relation),
    known("SELECT ...pg_catalog.pg_blocking_pids(...", _no_waits),
    known("SELECT ...pg_stat_activity AS ...pg_blocking_pids...", _no_waits),
)
