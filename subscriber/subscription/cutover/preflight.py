"""What must be true before writers are stopped. Nothing is changed here.

Everything that is wrong is reported at once, each with what to do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Final

from subscriber.catalog import Observation
from subscriber.config import Settings, SubscriptionOptions
from subscriber.config.table_names import written_name
from subscriber.errors import ConfigurationError, SubscriberError
from subscriber.interfaces import PublishedTable, TableState
from subscriber.interfaces.sequences import SequenceState
from subscriber.printable import shortened
from subscriber.protocol.quoting import quote_literal
from subscriber.schema.inventory import unpublished_tables
from subscriber.subscription.cutover.link import Link, opened_catalog
from subscriber.subscription.cutover.move import Place
from subscriber.subscription.cutover.moved_sequences import cutover_sequences, sequence_left, sequence_notes
from subscriber.subscription.cutover.options import CutoverOptions
from subscriber.subscription.cutover.refreshed_views import view_problems
from subscriber.subscription.cutover.unreplicated import unreplicated_problems
from subscriber.subscription.setup.schema_differences import database_differences
from subscriber.subscription.targets import open_target
from subscriber.walreceiver.checks import decoding_problems
from subscriber.walreceiver.fences.fence import Fence
from subscriber.walreceiver.fences.unfenced import background_workers, writing_subscriptions
from subscriber.walreceiver.mapped_tables import mapped_tables
from subscriber.walreceiver.new_publication import published_oids
from subscriber.walreceiver.publication import published_tables
from subscriber.walreceiver.session import Session

__all__ = ["find_cutover_problems", "lag", "unfenced"]

# by qualified name: table, its columns' types, whether it has a usable replica identity, what is switched off. A foreign key to a table
# that is not moved cannot be validated
_DESCRIBE: Final = """
WITH wanted (nspname, relname) AS (VALUES {names}), moved AS MATERIALIZED (
    SELECT c.oid, n.nspname, c.relname FROM wanted JOIN pg_catalog.pg_namespace n ON n.nspname = wanted.nspname
      JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = wanted.relname), leaf AS MATERIALIZED (
    SELECT c.oid AS root, l.relid, EXISTS (SELECT FROM moved WHERE moved.oid = l.relid
               OR moved.oid IN (SELECT relid FROM pg_catalog.pg_partition_ancestors(l.relid))) AS moved
      FROM pg_catalog.pg_class c CROSS JOIN LATERAL (
        SELECT c.oid AS relid WHERE c.relkind = 'r'
        UNION SELECT relid FROM pg_catalog.pg_partition_tree(c.oid) WHERE isleaf AND c.relkind = 'p') AS l
     WHERE c.oid IN (SELECT confrelid FROM pg_catalog.pg_constraint WHERE contype = 'f' AND NOT convalidated))
SELECT n.nspname, c.relname,
       (SELECT pg_catalog.json_object_agg(a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod))
          FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
       CASE c.relreplident WHEN 'n' THEN false WHEN 'f' THEN true
            ELSE EXISTS (SELECT FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid AND i.indimmediate AND i.indisvalid
                         AND CASE c.relreplident WHEN 'i' THEN i.indisreplident ELSE i.indisprimary END) END,
       pg_catalog.array_to_json(ARRAY(SELECT 'trigger "' || t.tgname || '" is disabled' FROM pg_catalog.pg_trigger t
              WHERE t.tgrelid = c.oid AND t.tgenabled = 'D' AND NOT t.tgisinternal
             UNION ALL
             SELECT 'constraint "' || k.conname || '" is ' || CASE WHEN k.convalidated THEN 'disabled' ELSE 'not valid' END
               FROM pg_catalog.pg_constraint k
              WHERE k.conrelid = c.oid AND (NOT k.convalidated AND (k.contype <> 'f' OR (
                    k.conparentid = 0 AND EXISTS (SELECT FROM leaf WHERE leaf.root = k.confrelid AND leaf.moved)
                    AND NOT EXISTS (SELECT FROM leaf WHERE leaf.root = k.confrelid AND NOT leaf.moved))) OR EXISTS (
                    SELECT FROM pg_catalog.pg_trigger t WHERE t.tgconstraint = k.oid AND t.tgenabled = 'D' AND t.tgrelid = c.oid))
             UNION ALL
             SELECT 'index "' || x.relname || '" is not valid' FROM pg_catalog.pg_index i
               JOIN pg_catalog.pg_class x ON x.oid = i.indexrelid WHERE i.indrelid = c.oid AND NOT i.indisvalid
             ORDER BY 1))::text
