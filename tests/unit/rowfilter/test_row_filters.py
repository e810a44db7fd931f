"""Row filters without a server: what is refused and how, three-valued logic, and the transformation of changes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from subscriber.errors import ProtocolError
from subscriber.protocol.decoder import decode
from subscriber.protocol.encoder import encode
from subscriber.protocol.frames import XLogData, decode_frame, encode_frame
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    Column,
    Delete,
    Insert,
    Message,
    Relation,
    ReplicaIdentity,
    StreamAbort,
    StreamCommit,
    StreamStart,
    StreamStop,
    Truncate,
    TruncateOption,
    TupleData,
    Type,
    Update,
)
from subscriber.rowfilter import PublicationFilter, RowFilter, RowFilterError, combine, parse_filter
from subscriber.rowfilter.binding import bind_expression
from subscriber.rowfilter.stream import FrameFilter
from subscriber.rowfilter.syntax import parse_expression
from subscriber.types import TypeRegistry
from tests.support.row_filters import EVALUATED, REFUSED

INT4, TEXT, BOOL, DATE, NUMERIC, BPCHAR, VARCHAR, TIMESTAMPTZ, JSONB = 23, 25, 16, 1082, 1700, 1042, 1043, 1184, 3802
COLUMNS = (
    Column("a", INT4, -1, True),
    Column("b", INT4, -1, False),
    Column("c", TEXT, -1, False),
    Column("flag", BOOL, -1, False),
    Column("d", DATE, -1, False),
    Column("n", NUMERIC, -1, False),
    Column("v", VARCHAR, -1, False),
    Column("at", TIMESTAMPTZ, -1, False),
    Column("j", JSONB, -1, False),
    Column("own", 16_400, -1, False),
    Column("order", INT4, -1, False),
    Column("code", BPCHAR, 10, False),
)
VALUES = ("6", None, "NSW", "t", "2020-01-01", "1.50", "x", "2020-01-01 00:00:00+00", "{}", "?", "1", "ab    ")
NOT_SIMPLE = (
    "Only columns, constants, built-in operators, built-in data types, built-in collations, and immutable built-in functions are allowed."
)


def relation(identity: ReplicaIdentity = "d", columns: tuple[Column, ...] = COLUMNS, relation_id: int = 1) -> Relation:
    return Relation(relation_id, "public", "t", identity, columns)


def tuple_data(*values: str | None) -> TupleData:
    """``?`` is a value that was not sent."""
    kinds = bytes(ord("n") if value is None else ord("u") if value == "?" else ord("t") for value in values)
    return TupleData(kinds, [None if value in {None, "?"} else str(value).encode() for value in values])


def bound(text: str, of: Relation | None = None) -> RowFilter:
    return parse_filter(text).bind(of or relation(), TypeRegistry())


@pytest.mark.parametrize(
    "text",
    [
        "a > 5 AND c = 'NSW'",
        "((a > 5) AND (c = 'NSW'::text))",
        "NOT a = 5 AND true",
        "b IS NULL",
        "(b = 1) IS NOT TRUE",
        "b = 1 OR a = 6",
        "(b = 1 AND a = 5) IS FALSE",
        "(b = 1) IS UNKNOWN AND flag IS NOT UNKNOWN",
        "b IS DISTINCT FROM 6",
        "COALESCE(b, a) = 6",
        "NULLIF(a, 6) IS NULL",
        "NULLIF(code, c) <> 'ab ' AND NULLIF(code, 'x') = 'ab '",
        "CASE WHEN b = 1 THEN false ELSE flag END",
        "a IN (1, 6)",
        # items with a column are compared alone, also one that is NULL anyway: an array of 0.1 would be one of real
        "('0.1'::real IN (0.1, n + NULL)) IS NULL",
        "a = ANY ('{5,6}'::integer[]) AND a <> ALL (ARRAY[1, 2]) AND a = SOME (ARRAY[6, b])",
        "a::float = '6'::float8 AND n = dec '1.5'",
        "n = 1.5 AND n + 0.5 = 2 AND a / 4 = 1 AND -a % 4 = -2",
        "d BETWEEN '2019-12-31' AND date '2020-01-01'",
        "d < timestamp '2020-01-01 00:00:01'",
        "at = '2020-01-01 02:00:00+02'",
        "c LIKE 'N_W' AND c NOT LIKE 'n%'",
        "c > 'NS' COLLATE \"C\" AND lower(c COLLATE \"C\") = 'nsw'",
        "\"left\"(c, -1) = 'NS' AND length(c) = 3 AND substr(c, 2, 1) = 'S'",
        '"order" = 1',
        # a constant with COLLATE takes its type from the other side, as without it
        'code >= \'ab  \' COLLATE "C" AND code <= (\'ab   \' COLLATE "C") COLLATE "C"',
        "a = '6' COLLATE \"C\" AND flag = 'true' COLLATE \"C\" AND ('t' COLLATE \"C\")",
        "c > ('NS' COLLATE \"C\")::varchar AND COALESCE(code, 'x' COLLATE \"C\") <= 'ab    '",
        "a BETWEEN ('5' COLLATE \"C\") AND '7' COLLATE \"C\"",
        "a BETWEEN SYMMETRIC 7 AND 5 AND a NOT BETWEEN SYMMETRIC 5 AND 1 AND a NOT BETWEEN ASYMMETRIC 7 AND 5",
        "(a BETWEEN SYMMETRIC b AND 7) IS NULL AND a NOT BETWEEN SYMMETRIC 7 AND 8",
        # more digits than Python reads as an integer
        pytest.param(f"a < {'9' * 5000} AND a = {'0' * 5000}6 AND -{'9' * 5000} < a", id="long integers"),
        pytest.param(f"a > 1.{'1' * 5000}::int AND -1.5{'0' * 5000}::int = -2 AND ((n - 1.5) * 1e30)::int = 0", id="long fractions"),
    ],
)
def test_row_that_matches(text: str) -> None:
    assert bound(text).matches(tuple_data(*VALUES))


@pytest.mark.parametrize(
    "text", ["b = 1", "NOT b = 1", "b <> 1", "b IN (1, 2)", "b = 1 AND flag", "b = 1 OR a = 5", "a NOT IN (1, NULL)", "NULL"]
)
def test_null_and_false_do_not_match(text: str) -> None:
    assert not bound(text).matches(tuple_data(*VALUES))


@pytest.mark.parametrize(
    ("text", "message", "detail"),
    [
        ("xmin = '1'", "invalid publication WHERE expression", "System columns are not allowed."),
        ("own = 'x'", "invalid publication WHERE expression", "User-defined types are not allowed."),
        ("at > now()", "invalid publication WHERE expression", "User-defined or built-in mutable functions are not allowed."),
        ("at > d", "invalid publication WHERE expression", "User-defined or built-in mutable functions are not allowed."),
        ("a = (SELECT 1)", "invalid publication WHERE expression", NOT_SIMPLE),
        ("current_user = c", "invalid publication WHERE expression", NOT_SIMPLE),
        ("a::text = '6'", "invalid publication WHERE expression", NOT_SIMPLE),
        ("v IN ('a', 'b')", "invalid publication WHERE expression", NOT_SIMPLE),
        ("zz = 1", 'column "zz" does not exist', None),
        ("a", "argument of PUBLICATION WHERE must be type boolean, not type integer", None),
        ("NOT a", "argument of NOT must be type boolean, not type integer", None),
        ("flag AND a", "argument of AND must be type boolean, not type integer", None),
        ("c = 5", "operator does not exist: text = integer", None),
        ("CASE '6' WHEN a THEN true END", "operator does not exist: text = integer", None),
        ("sum(a) = 1", "aggregate functions are not allowed in WHERE", None),
        ("1 / 0 = 1", "division by zero", None),
        ("", "syntax error at end of input", None),
        ("order = 1", 'syntax error at or near "order"', None),
    ],
)
def test_what_the_server_refuses_is_refused_in_its_words(text: str, message: str, detail: str | None) -> None:
    with pytest.raises(RowFilterError) as caught:
        bound(text)
    assert str(caught.value) == message
    assert caught.value.detail == detail
    assert caught.value.sqlstate


@pytest.mark.parametrize(
    "text",
    [
        # other grammars
        "a == 1",
        "len(c) = 3",
        "a < b < 3",
        "c = 'x' 'y'",
        "a DIV 2 = 1",
        "a = 1 -- comment",
        "a /* comment */ = 1",
        "c = E'\\x41'",
        "c = $$x$$",
        "a = 1_000",
        # an array elsewhere than in = ANY (ARRAY[…])
        "a = ARRAY[1]",
        "abs(ARRAY[a]) = 1",
        "ARRAY[a] IS NULL",
        "a IN (1, ARRAY[2])",
        "a = 0x1F",
        "a = 12and",
        "a = 1; DROP TABLE t",
        "a%-1 = 0",
        "if(flag, flag, flag)",
        "a =",
        # what PostgreSQL accepts, or may accept
        "c IS JSON",
        "a = 'abc'",
        "größe = 1",
        "(a, b) = (1, 2)",
        "at > timestamptz '2020-01-01 00:00:00+00' + interval '1 day'",
        "age(timestamp '2020-01-01 00:00:00', timestamp '2020-01-01 00:00:00') IS NULL",
        "a = 1_000 AND flag = 'on'",
        # COLLATE is no part of b_expr
        "a BETWEEN '5' COLLATE \"C\" AND '7'",
        "c COLLATE \"C\" BETWEEN c || 'b' COLLATE \"C\" AND 'x'",
        "flag BETWEEN c ~~ 'b' COLLATE \"C\" AND true",
        # exact evaluation is not certain
        "c < 'm'",
        "c < 'm' COLLATE \"de_DE\"",
        "lower(c) = 'nsw'",
        "c ILIKE 'n%'",
        "c ~ 'N'",
        "md5(c) = 'x'",
        "j = '{}'",
        "at = '2020-01-01'",
        "d = 'tomorrow'",
        "t.a = 1",
        "a::numeric(5,2) = 1",
        "d < '5874898-01-01'",
        "d < timestamp '294277-01-01'",
    ],
)
def test_what_cannot_be_evaluated_exactly_is_refused_in_our_words(text: str) -> None:
    with pytest.raises(RowFilterError, match=r"^row filter cannot be evaluated by the subscriber: "):
        bound(text)


def test_deep_and_long_filters() -> None:
    long = " OR ".join(f"a = {number}" for number in range(1500))
    assert bound(long).matches(tuple_data(*VALUES))
    with pytest.raises(RowFilterError, match=r"nested too deeply|could not be parsed"):
        bound("(" * 500 + "flag" + ")" * 500)
    with pytest.raises(RowFilterError, match="too long"):
        bound(" OR ".join(["flag"] * 10_000))


class CountedRow(list[Any]):
    """A row that counts how often one of its values is read."""

    reads = 0

    def __getitem__(self, place: Any) -> Any:
        self.reads += 1
        return super().__getitem__(place)


@pytest.mark.parametrize(
    "form",
    [
        "({}) IS DISTINCT FROM a",
        "a IS NOT DISTINCT FROM ({})",
        "NULLIF({}, a)",
        "({}) BETWEEN a AND b",
        "({}) BETWEEN SYMMETRIC b AND b",
        "b BETWEEN SYMMETRIC ({}) AND a",
        "b NOT BETWEEN SYMMETRIC a AND ({})",
        "({}) IN (b, a AND b)",
        "({}) = ANY (ARRAY[b, a AND b])",
        "b = ANY (ARRAY[a, ({})])",
        "CASE ({}) WHEN b THEN a WHEN a AND b THEN a ELSE b END",
    ],
)
def test_nested_operands_are_evaluated_once(form: str) -> None:
    """The bug was that each level evaluated an operand twice: a filter with 30 levels did not end."""
    text = "a"
    for _ in range(8):
        text = form.format(text)
    _, found = bind_expression(parse_expression(text), dict.fromkeys("ab", TypeRegistry().resolve(BOOL, -1)))
    for values in product((True, False, None), repeat=2):
        row = CountedRow(values)
        found.evaluate(row)
        assert row.reads <= 8 * 8


def test_error_for_a_row_names_the_table_and_no_value() -> None:
    with pytest.raises(RowFilterError, match="division by zero") as caught:
        bound("a / b = 1").matches(tuple_data("6", "0", *VALUES[2:]))
    assert 'evaluating the row filter of table "public.t"' in caught.value.one_line()
    with pytest.raises(RowFilterError, match='column "b": invalid value for type int4'):
        bound("b = 1").matches(tuple_data("6", "secret", *VALUES[2:]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("c LIKE ANY (ARRAY['N%', 'x'])", "ANY that does not follow a comparison operator"),
        ("j::jsonb = '{}'", "a cast to jsonb"),
        ("at > at - interval '1 day'", "a constant of type interval"),
        ("n::numeric(5, 2) = 1", "a cast to numeric with a length or precision"),
    ],
)
def test_error_names_what_is_not_evaluated(text: str, message: str) -> None:
    with pytest.raises(RowFilterError) as caught:
        bound(text)
    assert str(caught.value) == f"row filter cannot be evaluated by the subscriber: {message}"


@pytest.mark.parametrize(
    ("text", "column", "value", "message"),
    [
        ("d::timestamp > '2020-01-01'", "d", "294277-01-01", "date out of range for timestamp"),
        ("COALESCE(d, timestamp '2020-01-01') > '2020-01-01'", "d", "294277-01-01", "date out of range for timestamp"),
        ("n < '1'::float8", "n", f"0.{'0' * 400}1", "value is out of range for type double precision"),
    ],
)
def test_conversion_out_of_range_fails_as_on_the_server(text: str, column: str, value: str, message: str) -> None:
    row = [value if each.name == column else given for each, given in zip(COLUMNS, VALUES, strict=True)]
    with pytest.raises(RowFilterError, match=message):
        bound(text).matches(tuple_data(*row))


@pytest.mark.timeout(10)
def test_like_of_a_long_text() -> None:
    """The bug was that each % tried all places of the text."""
    row = [*VALUES[:2], "a" * 20_000, *VALUES[3:]]
    assert bound("c NOT LIKE '%a%a%a%a%_b' AND c LIKE '%a%aa_%a%'").matches(tuple_data(*row))


@pytest.mark.parametrize(("text", "fails"), EVALUATED)
def test_parts_are_evaluated_when_the_server_evaluates_them(text: str, fails: bool) -> None:
    row = tuple_data("6", "0", *VALUES[2:])
    with pytest.raises(RowFilterError, match="division by zero") if fails else nullcontext():
        bound(text).matches(row)


@pytest.mark.parametrize("text", REFUSED)
def test_constants_that_the_server_evaluates_are_refused(text: str) -> None:
    with pytest.raises(RowFilterError, match="division by zero"):
        bound(text)


THREE = (Column("k", INT4, -1, True), Column("v", TEXT, -1, False), Column("big", TEXT, -1, False))
ROW = tuple[str | None, ...]


@pytest.mark.parametrize(
    ("old", "new", "becomes"),
    [
        (("1", "x", "big"), ("2", "x", "?"), None),
        (("1", "x", "big"), ("7", "x", "?"), Insert(1, tuple_data("7", "x", "big"))),
        (("7", "x", "big"), ("1", "x", "?"), Delete(1, None, tuple_data("7", "x", "big"))),
        (("7", "x", "big"), ("8", "x", "?"), Update(1, None, tuple_data("7", "x", "big"), tuple_data("8", "x", "?"))),
        (None, ("7", "x", "?"), Update(1, None, None, tuple_data("7", "x", "?"))),
        (None, ("1", "x", "?"), None),
    ],
)
def test_update_is_transformed(old: ROW | None, new: ROW, becomes: Insert | Update | Delete | None) -> None:
    table = relation("f", tuple(Column(each.name, each.type_oid, -1, True) for each in THREE))
    filters = combine([PublicationFilter(bound("k > 5", table))])
    assert filters is not None
    assert filters.transform(Update(1, None, None if old is None else tuple_data(*old), tuple_data(*new))) == becomes


def test_key_of_an_update_that_becomes_a_delete() -> None:
    table = relation("d", THREE)
    filters = combine([PublicationFilter(bound("k > 5", table))])
    assert filters is not None
    key = tuple_data("7", None, None)
    assert filters.transform(Update(1, key, None, tuple_data("1", "x", "y"))) == Delete(1, key, None)
    assert filters.transform(Delete(1, key, None)) == Delete(1, key, None)
    assert filters.transform(Delete(1, tuple_data("1", None, None), None)) is None


def test_publications_are_combined_by_operation() -> None:
    table = relation("d", THREE)
    low, high = PublicationFilter(bound("k < 2", table)), PublicationFilter(bound("k > 5", table), frozenset({"insert"}))
    both = combine([low, high])
    assert both is not None
    assert both.transform(Insert(1, tuple_data("7", "x", "y"))) is not None
    assert both.transform(Delete(1, tuple_data("7", None, None), None)) is None
    assert both.transform(Insert(1, tuple_data("3", "x", "y"))) is None
    everything = PublicationFilter(None, frozenset({"insert"}))
    inserts_pass = combine([low, everything])
    assert inserts_pass is not None
    assert inserts_pass.transform(Insert(1, tuple_data("3", "x", "y"))) is not None
    assert inserts_pass.transform(Delete(1, tuple_data("3", None, None), None)) is None
    assert combine([low, high, PublicationFilter(None)]) is None


def test_update_needs_the_replica_identity() -> None:
    table = relation("d", THREE)
    filter_ = bound("v = 'x'", table)
    with pytest.raises(RowFilterError) as caught:
        filter_.check_identity(table, "update")
    assert str(caught.value) == 'cannot update table "t"'
    assert caught.value.detail == "Column used in the publication WHERE expression is not part of the replica identity."
    with pytest.raises(RowFilterError, match='cannot delete from table "t"'):
        filter_.check_identity(table, "delete")
    filter_.check_identity(relation("f", THREE), "update")
    bound("k = 1", table).check_identity(table, "update")


def frames(*messages: Message) -> list[bytes]:
    return [encode_frame(XLogData(Lsn(1), Lsn(1), 0, encode(message))) for message in messages]


def read(found: list[bytes], *, in_stream: bool = False) -> list[Message]:
    payloads = [frame.payload for frame in map(decode_frame, found) if isinstance(frame, XLogData)]
    return [decode(payload, in_stream=in_stream and payload[:1] not in {b"S", b"E", b"c", b"A"}) for payload in payloads]


def test_frames_of_filtered_tables_only_are_changed() -> None:
    filters = FrameFilter({("public", "t"): parse_filter("k > 5")})
    other = Relation(2, "public", "other", "d", THREE)
    row, no_row = tuple_data("7", "x", "y"), tuple_data("1", "x", "y")
    truncate = Truncate(TruncateOption(0), (1, 2))
    given: list[Message] = [relation("d", THREE), other, Insert(1, row), Insert(1, no_row), Insert(2, no_row), truncate]
    sent = frames(*given)
    passed = filters.apply(sent)
    assert read(passed) == [given[0], given[1], given[2], given[4], given[5]]
    assert passed[2] is sent[2]
    update = Update(1, tuple_data("7", None, None), None, no_row)
    assert read(filters.apply(frames(update))) == [Delete(1, update.key, None)]


def test_relations_of_streamed_transactions() -> None:
    filters = FrameFilter({("public", "t"): parse_filter("k > 5")})
    swapped = (THREE[1], THREE[0], THREE[2])

    def chunk(*messages: Message) -> list[Message]:
        first = chunk.first  # type: ignore[attr-defined]
        chunk.first = False  # type: ignore[attr-defined]
        found = filters.apply(frames(StreamStart(10, first), *messages, StreamStop()))
        return read(found, in_stream=True)[1:-1]

    chunk.first = True  # type: ignore[attr-defined]
    filters.apply(frames(relation("d", THREE)))
    altered = Relation(1, "public", "t", "d", swapped, xid=10)
    kept = Insert(1, tuple_data("x", "7", "y"), xid=10)
    assert chunk(altered, kept, Insert(1, tuple_data("x", "1", "y"), xid=10)) == [altered, kept]
    # another transaction still has the columns of before
    assert filters.apply(frames(Insert(1, tuple_data("1", "x", "y")))) == []
    # after the abort of a subtransaction the publisher describes the table again
    filters.apply(frames(StreamAbort(10, 11)))
    assert chunk(Insert(1, tuple_data("1", "x", "y"), xid=10)) == []
    assert chunk(altered, kept) == [altered, kept]
    filters.apply(frames(StreamCommit(10, 0, Lsn(1), Lsn(2), 0)))
    assert filters.apply(frames(Insert(1, tuple_data("x", "1", "y")))) == []


def test_row_of_a_table_that_is_not_described_does_not_pass() -> None:
    filters = FrameFilter({("public", "t"): parse_filter("k > 5")})
    begin, row, end = StreamStart(10, True), Insert(1, tuple_data("1", "x", "y"), xid=10), StreamStop()
    assert len(filters.apply(frames(begin, replace(relation("d", THREE), xid=10), row, end))) == 3
    filters.apply(frames(StreamAbort(10, 11)))
    with pytest.raises(ProtocolError, match="no relation map entry for remote relation ID 1") as caught:
        filters.apply(frames(StreamStart(10, False), row, end))
    assert "describes its tables again" in str(caught.value.hint)
    with pytest.raises(ProtocolError, match="remote relation ID 1"):
        FrameFilter({("public", "t"): parse_filter("k > 5")}).apply(frames(Insert(1, tuple_data("1", "x", "y"))))


def test_filter_that_does_not_fit_is_an_error_at_the_first_row() -> None:
    filters = FrameFilter({("public", "t"): parse_filter("zz = 1")})
    described = frames(relation("d", THREE), Type(16_400, "public", "mood"))
    assert filters.apply(described) == described
    with pytest.raises(RowFilterError, match='column "zz" does not exist'):
        filters.apply(frames(Insert(1, tuple_data("1", "x", "y"))))
