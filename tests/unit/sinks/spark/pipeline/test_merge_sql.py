"""The statement of MERGE INTO: names are quoted, NULLs are equal, and what a key cannot hold is part of it."""

from __future__ import annotations

from datetime import date

import pyarrow as pa

from subscriber.interfaces import TableName
from subscriber.sinks.spark.pipeline.engines.merge_sql import delete_statement, merge_statement
from subscriber.sinks.spark.schema.table_schema import LakeColumn, TableSchema

PLAIN = TableSchema(
    TableName("public", "t"), "d", (LakeColumn("id", "id", pa.int32(), key=True), LakeColumn("a`b", "a`b", pa.string(), key=False))
)
DATED = TableSchema(
    TableName("public", "d"), "d", (LakeColumn("d'y", "d'y", pa.date32(), key=True), LakeColumn("v", "v", pa.string(), key=False))
)


def test_one_statement_deletes_updates_and_inserts() -> None:
    assert merge_statement("/lake/`t`", PLAIN, "changes", "_gone", (-3, 70)) == (
        "MERGE INTO delta.`/lake/``t``` t USING changes s ON t.`id` <=> s.`id` AND t.`id` >= -3 AND t.`id` <= 70 "
        "WHEN MATCHED AND s.`_gone` THEN DELETE "
        "WHEN MATCHED THEN UPDATE SET t.`id` = s.`id`, t.`a``b` = s.`a``b`, t.`_special` = s.`_special` "
        "WHEN NOT MATCHED AND NOT s.`_gone` THEN INSERT (`id`, `a``b`, `_special`) VALUES (s.`id`, s.`a``b`, s.`_special`)"
    )


def test_after_truncate_the_other_rows_are_deleted_in_the_same_statement() -> None:
    assert delete_statement("/lake/`t`") == "DELETE FROM delta.`/lake/``t```"
    plain = merge_statement("/t", PLAIN, "changes", "_gone", None)
    assert merge_statement("/t", PLAIN, "changes", "_gone", None, cleared=True) == f"{plain} WHEN NOT MATCHED BY SOURCE THEN DELETE"


def test_where_all_rows_are_there_none_is_inserted() -> None:
    assert merge_statement("/t", PLAIN, "changes", "_gone", None, known=True) == (
        "MERGE INTO delta.`/t` t USING changes s ON t.`id` <=> s.`id` "
        "WHEN MATCHED AND s.`_gone` THEN DELETE "
        "WHEN MATCHED THEN UPDATE SET t.`id` = s.`id`, t.`a``b` = s.`a``b`, t.`_special` = s.`_special`"
    )


def test_a_key_that_may_be_infinite_is_its_text_too() -> None:
    texts = [f"from_json({side}.`_special`, 'map<string,string>')['d\\'y']" for side in ("t", "s")]
    same = f"t.`d'y` <=> s.`d'y` AND {texts[0]} <=> {texts[1]}"
    assert f" ON {same} WHEN" in merge_statement("/t", DATED, "changes", "_gone", None)
    ranged = merge_statement("/t", DATED, "changes", "_gone", (date(2024, 1, 2), date(2024, 3, 4)))
    assert f" ON {same} AND t.`d'y` >= DATE'2024-01-02' AND t.`d'y` <= DATE'2024-03-04' WHEN" in ranged