FROM moved JOIN pg_catalog.pg_class c ON c.oid = moved.oid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
ORDER BY 1, 2
"""


async def find_cutover_problems(
    found: Observation, source: Place, destination: Place, link: Link, *, options: CutoverOptions, back: str | None
) -> tuple[list[SubscriberError], list[str]]:
    """Look for everything that would make a cutover fail.

    Args:
        found: the subscription.
        source: the old database.
        destination: the new one.
        link: the subscription.
        options: of the cutover.
        back: name of the way back; None: there will be none.

    Returns:
        Errors, and notes for people.

    Raises:
        SubscriberError: one of the two databases cannot be queried.
    """
    errors, notes = list[SubscriberError](), list[str]()

    def error(message: str, hint: str) -> None:
        errors.append(ConfigurationError(message, hint=hint))

    name, mapping = found.definition.name, found.definition.options.mapping
    async with await Session.connect(source.conninfo, application_name=f"{name} cutover") as session:
        everything = await published_tables(session, found.definition.publications)
        prepared = await session.execute(
            "SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE database = pg_catalog.current_database() ORDER BY prepared"
        )
        workers = await background_workers(session)
        left_out = await unpublished_tables(session.execute, published_oids(found.definition.publications))
    tables = mapped_tables(everything, mapping)
    excluded = sorted(str(table.name) for table in everything if mapping.excludes(table.name.pair))
    notes += [f"rows of tables that are not published are not moved: {shortened(left_out)}"] if left_out else []
    notes += [f"rows of tables that exclude_table leaves out are not moved: {shortened(excluded)}"] if excluded else []
    notes += [f"columns of table {written_name(table)} that columns leaves out are not moved" for table in mapping.columns]
    notes += [
        f'background worker "{worker}" is connected to {source.title} and is not ended: make sure that it writes nothing'
        for worker in workers
    ]
    other = destination.conninfo if destination.fence is not None else None
    problems, more = await unreplicated_problems(source.conninfo, other, options, destination.title)
    errors, notes = errors + problems, notes + more
    notes += [f"rows of table {table.name} that its row filter leaves out are not moved" for table in tables if table.row_filters]
    errors += await unfenced(source, found.definition.publications)
    notes += [f'prepared transaction "{gid}" must end while writers are stopped: commit it or roll it back before' for (gid,) in prepared]
    if source.fence is not None and (closed := await source.fence.row(own=False)) is not None:
        opens = await source.fence.how_to_open(closed)
        error(
            f"{source.title} is closed already, by another cutover",
            f"end that one first; if there is none, this SQL opens {source.title}: {opens}",
        )
    for place in (source, destination):
        if place.fence is not None:
            for message, hint in await place.fence.problems(options.fence):
                error(message, hint)
    for message in _not_ready(found, tables):
        error(message, "`subscriber status` shows the tables, `subscriber alter --resync` brings back one that is parked; try again later")
    if found.copies_wait is not None:
        error(found.copies_wait, f"wait for it, or let them begin now: subscriber alter {name} --target URL -o copy_window=none")
    if found.definition.options.max_apply_rate:
        error(
            "max_apply_rate would hold up the last changes while no one can write",
            f"end the limit, also while it runs: subscriber alter {name} --target URL -o max_apply_rate=0",
        )
    if not found.tables:
        error(f'subscription "{name}" has no tables', "add tables to the publication, and use `subscriber alter --refresh`")
    elif destination.fence is not None:
        for message, hint in await _compared(source, destination, tables, back=back is not None):
            error(message, hint)
    if back is not None and mapping.renames:
        error("tables have other names or columns in the new database: there is no way back with these", "use --no-way-back")
    elif back is not None:
        for message, hint in await _way_back(source, destination, tables, back):
            error(message, hint)
    results = await cutover_sequences(
        source.conninfo, destination.conninfo, found.definition.publications, options, dry_run=True, mapping=mapping
    )
    errors += [sequence_left(each) for each in results if each.state in {SequenceState.LEFT, SequenceState.MISSING}]
    notes += sequence_notes(results)
    if destination.fence is not None:
        problems, more = await view_problems(source.conninfo, destination.conninfo, options.refresh)
        errors, notes = errors + problems, notes + more
        async with await Session.connect(source.conninfo, application_name=f"{name} cutover") as session:
            different = await database_differences(session, destination.conninfo)
        notes += [each.message for each in different if not each.extra]
    if not errors and (behind := await lag(source, link, options.max_lag)) is not None:
        error(behind, "wait until the lag is small (`subscriber status`), or find out what slows the target down")
    return errors, notes


async def unfenced(source: Place, publications: Sequence[str]) -> list[ConfigurationError]:
    """Subscriptions that would write into a closed source: what they write after the last LSN would be lost."""
    async with await Session.connect(source.conninfo, application_name="subscriber cutover") as session:
        names = await writing_subscriptions(session, publications)
    return [
        ConfigurationError(
            f'subscription "{name}" in {source.title} writes into tables that are moved, and no fence keeps it out',
            hint="wait until it has caught up, and disable it: ALTER SUBSCRIPTION … DISABLE, or `subscriber alter … --disable`",
        )
        for name in names
    ]


async def lag(source: Place, link: Link, seconds: float) -> str | None:
    """Why the target is too far behind the publisher; None: it is not."""
    found = await link.find()
    assert found is not None
    if not await link.is_running():
        return f'subscription "{link.name}" is not running: start `subscriber run --target` for its target'
    async with (
        await Session.connect(source.conninfo, application_name=f"{link.name} cutover") as session,
        opened_catalog(link.target) as catalog,
    ):
        # an open transaction can leave a part of a record as the end of the WAL: no walsender sends that
        end = await Fence.flushed(session)
        due = asyncio.get_running_loop().time() + seconds
        # not by asyncio.timeout: a session whose query was cancelled cannot be used again
        while (confirmed := await link.confirmed(session, found.slot_name or "", catalog)) < end:
            if asyncio.get_running_loop().time() >= due:
                behind = await session.current_wal_lsn() - confirmed
                return f"the target is {behind:,} bytes of WAL behind, and did not reach {end} within {seconds:g} s (--max-lag)"
            await asyncio.sleep(0.05)
    return None


def _not_ready(found: Observation, tables: Sequence[PublishedTable]) -> list[str]:
    known = {each.table: each.entry.state for each in found.tables}
    missing = [f"table {table.name} is published, and not part of the subscription" for table in tables if table.name not in known]
    parked = [f"table {each.table} is parked {each.parked}" for each in found.tables if each.parked]
    return [
        *missing,
        *parked,
        *(
            f"table {table} is still being synchronized"
            for table, state in known.items()
            if state not in {TableState.READY, TableState.SYNCDONE, TableState.PARKED}
        ),
    ]


async def _compared(source: Place, destination: Place, tables: Sequence[PublishedTable], *, back: bool) -> list[tuple[str, str]]:
    described = []
    for place in (source, destination):
        named = {(each.publisher_name if place is source else each.name).pair: each.name.pair for each in tables}
        names = ", ".join(f"({quote_literal(namespace)}, {quote_literal(name)})" for namespace, name in named)
        async with await Session.connect(place.conninfo, application_name="subscriber cutover") as session:
            rows = await session.execute(_DESCRIBE.format(names=names)) if names else []
        described.append(
            {named[row[0] or "", row[1] or ""]: (json.loads(row[2] or "{}"), row[3] == "t", json.loads(row[4] or "[]")) for row in rows}
        )
    problems = []
    for key, (columns, identity, off) in described[1].items():
        table = f"{key[0]}.{key[1]}"
        before = described[0].get(key)
        if off and (before is None or off != before[2]):
            hint = f"enable or validate it there, or do the same in {source.title}"
            problems.append((f"table {table} of {destination.title}: {', '.join(off)}", hint))
        if not back:
            continue
        if not identity:
            hint = "give it a primary key there (not DEFERRABLE), use ALTER TABLE … REPLICA IDENTITY FULL, or use --no-way-back"
            problems.append((f"table {table} of {destination.title} has no key: the way back cannot replicate updates and deletes", hint))
        if before is None:
            problems.append((f"table {table} does not exist in {source.title}", "use --no-way-back"))
            continue
        for column, kind in columns.items():
            other = before[0].get(column)
            if other is None:
                problems.append((f"{source.title} has no column {column} of table {table}", "drop it, add it there, or use --no-way-back"))
            elif other != kind:
                problems.append(
                    (
                        f"column {column} of table {table} is {kind} in {destination.title}, and {other} in {source.title}:"
                        " the way back may not be able to store new values",
                        "make the types equal, or use --no-way-back",
                    )
                )
    return problems


async def _way_back(source: Place, destination: Place, tables: Sequence[PublishedTable], name: str) -> list[tuple[str, str]]:
    """What keeps the destination from being a publisher, and the source from being a target."""
    async with await Session.connect(destination.conninfo, application_name="subscriber cutover") as session:
        settings = await decoding_problems(session, f"in {destination.title}")
        ((free, may, exists, slot),) = await session.execute(
            "SELECT pg_catalog.current_setting('max_replication_slots')::int"  # noqa: S608
            " - (SELECT count(*) FROM pg_catalog.pg_replication_slots), rolreplication OR rolsuper,"
            f" EXISTS (SELECT FROM pg_catalog.pg_publication WHERE pubname = {quote_literal(name)}),"
            f" EXISTS (SELECT FROM pg_catalog.pg_replication_slots WHERE slot_name = {quote_literal(name)})"
            " FROM pg_catalog.pg_roles WHERE rolname = current_user"
        )
    problems = [(message, f"{hint}; or use --no-way-back") for message, hint in settings]
    if int(free or 0) < 1:
        problems.append((f"{destination.title} has no free replication slot", "increase max_replication_slots, or use --no-way-back"))
    if may != "t":
        problems.append((f"the role may not replicate from {destination.title}", "ALTER ROLE … REPLICATION there, or use --no-way-back"))
    if exists == "t":
        problems.append((f'publication "{name}" already exists in {destination.title}', "drop it: the way back needs this name"))
    if slot == "t":
        problems.append((f'replication slot "{name}" already exists in {destination.title}', "drop it: the way back needs this name"))
    sink = open_target(source.conninfo, SubscriptionOptions(copy_data=False), Settings())
    if await sink.exists(name):
        problems.append((f'subscription "{name}" already exists in {source.title}', "drop it: the way back needs this name"))
    return problems + [
        (f"the way back cannot use {source.title}: {finding.message}", f"{finding.hint}; or use --no-way-back")
        for finding in await sink.check(tables, two_phase=False)
        if finding.severity == "error"
    ]
