"""``wal2json`` in both formats. What is expected was compared with the plugin's own regression tests once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from subscriber.errors import ConfigurationError
from subscriber.plugins.context import LogicalDecodingContext, Record
from subscriber.plugins.feed import PluginFeed
from subscriber.plugins.wal2json import Wal2Json
from subscriber.protocol.capabilities import capabilities
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    BINARY,
    UNCHANGED,
    Begin,
    Column,
    Commit,
    Insert,
    LogicalMessage,
    Message,
    Relation,
    TupleData,
    Update,
)
from subscriber.types import TypeRegistry
from subscriber.types.pg_type import TypeFact, TypeKind
from tests.support.sink_postgres import Remote, row, truncate

COLUMNS = (Column("id", 23, -1, True), Column("v", 1043, 14, False), Column("n", 1700, 327_686, False), Column("b", 17, -1, False))
T = Relation(1, "public", "t", "d", COLUMNS)
FULL = Remote("t", "*id", "v", relation_id=1)


def written(*messages: Message, **options: str | None) -> list[str]:
    return written_with([], *messages, **options)


def written_with(types: Sequence[TypeFact], /, *messages: Message, **options: str | None) -> list[str]:
    records: list[Record] = []
    registry = TypeRegistry()
    registry.add(types)
    given = {name.replace("_", "-"): value for name, value in options.items()}
    feed = PluginFeed(
        Wal2Json(), LogicalDecodingContext("wal2json", given, capabilities=capabilities(180000), writer=records.append, types=registry)
    )
    feed.start()
    for message in (Begin(Lsn(0x100), 1_500_000, 5), T, *messages, Commit(0, Lsn(0x100), Lsn(0x108), 1_500_000)):
        feed.message(message)
    return [record.data.decode() for record in records]


def value(number: str, text: str | None, amount: str, data: str) -> TupleData:
    return row(number, text, amount, data)


INSERT = Insert(1, value("1", 'a"\n', "1.50", "\\x00ff"))
COLUMNS_1 = '"columnnames":["id","v","n","b"],"columntypes":["integer","character varying(10)","numeric(5,2)","bytea"]'


def test_format_1() -> None:
    change = f'{{"kind":"insert","schema":"public","table":"t",{COLUMNS_1},"columnvalues":[1,"a\\"\\n",1.50,"00ff"]}}'
    assert written(INSERT) == [f'{{"change":[{change}]}}']
    assert written(INSERT, INSERT, write_in_chunks=None) == ['{"change":[', change, f",{change}", "]}"]
    update = f'"kind":"update","schema":"public","table":"t",{COLUMNS_1},"columnvalues":[2,null,null,""]'
    key = '"oldkeys":{"keynames":["id"],"keytypes":["integer"],"keyvalues":['
    new = value("2", None, "NaN", "\\x")
    assert written(Update(1, None, None, new)) == [f'{{"change":[{{{update},{key}2]}}}}]}}']
    assert written(Update(1, row("1", None, None, None), None, new)) == [f'{{"change":[{{{update},{key}1]}}}}]}}']
    assert written(truncate(FULL)) == ['{"change":[]}']
    assert written(include_xids="on", include_timestamp="on") == ['{"xid":5,"timestamp":"2000-01-01 00:00:01.5+00","change":[]}']


def test_format_1_is_printed_prettily() -> None:
    found = written(INSERT, FULL.relation, FULL.delete("1", None), pretty_print="on", include_types="off", include_schemas="off")
    assert found == [
        '{\n\t"change": [\n'
        '\t\t{\n\t\t\t"kind": "insert",\n\t\t\t"table": "t",\n\t\t\t"columnnames": ["id", "v", "n", "b"],\n'
        '\t\t\t"columnvalues": [1, "a\\"\\n", 1.50, "00ff"]\n\t\t}\n'
        '\t\t,{\n\t\t\t"kind": "delete",\n\t\t\t"table": "t",\n'
        '\t\t\t"oldkeys": {\n\t\t\t\t"keynames": ["id"],\n\t\t\t\t"keyvalues": ["1"]\n\t\t\t}\n\t\t}\n'
        "\t]\n}"
    ]


def test_format_2() -> None:
    columns = (
        '[{"name":"id","type":"integer","value":1},{"name":"v","type":"character varying(10)","value":"a\\"\\n"},'
        '{"name":"n","type":"numeric(5,2)","value":1.50},{"name":"b","type":"bytea","value":"00ff"}]'
    )
    assert written(INSERT, format_version="2") == [
        '{"action":"B"}',
        f'{{"action":"I","schema":"public","table":"t","columns":{columns}}}',
        '{"action":"C"}',
    ]
    unchanged = TupleData(b"t" + bytes([UNCHANGED] * 3), [b"1", None, None, None])
    options = {"format_version": "2", "include_transaction": "off", "include_types": "off", "include_xids": "on"}
    assert written(Update(1, None, None, unchanged), truncate(FULL), **options) == [
        '{"action":"U","xid":5,"schema":"public","table":"t","columns":[{"name":"id","value":1}],"identity":[{"name":"id","value":1}]}',
        '{"action":"T","xid":5,"schema":"public","table":"t"}',
    ]
    assert written(INSERT, truncate(FULL), **options, actions="update, delete") == []
    assert written(INSERT, **options, numeric_data_types_as_string="on")[0].count('"value":"1') == 2


def tables(**options: str | None) -> list[str]:
    found = written(INSERT, odd, Insert(2, row("1")), truncate(FULL), format_version="2", include_transaction="off", **options)
    return [json.loads(line)["table"] for line in found]


odd = Relation(2, "Bar", "a.b ,*", "d", (Column("id", 23, -1, True),))


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("public.t", ["t", "t"]),
        ("*.t , Bar.x", ["t", "t"]),
        (r"Bar.a\.b\ \,\*", ["a.b ,*"]),
        ("Bar.*", ["a.b ,*"]),
        ("bar.*", []),
        ("*.*", ["t", "a.b ,*", "t"]),
        (r"\*.*", []),
        ("", []),
    ],
)
def test_tables_are_selected(listed: str, expected: list[str]) -> None:
    everything = tables()
    assert everything == ["t", "a.b ,*", "t"]
    assert tables(add_tables=listed) == expected
    assert tables(filter_tables=listed) == [name for name in everything if name not in expected]
    assert tables(add_tables="*.*", filter_tables=listed) == tables(filter_tables=listed)


def test_domains_are_replaced_by_their_base_types() -> None:
    domain = TypeFact(oid=20_000, namespace="public", name="price", kind=TypeKind.DOMAIN, element=1700, modifier=327_686)
    relation = Relation(1, "public", "t", "d", (Column("p", 20_000, -1, True),))

    def change(**options: str | None) -> dict[str, Any]:
        found = written_with([domain], relation, Insert(1, row("1.50")), include_type_oids="on", **options)
        first = json.loads(next(line for line in found if "public" in line or "price" in line or "numeric" in line))
        return dict(first["change"][0] if "change" in first else first["columns"][0])

    plain = change()
    assert (plain["columntypes"], plain["columntypeoids"], plain["columnvalues"]) == (["public.price"], [20_000], ["1.50"])
    based = change(include_domain_data_type="on")
    assert (based["columntypes"], based["columntypeoids"], based["columnvalues"]) == (["numeric(5,2)"], [1700], [1.5])
    assert change(include_domain_data_type="on", include_typmod="off")["columntypes"] == ["numeric"]
    assert change(format_version="2")["type"] == "public.price"
    found = change(format_version="2", include_domain_data_type="on")
    assert (found["type"], found["typeoid"], found["value"]) == ("numeric(5,2)", 20_000, "1.50")


def test_messages() -> None:
    inside, loose = LogicalMessage(True, Lsn(1), "p", b"a\0b"), LogicalMessage(False, Lsn(2), "q", "ü".encode())
    one = '{"kind":"message","transactional":true,"prefix":"p","content":"a"}'
    assert written(inside, loose) == [
        '{"change":[{"kind":"message","transactional":false,"prefix":"q","content":"ü"}]}',
        f'{{"change":[{one}]}}',
    ]
    assert written(inside, loose, format_version="2", include_transaction="off", include_xids="on", add_msg_prefixes="q, r") == [
        '{"action":"M","xid":null,"transactional":false,"prefix":"q","content":"ü"}'
    ]
    assert written(inside, format_version="2", include_transaction="off", filter_msg_prefixes="p") == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format_version": "3"}, "there are formats 1 and 2 only"),
        ({"include_pk": "on"}, "include-pk: pgoutput does not tell the primary key, only the replica identity"),
        ({"filter_origins": "1"}, "filter-origins: pgoutput does not tell the number of an origin, only its name"),
        ({"include_unchanged_toast": "on"}, 'option "include-unchanged-toast" = "on" is unknown'),
        ({"filter_tables": "t"}, 'could not parse value "t" for parameter "filter-tables"'),
        ({"add_tables": "public.t,"}, 'could not parse value "public.t,"'),
        ({"add_tables": "public.t public.u"}, "could not parse value"),
        ({"format_version": "2", "include_lsn": "on"}, "does not tell the LSNs of changes"),
        ({"include_lsn": "on"}, "end of the transaction is not known yet"),
        ({"actions": "insert, foo"}, 'could not parse value "foo" for parameter "actions"'),
        ({"include_xids": "x"}, "could not parse value"),
    ],
)
def test_wrong_options(options: dict[str, str | None], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        written(INSERT, **options)


def test_binary_values() -> None:
    with pytest.raises(ConfigurationError, match="wal2json prints text"):
        written(Insert(1, TupleData(bytes([BINARY] * 4), [b"", b"", b"", b""])))
