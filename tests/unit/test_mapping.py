"""``map``, ``columns``, ``rename`` and ``exclude_table``: the grammar, the names, and what becomes of the messages of a stream."""

from __future__ import annotations

from dataclasses import replace

import pytest

from subscriber.config import SubscriptionOptions
from subscriber.errors import ConfigurationError, ProtocolError
from subscriber.protocol.decoder import decode
from subscriber.protocol.encoder import encode
from subscriber.protocol.frames import PAYLOAD
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    Column,
    Delete,
    Insert,
    Message,
    Relation,
    StreamAbort,
    StreamCommit,
    StreamStart,
    StreamStop,
    Truncate,
    TruncateOption,
    TupleData,
    Update,
)
from subscriber.transaction.mapped_frames import MappedFrames

HEADER = b"w" + bytes(PAYLOAD - 1)
COLUMNS = tuple(Column(name, 25, -1, key) for name, key in (("a", True), ("b", False), ("c", False), ("d", False)))
TABLE = Relation(7, "public", "t", "d", COLUMNS)
LOG = Relation(8, "public", "log", "d", COLUMNS)
OTHER = Relation(9, "x", "t", "d", COLUMNS)


def options(*texts: str) -> SubscriptionOptions:
    return SubscriptionOptions.parse(texts)


