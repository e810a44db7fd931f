"""A target in memory: a complete sink, for tests of programs that use subscriptions.

::

    target = MemoryTarget()
    subscription = Subscription("replica", connection=..., publications=["pub"], target=MemorySink(target))
    ...
    assert target.rows("public.accounts") == [{"id": 1, "balance": Decimal("12.50")}]

``target.py`` has the state that stays after a sink is closed, and ``table.py`` the rows of a table. ``accepted_changes.py`` reads the
changes of a transaction, and ``applier.py`` makes them. ``sink.py`` and ``memory_table_sink.py`` implement the interfaces of
:mod:`subscriber.interfaces`.
"""

from subscriber.sinks.memory.sink import MemorySink
from subscriber.sinks.memory.table import MemoryColumn, MemoryTable, Values
from subscriber.sinks.memory.target import MemoryTarget

__all__ = ["MemoryColumn", "MemorySink", "MemoryTable", "MemoryTarget", "Values"]
