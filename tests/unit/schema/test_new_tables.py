"""What is created of new tables while others are copied."""

from __future__ import annotations

from subscriber.schema.archive import Entry
from subscriber.schema.restore import of_new_tables


def entry(number: int, type_: str, name: str, *needs: int) -> Entry:
    return Entry(number=number, type=type_, schema="public", name=name, owner="o", sql="", needs=frozenset(needs), before_data=True)


def test_nothing_is_done_to_tables_that_exist() -> None:
    entries = [
        entry(1, "TYPE", "kind"),
        entry(2, "TABLE", "p", 1),
        entry(3, "TABLE", "p1", 1, 2),
        entry(4, "TABLE", "p2", 1, 2),
        entry(5, "TABLE ATTACH", "p1", 2, 3),
        entry(6, "TABLE ATTACH", "p2", 2, 4),
        entry(7, "SEQUENCE", "p_id_seq", 2),
        entry(8, "VIEW", "of_both", 2, 4),
        entry(9, "VIEW", "of_old", 3),
        entry(10, "CONSTRAINT", "p p_pkey", 2),
        entry(11, "CONSTRAINT", "p1 p1_pkey", 3, 10),
        entry(12, "CONSTRAINT", "p2 p2_pkey", 4, 10),
        entry(13, "INDEX ATTACH", "p1_pkey", 10, 11),
        entry(14, "INDEX ATTACH", "p2_pkey", 10, 12),
        entry(15, "COMMENT", "TABLE p", 2),
        entry(16, "FUNCTION", "f", 1),
    ]
    kept = of_new_tables(entries, {("public", "p"), ("public", "p1"), ("other", "p2")})
    assert [each.number for each in kept] == [1, 4, 6, 8, 12, 14, 16]
