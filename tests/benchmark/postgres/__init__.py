"""How fast a subscription into PostgreSQL catches up, beside a native subscription and ``pg_recvlogical``.

``python -m tests.benchmark.postgres`` (``make bench SINK=postgres``). Each workload writes its WAL once, before any reader starts. Then
the readers take turns, three rounds, in another order each round. Each of them reads the same WAL: its slot is a copy of one slot. Each
applies it to a copy of one database. After each run the rows of the target are compared with the publisher's.

* ``pg_recvlogical`` writes to ``/dev/null``: the time that the publisher needs to decode and send.
* ``native`` is CREATE SUBSCRIPTION.
* ``subscriber`` is ``subscriber run``, in a process of its own.

Publisher and target are two servers on this machine, both without fsync, checkpoints and autovacuum, so that the disk matters little.

``make bench SINK=postgres WORKLOAD=parallel ROUNDS=2`` is about ``apply_workers``: two of them and four. Where the processor is the limit,
there is also a run with four in which every batch is applied in groups. From its processor time it is calculated what more cores would
give. This takes up to ten minutes on two cores.

The wall time is from the start of the stream until the last row is visible in the target. The start-up is given separately. Of an initial
copy, the wall time is from the first session on the publisher until all tables are synchronized.
"""
