"""``wal2json``: the output of that plugin, formats 1 and 2.

Its options: ``format-version`` (1), ``include-xids``, ``include-timestamp``, ``include-lsn`` (format 1 only), ``include-schemas`` (on),
``include-types`` (on), ``include-typmod`` (on), ``include-type-oids``, ``include-domain-data-type``, ``include-transaction`` (on),
``numeric-data-types-as-string``, ``pretty-print``, ``write-in-chunks``, ``actions``, ``filter-tables``, ``add-tables``,
``filter-msg-prefixes``, ``add-msg-prefixes``.

Its other options are errors, because pgoutput does not tell what they print: ``include-column-positions``, ``include-default``,
``include-not-null``, ``include-origin``, ``include-pk``, ``filter-origins``. Empty transactions are left out if pgoutput does not send
them (15 and later).

Source: the README and wal2json.c.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from subscriber.errors import ConfigurationError
from subscriber.plugins.context import LogicalDecodingContext, OutputPluginOptions, OutputType, ReorderBufferTXN
from subscriber.plugins.names import format_type_with_typemod
from subscriber.plugins.option_values import boolean
from subscriber.plugins.test_decoding import timestamp
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Column, Relation
from subscriber.transaction.changes import UNCHANGED, Change, Row, TruncateChange, UpdateChange, Value

__all__ = ["Wal2Json"]

_FLAGS: Final = {
    "include-xids": False,
    "include-timestamp": False,
    "include-lsn": False,
    "include-schemas": True,
    "include-types": True,
    "include-typmod": True,
    "include-type-oids": False,
    "include-domain-data-type": False,
    "include-transaction": True,
    "numeric-data-types-as-string": False,
    "pretty-print": False,
    "write-in-chunks": False,
}
_LISTS: Final = ("actions", "filter-msg-prefixes", "add-msg-prefixes")
_TABLES: Final = ("filter-tables", "add-tables")
_OMITTED: Final = {
    "include-column-positions": "the positions of columns",
    "include-default": "the defaults of columns",
    "include-not-null": "which columns are NOT NULL",
    "include-origin": "the number of an origin, only its name",
    "include-pk": "the primary key, only the replica identity",
    "filter-origins": "the number of an origin, only its name",
}
_ACTIONS: Final = {"insert": "I", "update": "U", "delete": "D", "truncate": "T"}

_NUMBERS: Final = frozenset({20, 21, 23, 26, 700, 701, 1700})
_TABLE: Final = re.compile(r"((?:\\.|[^\\.])*)\.((?:\\.|[^\\])*)", re.DOTALL)
_LISTED_TABLE: Final = re.compile(r"\s*((?:\\.|[^\\\s,])+)\s*(,|$)", re.DOTALL)
_NUMBER: Final = re.compile(r"[0-9+\-eE.]*")
_BOOL: Final = 16
_BYTEA: Final = 17


class Wal2Json:
    """The plugin."""

    def startup(self, ctx: LogicalDecodingContext, options: OutputPluginOptions, is_init: bool) -> None:
        """Read the options."""
        for name, what in _OMITTED.items():
            if name in ctx.output_plugin_options:
                hint = "use origin=none (-o) to omit changes of others" if name == "filter-origins" else f"omit {name}"
                raise ConfigurationError(f"{name}: pgoutput does not tell {what}", hint=hint)
        ctx.unknown_options(("format-version", *_FLAGS, *_LISTS, *_TABLES))
        options.output_type = OutputType.TEXTUAL
        options.complete_relations = True
        self._on = {name: boolean(ctx, name, default=default) for name, default in _FLAGS.items()}
        version = ctx.output_plugin_options.get("format-version") or "1"
        if version not in {"1", "2"}:
            raise ConfigurationError(f"client sent format_version={version}, but there are formats 1 and 2 only", hint="give 1 or 2")
        self._first = version == "1"
        if self._on["include-lsn"] and not self._first:
            raise ConfigurationError("include-lsn: pgoutput does not tell the LSNs of changes", hint="omit include-lsn, or use format 1")
        lists = {name: _names(ctx.output_plugin_options.get(name)) for name in _LISTS}
        self._actions = set(_ACTIONS) if lists["actions"] is None else set(lists["actions"])
        if unknown := self._actions - set(_ACTIONS):
            raise ConfigurationError(
                f'could not parse value "{", ".join(sorted(unknown))}" for parameter "actions"', hint=f"actions: {', '.join(_ACTIONS)}"
            )
        self._without, self._only = set(lists["filter-msg-prefixes"] or ()), set(lists["add-msg-prefixes"] or ())
        self._left_out, self._added = (_tables(name, ctx.output_plugin_options) for name in _TABLES)
        self._chunks = self._on["write-in-chunks"]
        self._tab, self._line, self._space = ("\t", "\n", " ") if self._on["pretty-print"] else ("", "", "")
        self._buffer: list[str] = []
        self._changes = 0

    # --- transactions

    def begin(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN) -> None:
        """The beginning of the object, or the object B."""
        if not self._first:
            if self._on["include-transaction"]:
                ctx.emit('{"action":"B"', self._metadata(txn), "}")
            return
        self._changes = 0
        self._buffer.clear()
        parts = ["{", self._line]
        if self._on["include-xids"]:
            parts.append(self._field(1, "xid", str(txn.xid)))
        if self._on["include-lsn"]:
            if txn.end_lsn is None:
                raise ConfigurationError("include-lsn: the end of the transaction is not known yet", hint="omit include-lsn")
            parts.append(self._field(1, "nextlsn", f'"{txn.end_lsn}"'))
        if self._on["include-timestamp"]:
            parts.append(self._field(1, "timestamp", f'"{timestamp(txn.xact_time or 0)}"'))
        parts.append(f'{self._tab}"change":{self._space}[')
        self._write(ctx, parts)

    def commit(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, commit_lsn: Lsn) -> None:
        """The end of the object, or the object C."""
        if not self._first:
            if self._on["include-transaction"]:
                ctx.emit('{"action":"C"', self._metadata(txn), "}")
            return
        end = f"{self._tab}]{self._line}}}"
        if self._chunks:
            ctx.emit(end)
        else:
            ctx.emit(*self._buffer, self._line, end)

    def change(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, relation: Relation, change: Change) -> None:
        """One row."""
        if change.kind not in self._actions or not self._selects(relation):
            return
        new: Row | None = getattr(change, "new", None)
        key: Row | None = getattr(change, "key", None)
        old: Row | None = getattr(change, "old", None)
        identity = old if key is None else key
        if identity is None and isinstance(change, UpdateChange):
            identity = {column.name: change.new[column.name] for column in relation.columns if column.key}
        if self._first:
            parts = [self._field(3, "kind", f'"{change.kind}"')]
            if self._on["include-schemas"]:
                parts.append(self._field(3, "schema", _text(relation.namespace)))
            parts.append(self._field(3, "table", _text(relation.name)))
            if new is not None:
                parts += self._columns(ctx, relation, new, comma=identity is not None)
            if identity is not None:
                parts += self._oldkeys(ctx, relation, identity)
            self._object(ctx, parts)
            return
        parts = ['{"action":"', _ACTIONS[change.kind], '"', self._metadata(txn), self._table(relation)]
        if new is not None:
            parts.append(f',"columns":[{self._described(ctx, relation, new)}]')
        if identity is not None:
            parts.append(f',"identity":[{self._described(ctx, relation, identity)}]')
        ctx.emit(*parts, "}")

    def truncate(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, relations: Sequence[Relation], change: TruncateChange) -> None:
        """One object for each table. Format 1 has none."""
        if not self._first and "truncate" in self._actions:
            for relation in filter(self._selects, relations):
                ctx.emit('{"action":"T"', self._metadata(txn), self._table(relation), "}")

    def message(  # noqa: PLR0917 -- as PostgreSQL's callback
        self,
        ctx: LogicalDecodingContext,
        txn: ReorderBufferTXN | None,
        message_lsn: Lsn,
        transactional: bool,
        prefix: str,
        message: bytes,
    ) -> None:
        """A logical message, up to its first zero byte."""
        if prefix in self._without or (self._only and prefix not in self._only):
            return
        content = _text(message.partition(b"\0")[0].decode("utf-8", "surrogateescape"))
        flag = "true" if transactional else "false"
        if not self._first:
            metadata = self._metadata(txn)
            ctx.emit('{"action":"M"', metadata, f',"transactional":{flag},"prefix":{_text(prefix)},"content":{content}}}')
            return
        parts = [self._field(3, "kind", '"message"'), self._field(3, "transactional", flag), self._field(3, "prefix", _text(prefix))]
        parts.append(f'{self._tab * 3}"content":{self._space}{content}{self._line}')
        if transactional:
            self._object(ctx, parts)
        else:
            head = f'{{{self._line}{self._tab}"change":{self._space}[{self._line}{self._tab * 2}{{{self._line}'
            ctx.emit(head, *parts, f"{self._tab * 2}}}{self._line}{self._tab}]{self._line}}}")

    # --- format 1

    def _write(self, ctx: LogicalDecodingContext, parts: Sequence[str]) -> None:
        if self._chunks:
            ctx.emit(*parts)
        else:
            self._buffer += parts

    def _object(self, ctx: LogicalDecodingContext, parts: Sequence[str]) -> None:
        self._changes += 1
        comma = "," if self._changes > 1 else ""
        before = "" if self._chunks else self._line
        self._write(ctx, [before, self._tab * 2, comma, "{", self._line, *parts, self._tab * 2, "}"])

    def _field(self, depth: int, name: str, value: str, comma: str = ",") -> str:
        return f'{self._tab * depth}"{name}":{self._space}{value}{comma}{self._line}'

    def _columns(self, ctx: LogicalDecodingContext, relation: Relation, found: Row, *, comma: bool) -> list[str]:
        present = [(column, found[column.name]) for column in relation.columns if found.get(column.name, UNCHANGED) is not UNCHANGED]
        return self._arrays(ctx, 3, "column", present, "," if comma else "")

    def _oldkeys(self, ctx: LogicalDecodingContext, relation: Relation, found: Row) -> list[str]:
        present = [(column, found[column.name]) for column in relation.columns if found.get(column.name, UNCHANGED) is not UNCHANGED]
        present = [(column, value) for column, value in present if value is not None]
        head = f'{self._tab * 3}"oldkeys":{self._space}{{{self._line}'
        return [head, *self._arrays(ctx, 4, "key", present, ""), f"{self._tab * 3}}}{self._line}"]

    def _arrays(self, ctx: LogicalDecodingContext, depth: int, name: str, present: Sequence[tuple[Column, Value]], comma: str) -> list[str]:
        def array(values: Sequence[str]) -> str:
            return f"[{f',{self._space}'.join(values)}]"

        if self._on["include-types"]:
            # format 1 also treats the values as the base type's
            present = [(self._without_domain(ctx, column), value) for column, value in present]

        parts = [self._field(depth, f"{name}names", array([_text(column.name) for column, _ in present]))]
        if self._on["include-types"]:
            parts.append(self._field(depth, f"{name}types", array([self._type(ctx, column) for column, _ in present])))
        if self._on["include-type-oids"]:
            parts.append(self._field(depth, f"{name}typeoids", array([str(column.type_oid) for column, _ in present])))
        values = [self._value(column, value) for column, value in present]
        return [*parts, self._field(depth, f"{name}values", array(values), comma)]

    # --- format 2

    def _metadata(self, txn: ReorderBufferTXN | None) -> str:
        text = ""
        if self._on["include-xids"]:
            text += f',"xid":{"null" if txn is None else txn.xid}'
        if self._on["include-timestamp"]:
            text += ',"timestamp":' + ("null" if txn is None else f'"{timestamp(txn.xact_time or 0)}"')
        return text

    def _table(self, relation: Relation) -> str:
        schema = f',"schema":{_text(relation.namespace)}' if self._on["include-schemas"] else ""
        return f'{schema},"table":{_text(relation.name)}'

    def _described(self, ctx: LogicalDecodingContext, relation: Relation, found: Row) -> str:
        objects = []
        for column in relation.columns:
            value = found.get(column.name, UNCHANGED)
            if value is UNCHANGED:
                continue
            text = f'{{"name":{_text(column.name)}'
            if self._on["include-types"]:
                text += f',"type":{self._type(ctx, self._without_domain(ctx, column))}'
            if self._on["include-type-oids"]:
                text += f',"typeoid":{column.type_oid}'
            objects.append(f'{text},"value":{self._value(column, value)}}}')
        return ",".join(objects)

    # --- both

    def _selects(self, relation: Relation) -> bool:
        return not _is_listed(relation, self._left_out or ()) and (self._added is None or _is_listed(relation, self._added))

    def _without_domain(self, ctx: LogicalDecodingContext, column: Column) -> Column:
        base = ctx.types.base_of_domain(column.type_oid) if self._on["include-domain-data-type"] else None
        return column if base is None else replace(column, type_oid=base[0], type_modifier=base[1])

    def _type(self, ctx: LogicalDecodingContext, column: Column) -> str:
        if self._first and not self._on["include-typmod"]:
            found = ctx.types.resolve(column.type_oid)
            # the check that the name is known
            format_type_with_typemod(column.type_oid, -1, ctx.types, ctx.capabilities)
            return _text(found.name if found.domain is None else found.domain[1])
        name = format_type_with_typemod(column.type_oid, column.type_modifier, ctx.types, ctx.capabilities)
        # a quoted name is not quoted again
        return name if name.startswith('"') and not name.endswith("]") else _text(name)

    def _value(self, column: Column, value: Value) -> str:
        if value is None:
            return "null"
        if not isinstance(value, str):
            raise ConfigurationError("wal2json prints text, but the publisher sends binary values", hint="omit binary=true")
        if column.type_oid in _NUMBERS:
            if self._on["numeric-data-types-as-string"]:
                return _text(value)
            return value if _NUMBER.fullmatch(value) else "null"
        if column.type_oid == _BOOL:
            return "true" if value == "t" else "false"
        return _text(value[2:] if column.type_oid == _BYTEA else value)


def _text(text: str) -> str:
    """As ``escape_json``."""
    return json.dumps(text, ensure_ascii=False)


def _tables(option: str, given: Mapping[str, str | None]) -> list[tuple[str | None, str | None]] | None:
    """The tables of an option: schema and name. None stands for all."""
    if option not in given:
        return None
    text, place = (given[option] or "").strip(), 0
    found: list[tuple[str | None, str | None]] = []
    while place < len(text) or (found and text.endswith(",")):
        listed = _LISTED_TABLE.match(text, place)
        table = None if listed is None else _TABLE.fullmatch(listed[1])
        if listed is None or table is None:
            hint = "schema.table, …; * stands for all; escape a space, quote, comma, period or asterisk with a backslash"
            raise ConfigurationError(f'could not parse value "{text}" for parameter "{option}"', hint=hint)
        schema, name = (None if part == "*" else re.sub(r"\\(.)", r"\1", part, flags=re.DOTALL) for part in table.groups())
        found.append((schema, name))
        place = listed.end()
        if not listed[2]:
            break
    return found


def _is_listed(relation: Relation, tables: Sequence[tuple[str | None, str | None]]) -> bool:
    return any(schema in {None, relation.namespace} and name in {None, relation.name} for schema, name in tables)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name for part in text.split(",") if (name := part.strip())]
