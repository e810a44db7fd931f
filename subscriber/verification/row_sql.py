"""SQL that gives checksums of rows in PostgreSQL. Both sides get the same number for the same row.

The hash of a row has 64 bits. It is chained: each column is hashed with the hash of the columns before it as the seed. Two hashes exist:

*Fast.* Integers, UUIDs and texts are hashed by PostgreSQL's own functions for hash partitioning, which therefore never change.
``hashint8extended`` folds its value to 32 bits, so the upper half is hashed separately. Timestamps are hashed as the text of their binary
form, because their own hash folds them, too. Every other type is hashed as its text: the hash of ``numeric`` ignores the sign.

*Text.* The first half of the MD5 of the columns' texts in UTF-8, with separators. It is used if the server encodings differ, or if the
other side is not PostgreSQL and its rows are hashed by this program (:mod:`subscriber.verification.client_table`).

A range of rows has a count and the sum of its hashes. The sum does not depend on the order, and duplicates change it. NULL and an empty
text have different hashes: NULL changes the seed.

The text of a value is the same in PostgreSQL 13 to 18 under the settings that
every session gets (:mod:`subscriber.protocol.session_settings`). If the types of both sides differ, numbers are compared
without trailing zeros, and ``character(n)`` without trailing blanks. JSON, dates and times, and floats are compared as the type in which
the target stores them (:func:`stored_sql`), unless it loses a part of the value.
"""

# ruff: noqa: S608

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from subscriber.interfaces import Condition, TableName
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.verification.parts import NULL_BUCKET, Buckets, HashBuckets
from subscriber.verification.values import array_literal

__all__ = ["ColumnSql", "TableSql", "client_column_sql", "column_sql", "stored_sql"]

_SHORT_INTEGERS: Final = frozenset({"int2", "int4"})
_INTEGERS: Final = _SHORT_INTEGERS | {"int8"}
_NUMBERS: Final = frozenset({"int2", "int4", "int8", "numeric"})
_TEXTS: Final = frozenset({"text", "varchar"})
_LONG: Final = 2**63
_ARGUMENTS: Final = 90
"""A function of PostgreSQL takes at most 100 arguments."""
_NULL_SEED: Final = 7046029254386353131


@dataclass(frozen=True, slots=True)
class ColumnSql:
    """One column.

    Attributes:
        name: its name.
        text: SQL of the value that is hashed, or of its text.
        function: hashes the value: ``int4``, ``int8``, ``uuid``, ``timestamp``, ``timestamptz`` or ``text``.
        null: whether it may be NULL on either side.
        compared: the type of pg_catalog, quoted, as which a value of a key is compared with the column; empty: as the text of both, because
            the other side may have values that are none of this column's type, or pg_catalog does not have the type.
        instant: whether both sides hold times with zone: the text of a key has the zone then.
    """

    name: str
    text: str
    function: str = "text"
    null: bool = True
    compared: str = ""
    instant: bool = False

    @property
    def key_text(self) -> str:
        """SQL of the text that identifies the value in a key."""
        return f"{quote_identifier(self.name)}::timestamptz::text" if self.instant else f"({self.text})::text"

    @property
    def key_value(self) -> str:
        """SQL of the value that is compared with those of :meth:`TableSql.has_key`."""
        return quote_identifier(self.name) if self.compared else f"({self.text})::text"

    def may_have(self, value: str) -> bool:
        """Whether the type in which values are compared has the value with this text."""
        return self.compared != "int8" or _is_long(value)

    def hashed(self, seed: str) -> str:
        """SQL of the hash of this column with the hash of the columns before it."""
        # without the conversion to a timestamp in UTC, which has the same binary form
        value = f"{quote_identifier(self.name)}::timestamptz" if self.function == "timestamptz" else self.text
        if self.null:
            default = {"timestamp": "'epoch'", "timestamptz": "'epoch'", "uuid": f"'{'0' * 32}'", "text": "''"}.get(self.function, "0")
            seed = f"({seed} # CASE WHEN {quote_identifier(self.name)} IS NULL THEN {_NULL_SEED} ELSE 0 END)"
            value = f"COALESCE({value}, {default})"
        match self.function:
            case "int4":
                return f"hashint4extended({value}, {seed})"
            case "int8":
                return f"hashint8extended({value}, hashint4extended(({value} >> 32)::int4, {seed}))"
            case "timestamp" | "timestamptz":
                return f"""hashtextextended(encode({self.function}_send({value}), 'hex') COLLATE "C", {seed})"""
            case "uuid":
                return f"uuid_hash_extended({value}, {seed})"
            case _:
                return f'hashtextextended({value} COLLATE "C", {seed})'


