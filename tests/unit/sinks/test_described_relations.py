"""A relation that is described again: with publish_via_partition_root, the root is, once for each partition that has a change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from subscriber.protocol.messages import Column, Relation
from subscriber.sinks.described_relations import DescribedRelations
from subscriber.sinks.spark.landing import row_encoder

ROOT = Relation(7, "public", "root", "d", (Column("id", 20, -1, key=True), Column("v", 25, -1, key=False)))


class _Described(DescribedRelations):
    """Notes which target tables are forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten: list[int] = []

    def forget_targets(self) -> None:
        self.forgotten.append(0)

    def _forget_target(self, relation_id: int) -> None:
        self.forgotten.append(relation_id)


@pytest.mark.parametrize("make", [_Described, row_encoder.DescribedRelations])
def test_only_another_description_is_new(make: Callable[[], DescribedRelations]) -> None:
    described = make()
    assert described.define(ROOT)
    assert not described.define(replace(ROOT))
    # streamed, by a transaction or subtransaction
    assert not any(described.define(replace(ROOT, xid=xid)) for xid in (700, 701, None))
    for other in (
        replace(ROOT, name="renamed"),
        replace(ROOT, replica_identity="f"),
        replace(ROOT, columns=ROOT.columns[:1]),
        replace(ROOT, columns=(ROOT.columns[0], replace(ROOT.columns[1], type_modifier=12))),
        replace(ROOT, columns=(ROOT.columns[0], replace(ROOT.columns[1], key=True))),
    ):
        assert described.define(other)
        assert not described.define(replace(other, xid=702))
        assert described.define(ROOT)


def test_an_equal_description_forgets_no_target() -> None:
    described = _Described()
    described.define(ROOT)
    described.define(replace(ROOT, xid=700))
    assert described.forgotten == [7]
    described.define(replace(ROOT, name="renamed"))
    assert described.forgotten == [7, 7]
