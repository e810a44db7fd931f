"""The built-in types of PostgreSQL up to 18. Their oids are the same on every server. Source: ``pg_type.dat``, ``pg_range.dat``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from subscriber.types.pg_type import TypeFact, TypeKind

__all__ = ["CATALOG", "SQL_NAMES", "builtin_facts"]

CATALOG: Final = "pg_catalog"

SQL_NAMES: Final = {
    "bool": "boolean",
    "bpchar": "character",
    "float4": "real",
    "float8": "double precision",
    "int2": "smallint",
    "int4": "integer",
    "int8": "bigint",
    "time": "time without time zone",
    "timestamp": "timestamp without time zone",
    "timestamptz": "timestamp with time zone",
    "timetz": "time with time zone",
    "varbit": "bit varying",
    "varchar": "character varying",
}
"""The names of types in SQL (``format_type``), where they differ from ``pg_type.typname``."""

# name, oid, oid of its array type (0: none)
_BASE: Final = (
    ("bool", 16, 1000),
    ("bytea", 17, 1001),
    ("char", 18, 1002),
    ("name", 19, 1003),
    ("int8", 20, 1016),
    ("int2", 21, 1005),
    ("int2vector", 22, 1006),
    ("int4", 23, 1007),
    ("regproc", 24, 1008),
    ("text", 25, 1009),
    ("oid", 26, 1028),
    ("tid", 27, 1010),
    ("xid", 28, 1011),
    ("cid", 29, 1012),
    ("oidvector", 30, 1013),
    ("json", 114, 199),
    ("xml", 142, 143),
    ("pg_node_tree", 194, 0),
    ("point", 600, 1017),
    ("lseg", 601, 1018),
    ("path", 602, 1019),
    ("box", 603, 1020),
    ("polygon", 604, 1027),
    ("line", 628, 629),
    ("cidr", 650, 651),
    ("float4", 700, 1021),
    ("float8", 701, 1022),
    ("circle", 718, 719),
    ("macaddr8", 774, 775),
    ("money", 790, 791),
    ("macaddr", 829, 1040),
    ("inet", 869, 1041),
    ("aclitem", 1033, 1034),
    ("bpchar", 1042, 1014),
    ("varchar", 1043, 1015),
    ("date", 1082, 1182),
    ("time", 1083, 1183),
    ("timestamp", 1114, 1115),
    ("timestamptz", 1184, 1185),
    ("interval", 1186, 1187),
    ("timetz", 1266, 1270),
    ("bit", 1560, 1561),
    ("varbit", 1562, 1563),
    ("numeric", 1700, 1231),
    ("refcursor", 1790, 2201),
    ("regprocedure", 2202, 2207),
    ("regoper", 2203, 2208),
    ("regoperator", 2204, 2209),
    ("regclass", 2205, 2210),
    ("regtype", 2206, 2211),
    ("uuid", 2950, 2951),
    ("txid_snapshot", 2970, 2949),
    ("pg_lsn", 3220, 3221),
    ("pg_ndistinct", 3361, 0),
    ("pg_dependencies", 3402, 0),
    ("tsvector", 3614, 3643),
    ("tsquery", 3615, 3645),
    ("gtsvector", 3642, 3644),
    ("regconfig", 3734, 3735),
    ("regdictionary", 3769, 3770),
    ("jsonb", 3802, 3807),
    ("jsonpath", 4072, 4073),
    ("regnamespace", 4089, 4090),
    ("regrole", 4096, 4097),
    ("regcollation", 4191, 4192),
    ("pg_brin_bloom_summary", 4600, 0),
    ("pg_brin_minmax_multi_summary", 4601, 0),
    ("pg_mcv_list", 5017, 0),
    ("pg_snapshot", 5038, 5039),
    ("xid8", 5069, 271),
)

# name, oid, oid of its array type, oid of the subtype; then name, oid and array type of its multirange
_RANGES: Final = (
    ("int4range", 3904, 3905, 23, "int4multirange", 4451, 6150),
    ("numrange", 3906, 3907, 1700, "nummultirange", 4532, 6151),
    ("tsrange", 3908, 3909, 1114, "tsmultirange", 4533, 6152),
    ("tstzrange", 3910, 3911, 1184, "tstzmultirange", 4534, 6153),
    ("daterange", 3912, 3913, 1082, "datemultirange", 4535, 6155),
    ("int8range", 3926, 3927, 20, "int8multirange", 4536, 6157),
)


def _fact(name: str, oid: int, kind: TypeKind, element: int = 0) -> TypeFact:
    # only box uses semicolons as delimiter: its own text has commas
    return TypeFact(oid, CATALOG, name, kind, element, delimiter=";" if name in {"box", "_box"} else ",")


def _with_array(name: str, oid: int, array: int, kind: TypeKind, element: int = 0) -> Iterator[TypeFact]:
    yield _fact(name, oid, kind, element)
    if array:
        yield _fact(f"_{name}", array, TypeKind.ARRAY, oid)


def builtin_facts() -> Iterator[TypeFact]:
    """All built-in types that columns may have, except the row types of system tables."""
    for name, oid, array in _BASE:
        yield from _with_array(name, oid, array, TypeKind.BASE)
    for name, oid, array, subtype, multirange, multirange_oid, multirange_array in _RANGES:
        yield from _with_array(name, oid, array, TypeKind.RANGE, subtype)
        yield from _with_array(multirange, multirange_oid, multirange_array, TypeKind.MULTIRANGE, oid)