def _is_long(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdecimal() and str(int(digits)) == digits and -_LONG <= int(text) < _LONG


def column_sql(name: str, own: str, other: str, *, null: bool, same_modifier: bool) -> ColumnSql:
    """Return how a column is hashed on one side.

    Args:
        name: of the column.
        own: its base type on this side, as ``pg_type.typname``; not the domain.
        other: on the other side.
        null: whether it may be NULL on either side.
        same_modifier: whether both have the same type modifier.
    """
    found = _column_sql(name, own, other, null=null, same_modifier=same_modifier)
    # of other schemas, no search_path has the operators, and an enum may lack a label of the other side.
    # A text may have trailing blanks, which the text of bpchar on the other side lacks
    exact = (own == other and "." not in own) or (own in _TEXTS and other != "bpchar")
    return replace(found, compared=_compared(own, exact=exact))


def _compared(base: str, *, exact: bool) -> str:
    return "int8" if base in _INTEGERS else quote_identifier(base) if exact else ""


def _column_sql(name: str, own: str, other: str, *, null: bool, same_modifier: bool) -> ColumnSql:
    quoted = quote_identifier(name)
    if own in _SHORT_INTEGERS and other in _SHORT_INTEGERS:
        return ColumnSql(name, f"{quoted}::int4", "int4", null)
    if own in _INTEGERS and other in _INTEGERS:
        return ColumnSql(name, f"{quoted}::int8", "int8", null)
    if own in _NUMBERS and other in _NUMBERS and (own != other or not same_modifier):
        return ColumnSql(name, f"trim_scale({quoted}::numeric)::text", null=null)
    if own == other == "uuid":
        return ColumnSql(name, f"{quoted}::uuid", "uuid", null)
    if own == other == "timestamp":
        return ColumnSql(name, f"{quoted}::timestamp", "timestamp", null)
    if own == other == "timestamptz":
        return ColumnSql(name, f"({quoted} AT TIME ZONE 'UTC')", "timestamptz", null, instant=True)
    if own != other and "bpchar" in {own, other}:
        return ColumnSql(name, f"rtrim({quoted}::text, ' ')", null=null)
    return ColumnSql(name, f"{quoted}::text", null=null)


def stored_sql(name: str, own: str, stored: str, *, null: bool, time_zone: str) -> tuple[ColumnSql, ColumnSql] | None:
    """Return how a column is hashed on the publisher and in the target, if the target stores the same value in another type.

    Args:
        name: of the column.
        own: its base type on the publisher.
        stored: its base type in the target.
        null: whether it may be NULL on either side.
        time_zone: in which the target reads a time without zone.
    """
    quoted = quote_identifier(name)
    if {own, stored} == {"json", "jsonb"}:
        column = ColumnSql(name, f"({quoted}::jsonb)::text", null=null)
        return column, column
    if (own, stored) == ("float4", "float8"):
        # from the text: the cast of the number gives other digits
        return (
            ColumnSql(name, f"({quoted}::text::float8)::text", null=null),
            ColumnSql(name, f"{quoted}::text", null=null),
        )
    instant = f"({quoted} AT TIME ZONE 'UTC')"
    local = f"(({quoted}::timestamp AT TIME ZONE {quote_literal(time_zone)}) AT TIME ZONE 'UTC')"
    texts = {
        ("timestamp", "timestamptz"): (local, instant),
        ("date", "timestamptz"): (local, instant),
        ("timestamptz", "timestamp"): (instant, f"{quoted}::timestamp"),
        ("date", "timestamp"): (f"{quoted}::timestamp", f"{quoted}::timestamp"),
    }.get((own, stored))
    return texts and (ColumnSql(name, texts[0], "timestamp", null), ColumnSql(name, texts[1], "timestamp", null))


def client_column_sql(name: str, base: str) -> ColumnSql:
    """Return the text of a column that :mod:`subscriber.verification.client_table` gives for the same value of another database.

    Args:
        name: of the column.
        base: its base type, as ``pg_type.typname``.
    """
    return replace(_client_column_sql(name, base), compared=_compared(base, exact=base in _TEXTS | {"bpchar"}))


def _client_column_sql(name: str, base: str) -> ColumnSql:
    quoted = quote_identifier(name)
    match base:
        case "float4" | "float8":
            # some databases do not keep the sign of a zero
            return ColumnSql(name, f"encode({base}send(({quoted} + 0)::{base}), 'hex')")
        case "numeric":
            return ColumnSql(name, f"trim_scale({quoted})::text")
        case "text" | "varchar" | "bpchar" | "int2" | "int4" | "int8" | "uuid":
            # the cast of bpchar removes trailing blanks
            return ColumnSql(name, f"{quoted}::text")
        case _:
            # the output function; a cast to text is another one for some types. A composite value with a NULL in it is not NULL
            return ColumnSql(name, f"CASE WHEN {quoted} IS DISTINCT FROM NULL THEN concat({quoted}) END")


@dataclass(frozen=True, slots=True)
class TableSql:
    """One table on one side.

    Attributes:
        table: its name.
        only: without its children.
        columns: the columns to compare, in the same order on both sides.
        key: the columns that identify a row.
        filters: row filters, of which one must be true; empty: all rows.
        fast: which hash to use.
        renamed: the name of each column in the table, if some have other names here; else empty. Filters have the names of the table.
    """

    table: TableName
    only: bool
    columns: tuple[ColumnSql, ...]
    key: tuple[str, ...]
    filters: tuple[str, ...] = ()
    fast: bool = True
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def relation(self) -> str:
        """The table for FROM."""
        relation = f"{'ONLY ' if self.only else ''}{self.table.quoted}"
        if not self.renamed:
            return relation
        # the planner sees through it
        named = ", ".join(f"{quote_identifier(own)} AS {quote_identifier(name)}" for name, own in self.renamed.items())
        return f"(SELECT {named}, ctid, xmin, tableoid FROM {relation}{self._where(self.filters)}) AS named"

    @property
    def row_hash(self) -> str:
        """SQL of the hash of a row."""
        return self._hash(self.columns)

    @property
    def key_hash(self) -> str:
        """SQL of the hash of a row's key."""
        return self._hash([column for column in self.columns if column.name in self.key])

    def _hash(self, columns: Sequence[ColumnSql]) -> str:
        if self.fast:
            seed = "0"
            for column in columns:
                seed = column.hashed(seed)
            return seed if columns else "0::int8"
        # chr(1) and chr(2) occur in no text that a person or a type's output function writes
        texts = [f"COALESCE(({column.text})::text, chr(2))" for column in columns]
        joined = ", ".join(
            f"concat_ws(chr(1), {', '.join(texts[begin : begin + _ARGUMENTS])})" for begin in range(0, len(texts), _ARGUMENTS)
        )
        return f"('x' || substr(md5(convert_to(concat_ws(chr(1), {joined}), 'UTF8')), 1, 16))::bit(64)::int8"

    @property
    def integer_keys(self) -> list[bool]:
        """For each column of the key, whether it is an integer on both sides."""
        integers = {column.name for column in self.columns if column.function in _INTEGERS}
        return [name in integers for name in self.key]

    @property
    def _key_texts(self) -> list[str]:
        texts = {column.name: column.key_text for column in self.columns}
        return [texts[name] for name in self.key]

    def where(self, *conditions: str) -> str:
        """WHERE with these conditions and the row filters."""
        return self._where(() if self.renamed else self.filters, *conditions)

    def _where(self, filters: Sequence[str], *conditions: str) -> str:
        own = [" OR ".join(f"({each})" for each in filters)] if filters else []
        wanted = [f"({each})" for each in (*own, *conditions) if each]
        return f" WHERE {' AND '.join(wanted)}" if wanted else ""

    def checksum(self, condition: str) -> str:
        """Query of the count and the sum of the hashes of the rows that satisfy a condition; an empty condition: all."""
        return f"SELECT count(*)::text, COALESCE(sum({self.row_hash}), 0)::text FROM {self.relation}{self.where(condition)}"

    def span(self, column: str, condition: str) -> str:
        """Query of the least and the greatest value of a column."""
        quoted = quote_identifier(column)
        where = f" WHERE {condition}" if condition else ""
        return f"SELECT min({quoted})::text, max({quoted})::text FROM {self.relation}{where}"

    def checksums(self, condition: str, by: Buckets) -> str:
        """The same by bucket: three texts, which list the buckets, the counts and the sums."""
        lists = ", ".join(f"string_agg({name}::text, ' ')" for name in ("b", "c", "s"))
        if isinstance(by, HashBuckets):
            bucket, column = f"h & {by.mask}", ""
        else:
            bucket, column = "b", f"COALESCE({quote_identifier(by.column)}::int8 >> {by.shift}, {NULL_BUCKET}) AS b, "
        # OFFSET 0: the hash is computed once for each row, and the rows are not sorted
        rows = f"SELECT {column}{self.row_hash} AS h FROM {self.relation}{self.where(condition)} OFFSET 0"
        sums = f"SELECT {bucket} AS b, count(*) AS c, sum(h) AS s FROM ({rows}) AS hashed GROUP BY 1"
        return f"SELECT {lists} FROM ({sums}) AS summed"

    def hashes(self, condition: str, by: Buckets, buckets: Sequence[int]) -> str:
        """Query of the hash and the key of each row in some buckets of :meth:`checksums`: one text (:func:`row_name` for each row)."""
        names = f"string_agg(concat_ws(':', {', '.join(['h', *(f'k{number}' for number in range(len(self.key)))])}), ' ')"
        keys = zip(self._key_texts, self.integer_keys, strict=True)
        pieces = [text if plain else f"encode(textsend({text}), 'hex')" for text, plain in keys]
        selected = "".join(f", COALESCE({piece}, '-') AS k{number}" for number, piece in enumerate(pieces))
        row = f"{self.row_hash} AS h{selected}"
        if isinstance(by, HashBuckets):
            # an array of the hash's type is searched by a hash table
            wanted = f"(h & {by.mask}) = ANY ('{{{','.join(map(str, buckets))}}}'::int8[])"
            return f"SELECT {names} FROM (SELECT {row} FROM {self.relation}{self.where(condition)} OFFSET 0) AS hashed WHERE {wanted}"
        column, some = quote_identifier(by.column), [bucket for bucket in buckets if bucket != NULL_BUCKET]
        # no name of ours may be the one of a column
        given = f"unnest('{{{','.join(str(bucket << by.shift) for bucket in some)}}}'::int8[]) AS subscriber_given(subscriber_low)"
        within = f"{column} >= subscriber_low AND {column} <= subscriber_low + {(1 << by.shift) - 1}"
        # not JOIN: it hides system columns, which a condition may have
        selects = [f"SELECT {row} FROM {given}, {self.relation}{self.where(within, condition)}"] if some else []
        if len(some) < len(buckets):
            selects.append(f"SELECT {row} FROM {self.relation}{self.where(condition, f'{column} IS NULL')}")
        return f"SELECT {names} FROM ({' UNION ALL '.join(selects)}) AS hashed"

    def key_summary(self, xmin: int) -> str:
        """Query of the numbers by which a table is compared with what it was at a snapshot's ``xmin``.

        These are: the rows, the sum of the hashes of their keys, the newer rows, and what lets rows have other values without having been
        written: columns that were added or altered, and old rows in a table that was renamed, attached or otherwise altered.
        """
        namespace, name = quote_literal(self.table.namespace), quote_literal(self.table.name)
        return (
            f"SELECT count(*)::text, COALESCE(sum({self.key_hash}), 0)::text, count(*) FILTER (WHERE {_newer(xmin)})::text,"
            " (SELECT count(*)::text FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid JOIN pg_namespace AS n"
            f" ON n.oid = c.relnamespace WHERE n.nspname = {namespace} AND c.relname = {name} AND a.attnum > 0"
            f" AND {_newer(xmin, 'a.xmin')}), count(*) FILTER (WHERE NOT ({_newer(xmin)})"
            f" AND tableoid IN (SELECT c.oid FROM pg_class AS c WHERE {_newer(xmin, 'c.xmin')}))::text"
            f" FROM {self.relation}{self.where()}"
        )

    def newer_hashes(self, xmin: int) -> str:
        """Query of the hash and the key of each row that is newer."""
        return f"SELECT {', '.join([f'({self.row_hash})::text', *self._key_texts])} FROM {self.relation}{self.where(_newer(xmin))}"

    def hashes_of(self, condition: str) -> str:
        """Query of the hash and the key of the rows that satisfy a condition."""
        return f"SELECT {', '.join([f'({self.row_hash})::text', *self._key_texts])} FROM {self.relation}{self.where(condition)}"

    def has_key(self, keys: Sequence[Sequence[str]]) -> Condition:
        """Whether a row has one of these keys. A value may be one that only the other side's type has."""
        by_name = {column.name: column for column in self.columns}
        columns = [by_name[name] for name in self.key]
        possible = [key for key in keys if all(map(ColumnSql.may_have, columns, key))]
        own = ", ".join(column.key_value for column in columns)
        names = [f"v{number}" for number in range(len(columns))]
        wanted = ", ".join(f"{name}::pg_catalog.{column.compared or 'text'}" for name, column in zip(names, columns, strict=True))
        # an array for each column
        pieces = [f"({own}) IN (SELECT {wanted} FROM ROWS FROM (pg_catalog.unnest("]
        pieces += ["::pg_catalog.text[]), pg_catalog.unnest("] * (len(columns) - 1)
        pieces.append(f"::pg_catalog.text[])) AS wanted ({', '.join(names)}))")
        return Condition(tuple(pieces), tuple(map(array_literal, zip(*possible, strict=True))) or ("{}",) * len(columns))

    def cells(self, condition: str, *, values: bool) -> str:
        """Query of the rows that satisfy a condition: the key, and of each column a digest or, with ``values``, the beginning of its text.

        A digest is that of the text: a column that has it in common on both sides is equal.
        """
        digests = [f"md5(convert_to(({column.text})::text, 'UTF8'))" for column in self.columns]
        shown = [f"left({quote_identifier(column.name)}::text, 200)" for column in self.columns] if values else []
        return f"SELECT {', '.join([*self._key_texts, *digests, *shown])} FROM {self.relation}{self.where(condition)}"

    def sample_values(self, condition: str, hashes: Sequence[int]) -> str:
        """Query of the beginning of the texts of rows with these hashes, for a table without a key."""
        shown = ", ".join(f"left({quote_identifier(column.name)}::text, 200)" for column in self.columns)
        wanted = ", ".join(map(str, hashes))
        return f"SELECT ({self.row_hash})::text, {shown} FROM {self.relation}{self.where(condition, f'{self.row_hash} IN ({wanted})')}"


def _newer(xmin: int, column: str = "xmin") -> str:
    """Condition of row versions written by a transaction that is not below this id."""
    return f"age({column}) <= age('{xmin % 2**32}'::xid)"
