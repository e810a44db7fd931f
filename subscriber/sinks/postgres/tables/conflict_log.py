"""The table of a PostgreSQL target in which conflicts are logged (:mod:`subscriber.sinks.conflict_log`).

Its rows are written by the session's own role, right before the end of the transaction.
"""

# the name is quoted, values are parameters
# ruff: noqa: S608

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from subscriber.errors import ConfigurationError, TargetError
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.sinks.conflict_log import COLUMNS, LoggedConflict, Retention, other_columns
from subscriber.sinks.postgres.session.origins import Run
from subscriber.sinks.postgres.session.pipeline import Pipeline
from subscriber.sinks.postgres.session.statement import Statement
from subscriber.sinks.postgres.tables.relation_mapping import qualified_name

__all__ = ["ConflictLog"]

_TYPES: Final = {
    "logged_at": "timestamp with time zone",
    "applied": "boolean",
    "xid": "bigint",
    "lsn": "pg_lsn",
    "commit_time": "timestamp with time zone",
    "key": "jsonb",
    "local_row": "jsonb",
    "remote_row": "jsonb",
}
_COLUMNS: Final = {name: _TYPES.get(name, "text") for name in COLUMNS}
_TEXT: Final = 25
_TIME: Final = "'2000-01-01 00:00:00+00'::pg_catalog.timestamptz + $9::pg_catalog.int8 * '1 microsecond'::pg_catalog.interval"

_FOUND: Final = """
SELECT a.attname::text, pg_catalog.format_type(a.atttypid, a.atttypmod), a.attnotnull AND NOT a.atthasdef,
       pg_catalog.has_table_privilege(c.oid, 'INSERT') AND pg_catalog.has_table_privilege(c.oid, 'SELECT')
       AND pg_catalog.has_table_privilege(c.oid, 'DELETE'), current_user::text
FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
LEFT JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE n.nspname = {} AND c.relname = {}
"""
_SCHEMA: Final = """
SELECT pg_catalog.has_schema_privilege(n.oid, 'CREATE'), current_user::text FROM pg_catalog.pg_namespace AS n WHERE n.nspname = {}
"""


