"""``verification.json``: the last verification of each table of a lake. It is for monitoring; nothing else depends on it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any, Final

from subscriber.catalog.verifications import Systems, TableVerification
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.lake import Lake
from subscriber.sinks.spark.catalog.status_files import read_quietly
from subscriber.sinks.spark.files.documents import write_document
from subscriber.sinks.spark.files.storage import Storage
from subscriber.threads import run_in_thread

__all__ = ["LakeVerifications", "read_verifications"]

_DOCUMENT: Final = "verification.json"


class LakeVerifications:
    """See :class:`subscriber.catalog.verifications.Verifications`."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    async def systems(self) -> Systems:
        lake = await run_in_thread(lambda: Lake.find(self._storage))
        if lake is None:
            return Systems("", "")
        return Systems(lake.position.system_identifier if lake.position is not None else "", lake.target_identifier)

    async def read(self) -> Mapping[TableName, TableVerification]:
        return await run_in_thread(lambda: read_verifications(self._storage))

    async def save(self, found: Collection[TableVerification]) -> None:
        await run_in_thread(lambda: self._save({each.table: each for each in found}))

    def _save(self, found: Mapping[TableName, TableVerification]) -> None:
        tables = [_written(each) for each in {**read_verifications(self._storage), **found}.values()]
        write_document(self._storage, _DOCUMENT, {"tables": tables}, durable=False)


def read_verifications(storage: Storage) -> dict[TableName, TableVerification]:
    """Return the last verification of each table that has one."""
    return {each.table: each for each in map(_read, read_quietly(storage, _DOCUMENT).get("tables", ()))}


def _written(each: TableVerification) -> dict[str, Any]:
    names = {"table": [each.table.namespace, each.table.name], "lsn": str(each.lsn), "whole_lsn": str(each.whole_lsn)}
    return {**asdict(each), **names}


def _read(values: Mapping[str, Any]) -> TableVerification:
    lsns = {name: Lsn.parse(values[name]) for name in ("lsn", "whole_lsn")}
    return TableVerification(**{**values, **lsns, "table": TableName(*values["table"])})
