"""A target in memory: a real sink, for tests of programs that use subscriptions.

::

    target = MemoryTarget()
    subscription = Subscription("replica", connection=..., publications=["pub"], target=MemorySink(target))
    ...
    assert target.rows("public.accounts") == [{"id": 1, "balance": Decimal("12.50")}]

``target.py`` is what outlives a sink; ``table.py`` holds rows, ``changes.py`` reads what is to be made of them, ``apply.py`` makes it;
``sink.py`` and ``tablesync.py`` are the contract.
"""

from subscriber.sinks.memory.sink import MemorySink
from subscriber.sinks.memory.table import MemoryColumn, MemoryTable, Values
from subscriber.sinks.memory.target import MemoryTarget

__all__ = ["MemoryColumn", "MemorySink", "MemoryTable", "MemoryTarget", "Values"]
