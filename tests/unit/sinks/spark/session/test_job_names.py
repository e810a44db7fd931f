"""Names of Spark jobs."""

from __future__ import annotations

from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.session.jobs import job_name


def test_job_is_named_by_phase_table_and_lsns() -> None:
    name = job_name("MERGE INTO", [TableName("public", "orders")], Lsn(0x10), Lsn(0x20))
    assert name == "MERGE INTO: public.orders, 0/10 to 0/20"
    assert job_name("initial copy", ["public.a", "public.b"]) == "initial copy: public.a, public.b"


def test_packed_job_names_tables_up_to_a_length() -> None:
    name = job_name("apply", [f"public.table{number}" for number in range(200)], to=Lsn(0x20))
    assert name.startswith("apply: public.table0, public.table1, ")
    assert name.endswith(" more, up to 0/20")
    assert len(name) < 260
    shown = name.count("table")
    assert f" and {200 - shown} more" in name
