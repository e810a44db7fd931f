"""The names of views that ``spark-apply --register`` makes."""

from __future__ import annotations

from subscriber.interfaces import TableName
from subscriber.sinks.spark.pipeline.program.registration import VIEW, view_names


def test_names_that_collide() -> None:
    tables = [TableName(*name.split(".")) for name in ("a_b.c", "a.b_c", "p.t", "p.t_latest", "P.U", "p.u", "published.snapshot", "q.x")]
    found = view_names(tables)
    used = [name.lower() for view in found.values() for name in (view, f"{view}_latest")]
    assert len({VIEW, *used}) == 1 + 2 * len(tables)
    assert found[TableName("q", "x")] == "q_x"
    assert found[TableName("a", "b_c")].startswith("a_b_c_")
