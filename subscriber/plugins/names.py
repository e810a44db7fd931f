"""Names as PostgreSQL prints them: ``quote_identifier`` and ``format_type_be``.

A session with an empty ``search_path`` qualifies every name outside ``pg_catalog``. So does this module.
Source: ruleutils.c (quote_identifier), format_type.c, ``pg_get_keywords()`` of 13 to 18.
"""

from __future__ import annotations

import re
from typing import Final

from subscriber.errors import PublisherError
from subscriber.protocol.capabilities import Capabilities
from subscriber.types import TypeRegistry
from subscriber.types.builtin import SQL_NAMES
from subscriber.types.pg_type import TypeKind
from subscriber.types.registry import PgType

__all__ = ["format_type", "format_type_with_typemod", "quote_identifier", "quote_qualified_identifier"]

_SAFE: Final = re.compile(r"[a-z_][a-z0-9_]*", re.ASCII)
_CATALOG: Final = "pg_catalog"

_KEYWORDS: Final = frozenset(
    """
    all analyse analyze and any array as asc asymmetric authorization between bigint binary bit boolean both case cast char character check
    coalesce collate collation column concurrently constraint create cross current_catalog current_date current_role current_schema
    current_time current_timestamp current_user dec decimal default deferrable desc distinct do else end except exists extract false fetch
    float for foreign freeze from full grant greatest group grouping having ilike in initially inner inout int integer intersect interval
    into is isnull join lateral leading least left like limit localtime localtimestamp national natural nchar none normalize not notnull
    null nullif numeric offset on only or order out outer overlaps overlay placing position precision primary real references returning
    right row select session_user setof similar smallint some substring symmetric table tablesample then time timestamp to trailing treat
    trim true union unique user using values varchar variadic verbose when where window with xmlattributes xmlconcat xmlelement xmlexists
    xmlforest xmlnamespaces xmlparse xmlpi xmlroot xmlserialize xmltable
    """.split()  # noqa: SIM905 -- shorter
)
"""Keywords that are quoted: all but the unreserved ones."""
_KEYWORDS_16: Final = frozenset({"json_array", "json_arrayagg", "json_object", "json_objectagg", "system_user"})
_KEYWORDS_17: Final = frozenset(
    {"json", "json_exists", "json_query", "json_scalar", "json_serialize", "json_table", "json_value", "merge_action"}
)

_SQL_NAMES: Final = SQL_NAMES | {name: name for name in ("bit", "interval", "json", "numeric")}


def quote_identifier(name: str, publisher: Capabilities) -> str:
    """Quote a name if it must be quoted. Keywords depend on the publisher's version."""
    if _SAFE.fullmatch(name):
        quoted = name in _KEYWORDS
        quoted = quoted or (name in _KEYWORDS_16 and publisher.at_least(16)) or (name in _KEYWORDS_17 and publisher.at_least(17))
        if not quoted:
            return name
    return '"' + name.replace('"', '""') + '"'


def quote_qualified_identifier(namespace: str, name: str, publisher: Capabilities) -> str:
    """Quote a qualified name."""
    return f"{quote_identifier(namespace, publisher)}.{quote_identifier(name, publisher)}"


def format_type(oid: int, types: TypeRegistry, publisher: Capabilities) -> str:
    """The name of a type, as ``format_type_be`` prints it.

    Raises:
        PublisherError: pgoutput and the publisher's catalog do not tell the name.
    """
    return _format(types.resolve(oid), oid, publisher)


def _format(found: PgType, oid: int, publisher: Capabilities) -> str:
    # a Type message names the base type of a domain, and an array by its internal name: only the catalog tells the name to print
    if not found.known or (found.domain is not None and found.domain[0] == _CATALOG):
        raise PublisherError(
            f"the name of the type with OID {oid} is not known: pgoutput does not tell it, and the publisher's catalog does not have it",
            hint="the type was dropped; drop the slot and begin again, or use a plugin that needs no names of types",
        )
    if found.domain is not None:
        return quote_qualified_identifier(*found.domain, publisher)
    if found.kind is TypeKind.ARRAY and found.element is not None:
        return _format(found.element, found.element.oid, publisher) + "[]"
    if found.namespace != _CATALOG:
        return quote_qualified_identifier(found.namespace, found.name, publisher)
    return _SQL_NAMES.get(found.name) or quote_identifier(found.name, publisher)


def format_type_with_typemod(oid: int, modifier: int, types: TypeRegistry, publisher: Capabilities) -> str:
    """The name of a column's type with its modifier, as the SQL function ``format_type`` prints it.

    Raises:
        PublisherError: as :func:`format_type`; or only the type's own function can print its modifier.
    """
    return _with_typemod(types.resolve(oid, modifier), oid, publisher)


def _with_typemod(found: PgType, oid: int, publisher: Capabilities) -> str:
    if found.domain is None and found.kind is TypeKind.ARRAY and found.element is not None:
        return _with_typemod(found.element, found.element.oid, publisher) + "[]"
    modifier, builtin = found.modifier, found.builtin
    if found.domain is not None or modifier < 0:
        # without a modifier, these two are not the SQL types, which have a length of one
        return {"bpchar": "bpchar", "bit": '"bit"'}.get(builtin or "" if found.domain is None else "") or _format(found, oid, publisher)
    name = _format(found, oid, publisher)
    if (parts := found.precision_and_scale) is not None:
        return f"{name}({parts[0]},{parts[1]})"
    if found.length is not None:
        return f"{name}({found.length})"
    if builtin in {"time", "timetz", "timestamp", "timestamptz"}:
        first, _, rest = name.partition(" ")
        return f"{first}({modifier}) {rest}"
    if builtin == "interval":
        return name + _interval_modifier(modifier)
    raise PublisherError(
        f"the modifier of a column of type {name} is not known: only the type's own function can print it",
        hint="use a plugin that prints no modifiers",
    )


_INTERVAL_BITS: Final = {"year": 1 << 2, "month": 1 << 1, "day": 1 << 3, "hour": 1 << 10, "minute": 1 << 11, "second": 1 << 12}
_INTERVAL_FULL: Final = 0x7FFF
_INTERVAL_PRECISION: Final = 0xFFFF


def _interval_modifier(modifier: int) -> str:
    fields, precision = modifier >> 16 & _INTERVAL_FULL, modifier & _INTERVAL_PRECISION
    named = [] if fields == _INTERVAL_FULL else [name for name, bit in _INTERVAL_BITS.items() if fields & bit]
    text = f" {named[0]}" if named else ""
    if len(named) > 1:
        text += f" to {named[-1]}"
    return text if precision == _INTERVAL_PRECISION else f"{text}({precision})"
