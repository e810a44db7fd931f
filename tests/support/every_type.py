"""A column of every type that PostgreSQL 18's catalogue has, and of each kind that one can make, with values at the edges.

Values are SQL expressions. Where PostgreSQL has no value to offer (types that only its own catalogs can fill) there are none: the column
is NULL, and its place is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.database import Database

SCHEMA = "app"

SETUP = """
CREATE SCHEMA app;
CREATE TYPE app.mood AS ENUM ('sad', 'so-so', 'it''s "fine", {ok}', 'ärgerlich');
CREATE DOMAIN app.positive AS int CHECK (value > 0);
CREATE DOMAIN app.price AS numeric(12, 2);
CREATE DOMAIN app.prices AS app.price[];
CREATE DOMAIN app.required AS text;
CREATE TYPE app.pair AS (number int, remark text);
CREATE TYPE app.nested AS (inner_pair app.pair, moods app.mood[], span tstzrange, data bytea);
CREATE TYPE app.floatrange AS RANGE (subtype = float8);
CREATE TYPE app.textrange AS RANGE (subtype = text, collation = "C");
CREATE TABLE app.with_statistics (a int DEFAULT 1 + 1, b int);
INSERT INTO app.with_statistics SELECT i % 10, i % 10 FROM generate_series(1, 1000) AS i;
CREATE STATISTICS app.stats (ndistinct, dependencies, mcv) ON a, b FROM app.with_statistics;
ANALYZE app.with_statistics;
"""


@dataclass(frozen=True)
class Specimen:
    """A column.

    Attributes:
        name: of the column.
        type: as SQL.
        values: expressions.
    """

    name: str
    type: str
    values: tuple[str, ...]


def _literals(*texts: str) -> tuple[str, ...]:
    return tuple(f"$v${text}$v$" for text in texts)


_STATISTICS = "FROM pg_statistic_ext AS s JOIN pg_statistic_ext_data AS d ON d.stxoid = s.oid WHERE s.stxname = 'stats'"

_BUILTIN: dict[str, tuple[str, ...]] = {
    "bool": _literals("true", "false"),
    "bytea": _literals("\\x", "\\x00ff5c270a09", "\\x" + "ab" * 3000),
    "char": ("'a'", "''", "'\\377'::\"char\"", "'\\'"),
    "name": _literals("", "pg_class", "x" * 63),
    "int8": _literals("-9223372036854775808", "9223372036854775807", "0"),
    "int2": _literals("-32768", "32767", "0"),
    "int2vector": _literals("1 2 -3", ""),
    "int4": _literals("-2147483648", "2147483647", "0"),
    "regproc": _literals("pg_catalog.now", "-"),
    "text": (
        *_literals("", "Grüße 🐘 \\ ' \" \n\t\r\v\f %s :x ? $1", " both ends ", "NULL", "\\N", "x" * 3000),
        "chr(1) || chr(127) || chr(1114111)",
    ),
    "oid": _literals("0", "4294967295"),
    "tid": _literals("(0,1)", "(4294967295,65535)"),
    "xid": _literals("0", "4294967295"),
    "cid": _literals("0", "4294967295"),
    "oidvector": _literals("1 4294967295", ""),
    "json": _literals('{"b": 1,  "a": [null, "x"], "b": 2}', "3", '"\\u00e9"', " [1.10, 1e400]", "null"),
    # the embedded server is built without libxml
    "xml": (),
    "pg_node_tree": ("(SELECT adbin FROM pg_attrdef WHERE adrelid = 'app.with_statistics'::regclass)",),
    "point": _literals("(1,2.5)", "(-0,1e300)", "(NaN,Infinity)"),
    "lseg": _literals("[(0,0),(1e-10,-1)]"),
    "path": _literals("((0,0),(1,1),(2,0))", "[(0,0),(1,1)]"),
    "box": _literals("(1,1),(0,0)"),
    "polygon": _literals("((0,0),(1,1),(2,0))"),
    "line": _literals("{1,-1,0.5}"),
    "cidr": _literals("10.0.0.0/8", "2001:db8::/32", "0.0.0.0/0", "::/0", "1.2.3.4/32"),
    "float4": _literals(
        "NaN", "Infinity", "-Infinity", "-0", "0", "0.1", "1.1754944e-38", "1e-45", "3.4028235e+38", "16777217", "1e6", "123456", "1e-5"
    ),
    "float8": _literals(
        "NaN",
        "Infinity",
        "-Infinity",
        "-0",
        "0",
        "0.1",
        "5e-324",
        "2.2250738585072014e-308",
        "1.7976931348623157e+308",
        "9007199254740993",
        "1e15",
        "123456789012345",
    ),
    "circle": _literals("<(1,2),3>"),
    "macaddr8": _literals("08:00:2b:01:02:03:04:05"),
    "money": _literals("-92233720368547758.08", "1.50", "0"),
    "macaddr": _literals("08:00:2b:01:02:03"),
    "inet": _literals(
        "192.168.0.1/24",
        "192.168.0.1",
        "::1",
        "::",
        "::ffff:1.2.3.4",
        "::1.2.3.4",
        "1::8",
        "1:0:0:4:5:0:0:8",
        "fe80::1/64",
        "0:0:0:1:0:0:0:0",
        "1:2:3:4:5:6:7:8",
    ),
    "aclitem": ("('=r/' || quote_ident(current_user))::aclitem",),
    "bpchar": _literals("ab   ", ""),
    "varchar": _literals("abc  ", "äöü", ""),
    "date": _literals(
        "infinity",
        "-infinity",
        "4714-11-24 BC",
        "0044-03-15 BC",
        "0001-12-31 BC",
        "0001-01-01",
        "1999-12-31",
        "2000-02-29",
        "9999-12-31",
        "10000-01-01",
        "5874897-12-31",
    ),
    "time": _literals("00:00:00", "24:00:00", "23:59:59.999999", "12:00:00.5"),
    "timestamp": _literals(
        "infinity",
        "-infinity",
        "4714-11-24 00:00:00 BC",
        "0001-12-31 23:59:59.999999 BC",
        "0001-01-01 00:00:00",
        "1999-12-31 23:59:59.999999",
        "2024-02-29 12:00:00.5",
        "9999-12-31 23:59:59.999999",
        "10000-01-01 00:00:00",
        "294276-12-31 23:59:59.999999",
    ),
    "timestamptz": _literals(
        "infinity",
        "-infinity",
        "4714-11-24 00:00:00+00 BC",
        "0001-12-31 23:59:59.999999+00 BC",
        "0001-01-01 00:00:00+00",
        "1999-12-31 23:59:59.999999+00",
        "2024-02-29 12:00:00.5-03:30",
        "9999-12-31 23:59:59.999999+00",
        "10000-01-01 00:00:00+00",
        "294276-12-31 23:59:59.999999+00",
    ),
    "interval": _literals(
        "00:00:00",
        "infinity",
        "-infinity",
        "1 year",
        "-1 years -2 mons +3 days -04:05:06.7",
        "1 mon -1 days",
        "-1 days +00:00:00.000001",
        "178000000 years",
        "2147483647 days",
        "2562047788:00:54.775807",
        "-00:00:01",
        "1 day",
        "25 mons 1 day 100:00:00",
    ),
    "timetz": _literals("12:00:00+15:59", "23:59:59.999999-00:30", "24:00:00+00", "00:00:00-15:59:59", "01:02:03.4+02"),
    "bit": ("B'1'", "B'0'"),
    "varbit": ("B''", "B'10101'", "B'1111111100000001'"),
    "numeric": _literals(
        "NaN",
        "Infinity",
        "-Infinity",
        "0",
        "0.000",
        "-0.1",
        "123456789012345678901234567890.0001000",
        "1e100",
        "1e-100",
        "10000",
        "0.00010000",
        "99990000.0001",
        "1e131071",
        "0." + "0" * 16382 + "1",
    ),
    "refcursor": _literals("cursor 1"),
    "regprocedure": _literals("pg_catalog.now()", "-"),
    "regoper": _literals("pg_catalog.||/"),
    "regoperator": _literals("+(integer,integer)"),
    "regclass": _literals("pg_class", "app.with_statistics", "-"),
    "regtype": _literals("integer", "app.mood[]", "-"),
    "uuid": _literals("00000000-0000-0000-0000-000000000000", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    "txid_snapshot": _literals("10:20:10,14,15", "1:1:"),
    "pg_lsn": _literals("0/0", "16/B374D848", "FFFFFFFF/FFFFFFFF"),
    "pg_ndistinct": (f"(SELECT d.stxdndistinct {_STATISTICS})",),
    "pg_dependencies": (f"(SELECT d.stxddependencies {_STATISTICS})",),
    "pg_mcv_list": (f"(SELECT d.stxdmcv {_STATISTICS})",),
    "tsvector": _literals("'a':1 'b':2A,16383B 'c''d':3C '\\\\e'", "", "'ü' 'no positions'"),
    "tsquery": (
        *_literals(
            "",
            "'a'",
            "!'a' & ('b' | 'c':*AB)",
            "'a' <-> ('b' <3> 'c')",
            "('a' <-> 'b') <-> 'c'",
            "!!'a' | 'b''x'",
            "!('a' & 'b')",
            "'a':D <2> !'b'",
        ),
        "phraseto_tsquery('simple', 'the quick brown fox')",
    ),
    "gtsvector": (),
    "regconfig": _literals("simple", "english"),
    "regdictionary": _literals("simple"),
    "jsonb": _literals('{"a": [null, "x"], "b": 1.10}', "3", "null", '"\\n"', "1e400"),
    "jsonpath": _literals('$."a"[*]', "strict $", '$?(@."b" > 1.5)'),
    "regnamespace": _literals("pg_catalog", "app"),
    "regrole": ("quote_ident(current_user)::regrole",),
    "regcollation": _literals('"C"'),
    "pg_brin_bloom_summary": (),
    "pg_brin_minmax_multi_summary": (),
    "pg_snapshot": _literals("10:20:10,14,15", "1:9223372036854775807:"),
    "xid8": _literals("0", "18446744073709551615"),
    "int4range": _literals("[1,5)", "empty", "(,)"),
    "numrange": _literals("[0.10,5.5]", "(,NaN)", "empty"),
    "tsrange": _literals('["0044-01-01 00:00:00 BC","2024-01-01 00:00:00")', "[,infinity]"),
    "tstzrange": _literals('["2024-01-01 00:00:00+00",)', "(,)", '["2024-01-01 00:00:00+02",infinity)'),
    "daterange": _literals("[2024-01-01,infinity)", "empty"),
    "int8range": _literals("[-9223372036854775808,0)", "empty"),
    "int4multirange": _literals("{}", "{[1,5),[7,9)}"),
    "nummultirange": _literals("{[0.10,5.5],(6,)}"),
    "tsmultirange": _literals('{["2024-01-01 00:00:00","2024-01-02 00:00:00")}'),
    "tstzmultirange": _literals('{["2024-01-01 00:00:00+00",)}'),
    "datemultirange": _literals("{[2024-01-01,2024-02-01)}"),
    "int8multirange": _literals("{[1,2),[3,)}"),
}

_MODIFIED = (
    Specimen("d_numeric_10_3", "numeric(10, 3)", _literals("1.500", "-9999999.999", "0.001")),
    Specimen("d_numeric_65_30", "numeric(65, 30)", _literals("9" * 35 + "." + "9" * 30, "-1")),
    Specimen("d_numeric_70_31", "numeric(70, 31)", _literals("9" * 39 + "." + "9" * 31)),
    Specimen("d_varchar_10", "varchar(10)", _literals("abc  ", "äöü🐘äöü🐘äö", "")),
    Specimen("d_varchar_300", "varchar(300)", _literals("🐘" * 300)),
    Specimen("d_char_5", "char(5)", _literals("ab   ", "     ")),
    Specimen("d_bit_4", "bit(4)", ("B'1010'", "B'0000'")),
    Specimen("d_bit_9", "bit(9)", ("B'101000001'",)),
    Specimen("d_varbit_12", "varbit(12)", ("B''", "B'000000000001'")),
    Specimen("d_timestamp_3", "timestamp(3)", _literals("2024-01-01 00:00:00.123")),
    Specimen("d_interval_0", "interval second(0)", _literals("00:00:07")),
    Specimen("d_int4_2d", "int4[][]", _literals("{{1,NULL},{3,4}}", "[0:1]={5,6}", "[-1:0][2:2]={{1},{2}}", "{}")),
    Specimen("d_texts", "text[]", _literals('{"a,b","c\\"d",NULL,"NULL","","\\\\"," x","{}",ü}', "{{a,b},{c,d}}")),
    Specimen("d_enum", "app.mood", _literals("sad", 'it\'s "fine", {ok}', "ärgerlich")),
    Specimen("d_enums", "app.mood[]", _literals('{sad,"it\'s \\"fine\\", {ok}"}', "{}")),
    Specimen("d_positive", "app.positive", _literals("1", "2147483647")),
    Specimen("d_positives", "app.positive[]", _literals("{1,2}")),
    Specimen("d_price", "app.price", _literals("1.50", "-9999999999.99")),
    Specimen("d_prices", "app.prices", _literals("{1.50,NULL}")),
    Specimen("d_required", "app.required", _literals("x", "")),
    Specimen("d_pair", "app.pair", _literals("(1,ok)", "(,)", '(2,"a""b\\\\c, (d)")')),
    Specimen("d_pairs", "app.pair[]", _literals('{"(1,ok)",NULL}', "{}")),
    Specimen("d_nested", "app.nested", ("ROW(ROW(1, 'a,\"b'), '{sad,NULL}', '[2024-01-01 00:00:00+00,)', '\\x00ff')::app.nested",)),
    Specimen("d_floatrange", "app.floatrange", _literals("[0.1,Infinity)", "[-1.5,0)")),
    Specimen("d_textrange", "app.textrange", _literals('["a,b","c\\"d")', '["",z]')),
    Specimen("d_floatmultirange", "app.floatmultirange", _literals("{[0.1,1),[2,3)}")),
    Specimen("d_row_of_table", "app.with_statistics", _literals("(1,2)")),
    Specimen("d_catalog_row", "pg_catalog.pg_namespace", ("(SELECT n FROM pg_namespace AS n WHERE nspname = 'app')",)),
    Specimen("d_identifier", "information_schema.sql_identifier", _literals("a_name")),
    Specimen("d_yes_or_no", "information_schema.yes_or_no", _literals("YES")),
)

WITHOUT_ARRAY = {"pg_node_tree", "pg_ndistinct", "pg_dependencies", "pg_mcv_list", "pg_brin_bloom_summary", "pg_brin_minmax_multi_summary"}


def _array_of(name: str, values: tuple[str, ...]) -> Specimen:
    elements = ", ".join(f'{value}::pg_catalog."{name}"' for value in values)
    some = (f"ARRAY[{elements}, NULL]",) if elements else ()
    return Specimen(f"a_{name}", f'pg_catalog."{name}"[]', some)


SPECIMENS: tuple[Specimen, ...] = (
    *(Specimen(f"c_{name}", f'pg_catalog."{name}"', values) for name, values in _BUILTIN.items()),
    *(_array_of(name, values) for name, values in _BUILTIN.items() if name not in WITHOUT_ARRAY),
    *_MODIFIED,
)

BUILTIN_NAMES = frozenset(_BUILTIN)

ROWS = max(len(specimen.values) for specimen in SPECIMENS) + 1
"""One more than the most values: the last row is all NULL."""


def create_table(database: Database, name: str, key: str = "PRIMARY KEY", specimens: tuple[Specimen, ...] = SPECIMENS) -> None:
    """Make ``app.name`` with a column ``id`` and one for each specimen."""
    columns = "".join(f", {specimen.name} {specimen.type}" for specimen in specimens)
    database.execute(f"CREATE TABLE {SCHEMA}.{name} (id int {key}{columns})")


def fill(database: Database, name: str, first: int = 0, specimens: tuple[Specimen, ...] = SPECIMENS) -> None:
    """Insert :data:`ROWS` rows, in one transaction; a column goes through its values again and again."""
    statements = []
    for number in range(ROWS):
        given = {
            specimen.name: f"({specimen.values[number % len(specimen.values)]})::{specimen.type}"
            for specimen in specimens
            if specimen.values and number < ROWS - 1
        }
        names = ", ".join(["id", *given])
        values = ", ".join([str(first + number), *given.values()])
        statements.append(f"INSERT INTO {SCHEMA}.{name} ({names}) VALUES ({values})")
    database.execute("; ".join(statements))


def texts(database: Database, name: str, columns: Sequence[str] = ()) -> list[tuple[int, dict[str, str | None]]]:
    """What PostgreSQL's output functions say of the rows, by id, under the settings of a walsender."""
    columns = columns or [specimen.name for specimen in SPECIMENS]
    options = "-c datestyle=ISO -c intervalstyle=postgres -c extra_float_digits=3 -c timezone=UTC -c search_path="
    with database.connect(options=options, client_encoding="UTF8") as connection:
        result = connection.pgconn.exec_(f"SELECT id, {', '.join(columns)} FROM {SCHEMA}.{name} ORDER BY id".encode())
        assert result.nfields == len(columns) + 1, result.error_message
        found = []
        for row in range(result.ntuples):
            values = [result.get_value(row, column) for column in range(result.nfields)]
            decoded = [None if value is None else value.decode() for value in values]
            found.append((int(decoded[0] or 0), dict(zip(columns, decoded[1:], strict=True))))
    return found
