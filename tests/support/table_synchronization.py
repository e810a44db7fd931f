"""What tests of table synchronization share: copies in parts, the states of tables, and the slots that are left."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tests.support.database import Database
from tests.support.replica import QUICK

STATES: Final = "SELECT srrelid::regclass::text, srsubstate::text FROM subscriber.pg_subscription_rel ORDER BY 1"
IN_PARTS: Final = replace(QUICK, copy_range_size=64 * 1024, max_copy_workers_per_table=3)
SLOTS: Final = "SELECT slot_name::text FROM pg_replication_slots WHERE database = current_database() ORDER BY 1"


def only_the_main_slot(publisher: Database) -> bool:
    return publisher.fetch(SLOTS) == [(f"replica_{publisher.name}",)]
