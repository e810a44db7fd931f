"""An order that another program has written holds names, numbers and ranges: it decides neither SQL nor where a password goes."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from subscriber import ConfigurationError, TargetError
from subscriber.interfaces import TableName
from subscriber.interfaces.copy_parts import BlockRange, CopyPart
from subscriber.protocol.conninfo import confined
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.copy.order import CopyOrder
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.schema.table_schema import LakeColumn, TableSchema

EVIL = 'x"; DROP TABLE t; --'


def order(**changes: Any) -> CopyOrder:
    schema = TableSchema(TableName("public", "t"), "d", (LakeColumn(EVIL, "x", pa.int32(), True, (23, -1)),))
    part = CopyPart(TableName("public", EVIL), 16384, only=True, blocks=BlockRange(0, 10))
    known = {
        "directory": "copy/1-1",
        "base": "tables/public/t",
        "table_id": 1,
        "generation": 1,
        "snapshot_name": "s",
        "connection": "host=a",
    }
    made = {**known, "parts": (part,), "columns": (EVIL,), "column_types": (23,), "schema": schema, "lsn": Lsn(1), "workers": 1}
    return CopyOrder(**{**made, **changes})


def test_names_are_quoted(tmp_path: Path) -> None:
    storage = Storage.open(Location.of(str(tmp_path)))
    storage.make_directory("copy/1-1")
    order().place(storage)
    found = CopyOrder.find(storage, "copy/1-1")
    assert found == order()
    quoted = '"x""; DROP TABLE t; --"'
    assert found.query(0) == f"SELECT {quoted} FROM ONLY \"public\".{quoted} WHERE (ctid >= '(0,0)') AND (ctid < '(10,0)')"
    assert "DROP TABLE t; --" not in found.parts[0].check_query().replace(quoted, "")


@pytest.mark.parametrize(
    "changes",
    [
        {"parts": [["public", "t", 1, True, ["0,0)'); DROP TABLE t; --", None]]]},
        {"parts": [["public", "t", "1) OR true --", True, None]]},
        {"parts": [["public", "t", 1, "FALSE, DROP", None]]},
        {"columns": [["x"]]},
        {"base": "../../etc"},
        {"id": "1/../.."},
        {"snapshot": 1},
    ],
)
def test_evil_order_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    storage = Storage.open(Location.of(str(tmp_path)))
    storage.make_directory("copy/1-1")
    order().place(storage)
    path = tmp_path / "copy/1-1/order.json"
    document = {**json.loads(path.read_text())["document"], **changes}
    body = json.dumps(document, ensure_ascii=True, sort_keys=True)
    path.write_text(json.dumps({"format": 1, "crc": zlib.crc32(body.encode()), "document": document}))
    with pytest.raises(TargetError, match="is damaged"):
        CopyOrder.find(storage, "copy/1-1")


def test_address_of_an_order_gets_no_password_of_the_executor() -> None:
    assert confined("host=evil require_auth=password").endswith(" password='' require_auth='!password,!md5'")
    assert confined("host=service.example.org").startswith("host=service.example.org ")
    for parameter in ("service=s", "sslkeylogfile=/x", "gssdelegation = 1", "servicefile=/x"):
        with pytest.raises(ConfigurationError, match="the connection string in a file has"):
            confined(f"host=evil {parameter}")
