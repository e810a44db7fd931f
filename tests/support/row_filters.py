"""Random tables, row filters and changes for the differential test."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

TYPES: tuple[str, ...] = (
    "int2",
    "int4",
    "int8",
    "numeric",
    "float4",
    "float8",
    "text",
    "varchar(40)",
    "char(6)",
    "bool",
    "date",
    "timestamp",
)
TYPES += ("timestamptz", "time", "uuid", "bytea")

VALUES: dict[str, tuple[str, ...]] = {
    "int2": ("-32768", "-7", "-1", "0", "1", "2", "3", "7", "100", "32767"),
    "int4": ("-2147483648", "-7", "-1", "0", "1", "2", "3", "7", "100", "2147483647"),
    "int8": ("-9223372036854775808", "-7", "-1", "0", "1", "2", "3", "7", "2147483648", "9007199254740993", "9223372036854775807"),
    "numeric": ("-7.50", "-1", "0", "0.1", "0.10", "1", "1.5", "2.50", "3", "7", "9007199254740993.5", "1e30", "NaN", "1e-20"),
    "float4": ("-7.5", "-1", "0", "-0", "0.1", "0.3", "1", "1.5", "3", "16777217", "Infinity", "-Infinity", "NaN"),
    "float8": ("-7.5", "-1", "0", "-0", "0.1", "0.3", "1", "1.5", "3", "9007199254740993", "1e300", "Infinity", "-Infinity", "NaN"),
    "text": ("", " ", "a", "A", "ab", "abc", "abc ", "Abd", "b%", "b_", "\\", "a\\%", "ä", "äb", "Zürich", "日本", "o''clock", "x\ny", "z"),
    "varchar(40)": ("", "a", "A", "ab", "abc", "abc ", "ä", "m", "z"),
    "char(6)": ("", "a", "A", "ab", "abc", "abc   ", "ä", "z"),
    "bool": ("true", "false"),
    "date": ("2000-01-01", "1999-12-31", "2024-02-29", "0044-03-15 BC", "infinity", "-infinity", "12000-05-05", "2020-06-01"),
    "timestamp": (
        "2000-01-01 00:00:00",
        "1999-12-31 23:59:59.999999",
        "2024-02-29 12:30:00.5",
        "0044-03-15 01:02:03 BC",
        "infinity",
        "-infinity",
        "2020-06-01 00:00:00",
    ),
    "timestamptz": (
        "2000-01-01 00:00:00+00",
        "1999-12-31 23:59:59.999999-05",
        "2024-02-29 12:30:00.5+05:30",
        "0044-03-15 01:02:03+00 BC",
        "infinity",
        "-infinity",
    ),
    "time": ("00:00:00", "12:30:00.5", "23:59:59.999999", "24:00:00"),
    "uuid": (
        "00000000-0000-0000-0000-000000000000",
        "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
        "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A12",
        "ffffffff-ffff-ffff-ffff-ffffffffffff",
    ),
    "bytea": ("\\x", "\\x00", "\\x0001", "\\x41", "\\xff"),
}
INTEGERS = ("int2", "int4", "int8")
NUMBERS = (*INTEGERS, "numeric", "float4", "float8")
TEXTS = ("text", "varchar(40)")
FAMILIES = (NUMBERS, (*TEXTS, "char(6)"), ("date", "timestamp"), *(((name,)) for name in ("bool", "timestamptz", "time", "uuid", "bytea")))
EVALUATED = [
    # a part without columns decides first
    ("a / b = 1 AND 1 = 2", False),
    ("1 = 1 OR a / b = 1", False),
    ("a / b = 1 OR 1 = 2", True),
    ("(a / b = NULL) IS NULL", False),
    ("(a / b + NULL::int IS NULL)", False),
    ("1 IN (a / b, 1)", False),
    # the constants of a list are an array, which comes first
    ("a IN (a / b, 6, 7)", False),
    ("a IN (a / b, 6)", True),
    # an array is evaluated before it is compared
    ("a = ANY (ARRAY[6, a / b])", True),
    ("6 = ANY (ARRAY[6, a / b])", True),
    ("(a / b = ANY (ARRAY[NULL::int])) IS NULL", True),
    ("(6 = ANY (ARRAY[NULL::int])) IS NULL", False),
    ("NULLIF(NULL::int, a / b) IS NULL", False),
    ("NULLIF(a / b, NULL) IS NULL", True),
    ("(NULLIF(NULL::int, a) + 1 / b) IS NULL", False),
    ("NULL::int IS DISTINCT FROM a / b", True),
    ("a BETWEEN 7 AND a / b", False),
    ("a BETWEEN 6 AND a / b", True),
    ("a BETWEEN SYMMETRIC 7 AND a / b", True),
    ("CASE a / b WHEN NULL THEN false ELSE true END", False),
    # constants that the planner does not look at
    ("true OR 1 / 0 = 1", False),
    ("a = 6 OR 1 = 1 OR 1 / 0 = 1", False),
    ("NOT (1 = 2 AND 1 / 0 = 1)", False),
    ("2 BETWEEN 3 AND 1 / 0", False),
    ("2 BETWEEN SYMMETRIC 1 / 0 AND 3", True),
    ("CASE WHEN true THEN 1 ELSE 1 / 0 END = 1", False),
    ("CASE WHEN false THEN 1 / 0 WHEN NULL THEN 2 / 0 ELSE 1 END = 1", False),
    ("CASE WHEN b = 1 THEN 2 WHEN true THEN 1 WHEN 1 / 0 = 1 THEN 1 / 0 ELSE 1 / 0 END = 1", False),
    ("CASE 1 WHEN 1 THEN 2 WHEN 1 / 0 THEN 1 END = 2", False),
    ("COALESCE(1, 1 / 0) = 1", False),
    ("COALESCE(b, NULL, 1, 1 / 0) = 0", False),
    # what these make is a constant, although they contain columns
    ("CASE WHEN true THEN 1 ELSE a / b END = 1 OR 1 / 0 = 1", False),
    ("COALESCE(NULL, 1, a / b) = 1 OR 1 / 0 = 1", False),
    ("NULLIF(NULL::int, a) IS NULL OR 1 / 0 = 1", False),
]
"""Filters of a row with a = 6 and b = 0, and whether they fail: the server evaluates not every part, and not in the order of the text."""
REFUSED = [
    "1 / 0 = 1 OR true",
    "b = 0 OR 1 / 0 = 1",
    "(b = 0 OR 1 / 0 = 1) IS NOT NULL",
    "a = 6 AND (1 / 0 = 1 OR 1 = 1)",
    "(a + NULL::int) IS NULL AND NULL + 1 / 0 IS NULL",
    "CASE WHEN b = 1 THEN 1 / 0 ELSE 1 END = 1",
    "CASE WHEN b = 0 THEN 1 ELSE 1 / 0 END = 1",
    "CASE WHEN 1 / 0 = 1 THEN 1 ELSE 2 END = 2",
    "CASE b WHEN 0 THEN 1 WHEN 1 / 0 THEN 2 END = 1",
    "CASE NULL::int WHEN 1 / 0 THEN 1 ELSE 2 END = 2",
    "COALESCE(b, 1 / 0) = 0",
    "COALESCE(b, 1 / 0, 1) = 0",
    "COALESCE(NULL, 1 / 0, 1) = 1",
    "GREATEST(1, 1 / 0) = 1",
    "NULLIF(NULL::int, 1 / 0) IS NULL",
    "NULLIF(1 / 0, NULL) IS NULL",
    "NULL::int IS DISTINCT FROM 1 / 0",
    "1 IN (1, 1 / 0)",
    "1 = ANY (ARRAY[1, 1 / 0])",
    "(NULL::int = ANY (ARRAY[1, 1 / 0])) IS NULL",
    "(1 / 0) IS NULL",
    "(1 / 0 = 1) IS NOT TRUE",
    "-(1 / 0) = 1",
    "(1 / 0)::bigint = 1",
    "(('a' || left('a', -(1 / 0))) COLLATE \"C\") < 'b'",
]
"""Filters that fail for every row, because the planner evaluates a part without columns."""
SIGNS = ("=", "<>", "!=", "<", "<=", ">", ">=")


def quoted(text: str) -> str:
    """A value of VALUES as a constant: its quotes are doubled already."""
    return f"'{text}'"


@dataclass
class Table:
    """A table and its filters.

    Attributes:
        columns: type by name.
        key: the replica identity's columns; empty: FULL.
    """

    name: str
    columns: dict[str, str]
    key: tuple[str, ...]
    filters: list[str] = field(default_factory=list)

    @property
    def usable(self) -> dict[str, str]:
        """The columns that a filter of UPDATE and DELETE may use."""
        return {name: type_ for name, type_ in self.columns.items() if name in (self.key or self.columns)}

    def ddl(self) -> str:
        listed = ", ".join(f'"{name}" {type_}' for name, type_ in self.columns.items())
        external = "".join(
            f'; ALTER TABLE {self.name} ALTER "{name}" SET STORAGE EXTERNAL' for name, type_ in self.columns.items() if type_ == "text"
        )
        if self.key:
            keys = ", ".join(f'"{name}"' for name in self.key)
            return f"CREATE TABLE {self.name} ({listed}, PRIMARY KEY ({keys})){external}"
        return f"CREATE TABLE {self.name} ({listed}); ALTER TABLE {self.name} REPLICA IDENTITY FULL{external}"


class Generator:
    """Makes the tables, filters and changes of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._ids = itertools.count(1000)

    def table(self, number: int) -> Table:
        choose = self.random.choice
        types = [choose(TYPES) for _ in range(self.random.randint(2, 5))]
        columns = {choose((f"c{place}", f"C {place}", f"c{place}")): type_ for place, type_ in enumerate(types)}
        table = Table(f"t{number}", {"id": "int4", **columns}, ())
        if self.random.random() < 0.5:
            others = [name for name in columns if self.random.random() < 0.6]
            table.key = ("id", *others)
        return table

    def filter(self, columns: dict[str, str], depth: int = 2) -> str:
        choose, chance = self.random.choice, self.random.random()
        if depth and chance < 0.45:
            left, right = self.filter(columns, depth - 1), self.filter(columns, depth - 1)
            word = choose(("AND", "OR"))
            return choose(
                (f"({left}) {word} ({right})", f"(({left})) {word.lower()} ({right})", f"{self._bare(left)} {word} {self._bare(right)}")
            )
        if depth and chance < 0.6:
            inner = self.filter(columns, depth - 1)
            return choose(
                (
                    f"NOT ({inner})",
                    f"({inner}) IS TRUE",
                    f"({inner}) IS NOT FALSE",
                    f"({inner}) IS NULL",
                    f"({inner}) IS NOT TRUE",
                    f"({inner}) IS UNKNOWN",
                )
            )
        name = choose(list(columns))
        return self._atom(columns, name)

    def _bare(self, text: str) -> str:
        return f"({text})" if any(word in text.upper() for word in (" OR ", " AND ", "NOT ")) else text

    def _atom(self, columns: dict[str, str], name: str) -> str:
        choose = self.random.choice
        type_ = columns[name]
        column = f'"{name}"' if name != name.lower() or " " in name else choose((name, f'"{name}"', name.upper()))
        general = [self._comparison, self._null, self._list, self._distinct, self._between, self._pair, self._conditional]
        if type_ in NUMBERS:
            general += [self._number, self._integer if type_ in INTEGERS else self._number]
        if type_ in TEXTS:
            general += [self._text, self._text]
        special = {"char(6)": self._char, "bool": self._bool, "date": self._date, "timestamp": self._date}
        if type_ in special:
            general.append(special[type_])
        return choose(general)(columns, column, type_)

    def _constant(self, type_: str) -> str:
        choose = self.random.choice
        value = choose(VALUES[type_])
        if type_ in NUMBERS and value[-1].isdigit() and self.random.random() < 0.5:
            return value if not value.startswith("-") else f"({value})"
        if type_ == "bool" and self.random.random() < 0.7:
            return value
        sql = {"varchar(40)": "varchar", "char(6)": "bpchar"}.get(type_, type_)
        return choose((quoted(value), f"{quoted(value)}::{sql}", f"CAST({quoted(value)} AS {sql})", f"{sql} {quoted(value)}"))

    def _sign(self, type_: str) -> tuple[str, str]:
        """An operator, and what its operands need for it."""
        if type_ in {*TEXTS, "char(6)"}:
            sign = self.random.choice(SIGNS)
            return sign, "" if sign in {"=", "<>", "!="} else ' COLLATE "C"'
        return self.random.choice(SIGNS), ""

    def _comparison(self, columns: dict[str, str], column: str, type_: str) -> str:
        sign, collate = self._sign(type_)
        constant = self._constant(type_)
        if self.random.random() < 0.2:
            return f"{constant}{collate} {sign} {column}"
        space = self.random.choice((" ", "")) if constant[0] != "-" else " "
        return f"{column} {sign} {constant}{collate}" if collate else f"{column}{space}{sign}{space}{constant}"

    def _null(self, columns: dict[str, str], column: str, type_: str) -> str:
        return f"{column} {self.random.choice(('IS NULL', 'IS NOT NULL', 'ISNULL', 'NOTNULL'))}"

    def _list(self, columns: dict[str, str], column: str, type_: str) -> str:
        items = [self._constant(type_) for _ in range(self.random.randint(1, 4))]
        if self.random.random() < 0.2:
            items.append("NULL")
        listed = ", ".join(items)
        if self.random.random() < 0.3 and type_ in {"int4", "text"}:
            typed = "int4" if type_ == "int4" else "text"
            array = f"ARRAY[{', '.join(f'{item}::{typed}' for item in items)}]"
            return f"{column} {self.random.choice(('= ANY', '= SOME', '<> ALL'))} ({array})"
        return f"{column} {self.random.choice(('IN', 'NOT IN'))} ({listed})"

    def _distinct(self, columns: dict[str, str], column: str, type_: str) -> str:
        return f"{column} IS {self.random.choice(('', 'NOT '))}DISTINCT FROM {self._constant(type_)}"

    def _between(self, columns: dict[str, str], column: str, type_: str) -> str:
        collate = ' COLLATE "C"' if type_ in {*TEXTS, "char(6)"} else ""
        word = self.random.choice(("BETWEEN", "NOT BETWEEN", "BETWEEN SYMMETRIC", "NOT BETWEEN SYMMETRIC", "BETWEEN ASYMMETRIC"))
        return f"{column}{collate} {word} {self._constant(type_)} AND {self._constant(type_)}"

    def _pair(self, columns: dict[str, str], column: str, type_: str) -> str:
        family = next(each for each in FAMILIES if type_ in each)
        others = [name for name, other in columns.items() if other in family]
        sign, collate = self._sign(type_)
        other = self.random.choice(others)
        return f'{column} {sign} "{other}"{collate}'

    def _conditional(self, columns: dict[str, str], column: str, type_: str) -> str:
        one, two = self._constant(type_), self._constant(type_)
        if type_ in {"float4", "float8"}:
            one, two = f"{one}::{type_}", f"{two}::{type_}"
        test = f"{column} IS NULL"
        forms = [
            f"COALESCE({column}, {one}) = {two}",
            f"NULLIF({column}, {one}) IS NULL",
            f"CASE WHEN {test} THEN true ELSE {column} = {one} END",
            f"CASE {column} WHEN {one} THEN 1 WHEN {two} THEN 2 END IS NOT NULL",
            f"CASE WHEN {test} THEN 0 WHEN {column} <> {one} THEN 1 ELSE 2.5 END > 0",
        ]
        if type_ not in {*TEXTS, "char(6)"}:
            forms.append(f"{self.random.choice(('GREATEST', 'LEAST'))}({column}, {one}) = {two}")
        return self.random.choice(forms)

    def _integer(self, columns: dict[str, str], column: str, type_: str) -> str:
        number, sign = self.random.randint(1, 9), self.random.choice(SIGNS)
        constant = self.random.choice(("0", "1", "2", "-3"))
        return self.random.choice(
            (
                f"{column} % {number} {sign} {constant}",
                f"mod({column}, {number}) {sign} {constant}",
                f"{column} / {number + 1} {sign} {constant}",
                f"{column}::numeric + {number} {sign} {constant}",
                f"{column}::numeric * 2 - {number} {sign} {constant}",
                f"{column}::text = '{constant}'",
                f"-({column}::numeric) {sign} {constant}",
                f"abs({column}::numeric) {sign} {number}",
                f"{column}::int8 {sign} {constant}",
            )
        )

    def _number(self, columns: dict[str, str], column: str, type_: str) -> str:
        other = self.random.choice(NUMBERS)
        return f"{column} {self.random.choice(SIGNS)} {self._constant(other)}"

    def _text(self, columns: dict[str, str], column: str, type_: str) -> str:
        number, sign = self.random.randint(0, 3), self.random.choice(SIGNS)
        pattern = self.random.choice(("a%", "%b", "_b%", "%", "", "A_", "a\\\\%", "b\\%", "%ä%", "_", "\\\\", "%c "))
        constant = quoted(self.random.choice(VALUES["text"]))
        return self.random.choice(
            (
                f"{column} LIKE '{pattern}'",
                f"{column} NOT LIKE '{pattern}'",
                f"{column} ~~ '{pattern}'",
                f"length({column}) {sign} {number}",
                f"char_length({column}) {sign} {number}",
                f"octet_length({column}) {sign} {number}",
                f"left({column}, {number}) = {constant}",
                f"right({column}, -{number}) = {constant}",
                f"substr({column}, {number}, 2) = {constant}",
                f"substring({column}, {number - 1}) = {constant}",
                f'lower({column} COLLATE "C") = {constant}',
                f'upper({column} COLLATE "C") {sign} {constant}',
                f"starts_with({column}, {constant})",
                f"{column} || 'b' = {constant}",
                f"{column}::text || {column} = 'aa'",
            )
        )

    def _char(self, columns: dict[str, str], column: str, type_: str) -> str:
        constant = quoted(self.random.choice(VALUES["text"]))
        return self.random.choice(
            (
                f"{column} = {constant}",
                f"{column}::text = {constant}",
                f"{column} = {constant}::text",
                f"length({column}) = {self.random.randint(0, 3)}",
                f"lower({column} COLLATE \"C\") = 'abc'",
            )
        )

    def _bool(self, columns: dict[str, str], column: str, type_: str) -> str:
        return self.random.choice((column, f"NOT {column}", f"{column} IS TRUE", f"{column} IS NOT FALSE", f"{column}::text = 'true'"))

    def _date(self, columns: dict[str, str], column: str, type_: str) -> str:
        sign = self.random.choice(SIGNS)
        other = "timestamp" if type_ == "date" else "date"
        constant = f"'{self.random.choice(VALUES[other])}'::{other}"
        return self.random.choice((f"{column} {sign} {constant}", f"{column}::{other} {sign} {constant}"))

    # --- changes

    def value(self, type_: str, *, null: bool) -> str:
        if null and self.random.random() < 0.15:
            return "NULL"
        if null and type_ == "text" and self.random.random() < 0.2:
            # stored out of line: an UPDATE that does not change it does not send it
            return f"(SELECT string_agg(md5(g::text || '{self.random.randint(1, 3)}'), '') FROM generate_series(1, 100) AS g)"
        return f"'{self.random.choice(VALUES[type_])}'"

    def changes(self, table: Table, count: int) -> list[str]:
        statements: list[str] = []
        columns = [name for name in table.columns if name != "id"]
        rows = 4
        for number in range(rows):
            values = [self.value(table.columns[name], null=name not in table.key) for name in columns]
            statements.append(f"INSERT INTO {table.name} VALUES ({number}, {', '.join(values)})")
        for _ in range(count):
            name = self.random.choice([*columns, *columns, "id"])
            where = f"WHERE id = {self.random.randrange(rows)}"
            if name == "id":
                statements.append(f"UPDATE {table.name} SET id = {next(self._ids)} {where}")
            else:
                value = self.value(table.columns[name], null=name not in table.key)
                statements.append(f'UPDATE {table.name} SET "{name}" = {value} {where}')
        statements.append(f"DELETE FROM {table.name} WHERE id % 2 = 0")
        return statements