class ConflictLog:
    """The table.

    Args:
        table: its name.
        rows: whether it also gets the rows.
        retention: how long its rows are kept, in seconds; 0: for ever.

    Attributes:
        subscription: the name of the subscription.
    """

    def __init__(self, table: TableName, *, rows: bool, retention: float) -> None:
        self._table = table
        self.rows = rows
        self._retention = Retention(retention)
        self.subscription = ""
        name = qualified_name(table)
        columns = ", ".join(list(_COLUMNS)[1:])
        values = f"$1, $2, $3, $4, $5, $6::pg_catalog.bool, $7::pg_catalog.int8, $8::pg_catalog.pg_lsn, {_TIME}"
        rows_given = "$10::pg_catalog.jsonb, $11::pg_catalog.jsonb, $12::pg_catalog.jsonb"
        insert = f"INSERT INTO {name} ({columns}) VALUES ({values}, {rows_given})"
        self._insert = Statement(insert.encode("utf-8", "surrogateescape"), (_TEXT,) * 12, reused=True)
        old = "subscription = $1 AND logged_at < pg_catalog.now() - $2::pg_catalog.float8 * '1 second'::pg_catalog.interval"
        some = f"SELECT ctid FROM {name} WHERE {old} ORDER BY logged_at LIMIT $3::pg_catalog.int8"
        remove = f"DELETE FROM {name} WHERE ctid = ANY (ARRAY({some})) AND {old}"
        self._remove = Statement(remove.encode("utf-8", "surrogateescape"), (_TEXT,) * 3)

    @property
    def _creates(self) -> tuple[str, ...]:
        name = qualified_name(self._table)
        columns = ", ".join(f"{column} {kind}" for column, kind in list(_COLUMNS.items())[1:])
        return (
            f"CREATE TABLE {name} (logged_at {_COLUMNS['logged_at']} NOT NULL DEFAULT now(), {columns})",
            f"CREATE INDEX ON {name} (subscription, logged_at)",
            # without it, old rows cannot be deleted if the table is published
            f"ALTER TABLE {name} REPLICA IDENTITY FULL",
        )

    async def refused(self, run: Run) -> ConfigurationError | None:
        """Return why the table cannot be used or created, or None.

        Raises:
            TargetError: or a subclass.
        """
        schema, name = self._table.namespace, self._table.name
        found = await run(_FOUND.format(quote_literal(schema), quote_literal(name)))
        if not found:
            return await self._refused_schema(run)
        known = {column: kind for column, kind, *_ in found}
        wrong = [column for column, kind in _COLUMNS.items() if known.get(column) != kind]
        wrong += [str(column) for column, _, needed, *_ in found if needed and column not in _COLUMNS]
        if wrong:
            moved = quote_identifier(f"{name}_other")
            return other_columns(str(self._table), wrong, f"ALTER TABLE {qualified_name(self._table)} RENAME TO {moved}")
        if not found[0][3]:
            role = quote_identifier(found[0][4])
            return ConfigurationError(
                f'role "{found[0][4]}" may not write table "{self._table}" of the target, the log of conflicts',
                hint=f"GRANT SELECT, INSERT, DELETE ON {qualified_name(self._table)} TO {role}",
            )
        return None

    async def _refused_schema(self, run: Run) -> ConfigurationError | None:
        found = await run(_SCHEMA.format(quote_literal(self._table.namespace)))
        schema = quote_identifier(self._table.namespace)
        if not found:
            return ConfigurationError(
                f'schema "{self._table.namespace}" of the target, for the log of conflicts, does not exist', hint=f"CREATE SCHEMA {schema}"
            )
        if not found[0][0]:
            return ConfigurationError(
                f'role "{found[0][1]}" may not create table "{self._table}" of the target, the log of conflicts',
                hint=f"GRANT CREATE ON SCHEMA {schema} TO {quote_identifier(found[0][1])}, or {'; '.join(self._creates)}",
            )
        return None

    async def open(self, run: Run, subscription: str) -> None:
        """Create the table if it does not exist.

        Raises:
            ConfigurationError: it cannot be used or created.
            TargetError: or another subclass.
        """
        self.subscription = subscription
        if (refused := await self.refused(run)) is not None:
            raise refused
        schema, name = self._table.namespace, self._table.name
        if not await run(_FOUND.format(quote_literal(schema), quote_literal(name))):
            try:
                for statement in self._creates:
                    await run(statement)
            except TargetError as error:
                # another subscription creates it too
                if error.sqlstate not in {"42P07", "23505"}:
                    raise

    def send(
        self,
        pipeline: Pipeline,
        conflicts: Sequence[LoggedConflict],
        lsn: Lsn | None = None,
        commit_time: int | None = None,
        *,
        prepared: bool = False,
    ) -> None:
        """Write conflicts in the open transaction, and remove some old rows.

        Args:
            pipeline: the pipeline to send through.
            conflicts: the conflicts.
            lsn: the final LSN of a transaction whose changes were made before its end.
            commit_time: its commit time.
            prepared: whether it will be prepared. It removes nothing: until it ends, another transaction that removes the same rows would
                wait for it, and its end comes only after that one.
        """
        if not prepared and (most := self._retention.most(len(conflicts))):
            values = (self.subscription, str(self._retention.seconds), str(most))
            pipeline.send(self._remove, None, [value.encode() for value in values])
        for each in conflicts:
            pipeline.send(self._insert, None, self._values(each, lsn, commit_time))

    def _values(self, each: LoggedConflict, lsn: Lsn | None, commit_time: int | None) -> Sequence[bytes | None]:
        final, time = each.lsn or lsn, each.commit_time if each.commit_time is not None else commit_time
        texts = (
            self.subscription,
            None if each.table is None else each.table.namespace,
            None if each.table is None else each.table.name,
            each.conflict,
            each.rule,
            str(each.applied),
            str(each.xid),
            None if final is None else str(final),
            None if time is None else str(time),
        )
        found = [None if text is None else text.encode("utf-8", "surrogateescape") for text in texts]
        return [*found, each.key, each.local_row, each.remote_row]
