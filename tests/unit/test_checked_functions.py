"""``check`` knows each function of PostgreSQL that a run uses."""

from __future__ import annotations

import re
from pathlib import Path

import subscriber
from subscriber.sinks.postgres import checks as target
from subscriber.walreceiver import checks as publisher

_PACKAGE = Path(subscriber.__file__).parent
# what only some verbs use, what is checked by itself, what is sent only to servers that have it, and names in texts of SQL
_OTHER_MODULES = re.compile(
    r"fences/|exported_snapshots|sequences|repair|scripts|unreplicated|table_sizes|new_publication|/snapshots|origins"
)
_OTHER_FUNCTIONS = {
    *("pg_current_wal_flush_lsn", "pg_current_wal_insert_lsn", "pg_replication_origin_session_reset", "pg_replication_origin_xact_setup"),
    *("has_column_privilege", "has_database_privilege", "has_function_privilege", "has_parameter_privilege", "has_schema_privilege"),
    *("has_table_privilege", "lastval", "currval", "setval"),
}


def used(folder: str) -> set[str]:
    modules = [path for path in (_PACKAGE / folder).rglob("*.py") if not _OTHER_MODULES.search(str(path))]
    return {name for path in modules for name in re.findall(r"pg_catalog\.(\w+)\(", path.read_text())}


def test_functions_of_the_target() -> None:
    assert used("sinks/postgres") - set(target._FUNCTIONS.split()) <= _OTHER_FUNCTIONS


def test_functions_of_the_publisher() -> None:
    assert used("walreceiver") - set(publisher._FUNCTIONS.split()) <= {"has_function_privilege"}