def test_grammar() -> None:
    found = options(
        "map.Public.*=app.*",
        'map.public."Tä.b"=x."Y"',
        'map."a=""b".*="c=d".*',
        'columns.public.t=( a,"B c" )',
        'rename.public.t= A : X ,"B c":d',
        'exclude_table=public.log*, "A,b".c, [0-9]*',
    )
    # as it is stored and read again
    assert options(*(f"{name}={getattr(found, name)}" for name in ("map", "columns", "rename", "exclude_table"))) == found
    assert found.columns == '{"public.t": "(a, \\"B c\\")"}'
    mapping = found.mapping
    assert mapping.target(("public", "t")) == ("app", "t")
    assert mapping.target(("public", "Tä.b")) == ("x", "Y")
    assert mapping.target(('a="b', "t")) == ("c=d", "t")
    assert mapping.target(("other", "t")) == ("other", "t")
    assert mapping.sources(("app", "t")) == [("public", "t"), ("app", "t")]
    assert mapping.sources(("x", "Y")) == [("public", "Tä.b"), ("x", "Y")]
    assert mapping.sources(("public", "t")) == []
    assert mapping.kept(("public", "t"), ["z", "B c", "a"]) == ["B c", "a"]
    assert mapping.column(("public", "t"), "a") == "x"
    assert [mapping.excludes(name) for name in (("public", "logs"), ("s", "logs"), ("A,b", "c"), ("s", "7"))] == [True, False, True, True]
    assert not SubscriptionOptions().mapping
    given = SubscriptionOptions(map={"public.*": "app.*"}, columns={"public.t": "a, b"}, rename={"public.t": "a:x"})
    assert (given.map, given.columns, given.rename) == ('{"public.*": "app.*"}', '{"public.t": "(a, b)"}', '{"public.t": "a:x"}')


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["map.t=x.y"], '"t" is not of the form schema.table'),
        (["map.public.t=y"], '"y" is not of the form schema.table'),
        (["map.a.*=t.*", "map.b.*=t.*"], "map.a.* and map.b.*: both would be schema t of the target"),
        (["map.public.*=app.t"], "map.public.*=app.t: one is a table and the other one a schema"),
        (["map.a.t=x.t", "map.b.t=x.t"], "tables a.t and b.t of the publisher would both be table x.t of the target"),
        (["map.public.t=a.b", "map.Public.T=c.d"], 'conflicting or redundant options: "map.public.t" is given twice'),
        (["columns.public.t=(a"], '"(a" is not a list of columns'),
        (["columns.public.t=a, a"], 'column "a" is named twice'),
        (["rename.public.t=a"], '"a" does not rename columns'),
        (["rename.public.t=a:b, a:c"], 'column "a" is renamed twice'),
        (["rename.public.t=a:c, b:c"], 'column "c" is the new name of two columns'),
        (["columns.public.t=a", "rename.public.t=b:c"], 'column "b" of table public.t is renamed, and left out by columns'),
        (["columns.public.t=a, b", "rename.public.t=b:a"], 'two columns of table public.t would have the name "a"'),
        (["exclude_table=a.b.c"], 'invalid pattern of a name: "a.b.c"'),
        (["exclude_table=a[b"], 'invalid pattern of a name: "a[b": unterminated character set at position 1'),
        (["exclude_table=" + "a" * 1001], "exclude_table is longer than 1000 characters"),
        (["map.public.t=s." + "a" * 2000], "map is longer than 2000 characters"),
    ],
)
def test_bad_input(given: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        options(*given)
    assert str(raised.value) == message
    assert raised.value.hint


def sent(mapped: MappedFrames, *messages: Message) -> list[Message]:
    found, inside = [], mapped.in_stream
    for frame in mapped.apply([HEADER + encode(message) for message in messages]):
        assert frame.startswith(HEADER)
        message = decode(frame[PAYLOAD:], in_stream=inside)
        inside = inside or isinstance(message, StreamStart) if not isinstance(message, StreamStop) else False
        found.append(message)
    return found


def row(*values: bytes | None) -> TupleData:
    return TupleData(
        bytes(ord("n" if value is None else "u" if value == b"u" else "t") for value in values),
        [None if value == b"u" else value for value in values],
    )


def test_stream() -> None:
    mapped = MappedFrames(
        options("map.public.*=app.*", "columns.public.t=a,c,d", "rename.public.t=c:x", "exclude_table=public.log").mapping, {}
    )
    relation = Relation(7, "app", "t", "d", (COLUMNS[0], replace(COLUMNS[2], name="x"), COLUMNS[3]))
    assert sent(mapped, TABLE, LOG, OTHER) == [relation, OTHER]
    whole, cut = row(b"1", b"two", None, b"u"), row(b"1", None, b"u")
    key, cut_key = row(b"1", None, None, None), row(b"1", None, None)
    assert sent(mapped, Insert(7, whole), Insert(8, whole), Insert(9, whole)) == [Insert(7, cut), Insert(9, whole)]
    assert sent(mapped, Update(7, key, None, whole), Update(7, None, whole, whole), Update(7, None, None, whole)) == [
        Update(7, cut_key, None, cut),
        Update(7, None, cut, cut),
        Update(7, None, None, cut),
    ]
    assert sent(mapped, Delete(7, key, None), Delete(8, key, None)) == [Delete(7, cut_key, None)]
    cascade, both = TruncateOption.CASCADE, TruncateOption(3)
    assert sent(mapped, Truncate(both, (7, 8, 9)), Truncate(cascade, (8,)), Truncate(cascade, (7,))) == [
        Truncate(both, (7, 9)),
        Truncate(cascade, (7,)),
    ]
    # in a streamed transaction, another description, which its rollback takes back
    wide, five = replace(TABLE, columns=(*COLUMNS, Column("e", 25, -1, False)), xid=5), (b"1", b"2", None, b"4", b"5")
    assert sent(
        mapped,
        StreamStart(4, True),
        wide,
        Insert(7, row(*five), 5),
        Insert(8, whole, 5),
        Truncate(TruncateOption(0), (8, 7), 5),
        StreamStop(),
    ) == [
        StreamStart(4, True),
        replace(relation, xid=5),
        Insert(7, row(b"1", None, b"4"), 5),
        Truncate(TruncateOption(0), (7,), 5),
        StreamStop(),
    ]
    assert sent(mapped, StreamAbort(4, 5)) == [StreamAbort(4, 5)]
    assert sent(mapped, Insert(7, whole)) == [Insert(7, cut)]
    assert sent(mapped, StreamStart(6, True), wide, StreamStop(), StreamCommit(6, 0, Lsn(1), Lsn(2), 3))
    assert sent(mapped, Insert(7, row(*five))) == [Insert(7, row(b"1", None, b"4"))]
    with pytest.raises(ProtocolError, match="another number of columns than the relation has"):
        sent(mapped, Insert(7, whole))
    with pytest.raises(ProtocolError, match="no relation map entry for remote relation ID 77"):
        sent(mapped, Insert(77, whole))
    # renamed on the publisher: replicated from now on
    assert sent(mapped, replace(LOG, name="journal"), Insert(8, whole)) == [replace(LOG, namespace="app", name="journal"), Insert(8, whole)]


def test_damaged_rows() -> None:
    mapped = MappedFrames(options("columns.public.t=a,c").mapping, {})
    sent(mapped, TABLE)
    payload = encode(Update(7, None, row(b"1", b"two", None, b"u"), row(b"1", b"two", None, b"u")))
    for length in range(6, len(payload)):
        with pytest.raises(ProtocolError):
            # what is cut from a damaged message is damaged
            decode(mapped.apply([HEADER + payload[:length]])[0][PAYLOAD:])


def test_refused() -> None:
    mapped = MappedFrames(options("columns.public.t=b,c").mapping, {})
    sent(mapped, TABLE)
    values = row(b"1", b"2", b"3", b"4")
    assert sent(mapped, Insert(7, values)) == [Insert(7, row(b"2", b"3"))]
    with pytest.raises(ConfigurationError, match=r"column a of table public\.t is left out, and belongs to the replica identity"):
        sent(mapped, Update(7, None, None, values))
    # one that was published when the stream began
    mapped = MappedFrames(options("map.public.*=x.*").mapping, {("x", "t"): ("public", "t")})
    with pytest.raises(ConfigurationError, match=r"tables public.t and x.t of the publisher would both be table x.t of the target"):
        sent(mapped, OTHER)
    # one that may come when the other one is not published any more, or was never
    for given in ("map.public.*=x.*", "map.public.t=x.t"):
        with pytest.raises(ConfigurationError, match=r"tables public.t and x.t of the publisher would both be table x.t of the target"):
            sent(MappedFrames(options(given).mapping, {}), OTHER)
    assert sent(MappedFrames(options("map.public.*=x.*", "exclude_table=public.t").mapping, {}), OTHER) == [OTHER]
    mapped = MappedFrames(options("map.public.*=x.*", "map.x.t=x.t").mapping, {})
    assert sent(mapped, OTHER, LOG) == [OTHER, replace(LOG, namespace="x")]
    with pytest.raises(ConfigurationError, match=r"tables public.t and x.t of the publisher would both be table x.t of the target"):
        sent(mapped, TABLE)
    # a column that was renamed: without an error, its values would be lost
    for text in ("columns.public.t=a, before", "rename.public.t=before:x"):
        with pytest.raises(ConfigurationError, match=rf"{text[:6]}.*\.public\.t: the table has no published column before"):
            sent(MappedFrames(options(text).mapping, {}), TABLE)
