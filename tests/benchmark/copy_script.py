"""An initial copy as a script: COPY or SELECT on the publisher, ``executemany`` in the target.

``python -m tests.benchmark.copy_script DSN TARGET`` copies table ``t`` to TARGET, a ``sqlite:///`` or ``mariadb://`` URL. It prints the
seconds, and the seconds of the processor, from its first connection to its commit. Everything is one transaction, and no state is kept.
"""

from __future__ import annotations

import sys
import time

import psycopg2

from tests.benchmark.plain_script import connect

_PIECE = 10_000


def main(dsn: str, url: str) -> tuple[float, float]:
    """Copy; the seconds that it took, and those of the processor."""
    began, processor = time.monotonic(), time.process_time()
    target, place = connect(url)
    insert = f"INSERT INTO t (id, a, b, c) VALUES ({place}, {place}, {place}, {place})"
    writer = target.cursor()
    publisher = psycopg2.connect(dsn)
    # a cursor on the server: the rows do not fit into memory in general
    reader = publisher.cursor("copied")
    reader.execute("SELECT id, a, b, c FROM t")
    while rows := reader.fetchmany(_PIECE):
        writer.executemany(insert, rows)
    target.commit()
    found = time.monotonic() - began, time.process_time() - processor
    publisher.close()
    return found


if __name__ == "__main__":
    wall, cpu = main(*sys.argv[1:])
    sys.stdout.write(f"{wall} {cpu}\n")
