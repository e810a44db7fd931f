"""The PostgreSQL sink: rows, columns, keys, TRUNCATE, positions."""

from __future__ import annotations

import asyncio
import logging
import resource

import pytest

from subscriber.errors import ProtocolError, RelationError
from subscriber.protocol.encoder import encode
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import LogicalMessage, Type
from tests.support.database import WAIT_SECONDS, Database
from tests.support.sink_postgres import START, UNCHANGED, Remote, SpooledOnce, opened, truncate


async def test_changes_in_order(any_target_db: Database) -> None:
    any_target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    remote = Remote("t", "*id", "v")
    async with opened(any_target_db) as feed:
        done = await feed.apply(
            remote.relation,
            remote.insert(1, "a"),
            remote.insert(2, "b"),
            remote.update(1, "c"),
            remote.delete(2, None),
            remote.insert(2, None),
            remote.update(3, None, old=(2, None)),
        )
        assert any_target_db.fetch("SELECT * FROM t ORDER BY id") == [(1, "c"), (3, None)]
        assert feed.position() == done.end_lsn
        assert feed.durable == [done.end_lsn]
        counted = feed.sink.statistics
        assert (counted.transactions, counted.inserts, counted.updates, counted.deletes) == (1, 3, 2, 1)
        assert (counted.confl_update_missing, counted.confl_delete_missing) == (0, 0)


async def test_relations_stay_known_and_change(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text, w text)")
    first, second = Remote("t", "*id", "v"), Remote("t", "w", "*id", "v")
    async with opened(target_db) as feed:
        await feed.apply(first.relation, first.insert(1, "a"))
        await feed.apply(first.insert(2, "b"))
        await feed.apply(first.insert(3, "c"), second.relation, second.insert("x", 4, "d"))
        await feed.apply(second.update("y", 1, "a"))
        assert target_db.fetch("SELECT id, v, w FROM t ORDER BY id") == [(1, "a", "y"), (2, "b", None), (3, "c", None), (4, "d", "x")]


async def test_streamed_transactions_carry_xids(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    remote = Remote("t", "*id")
    async with opened(target_db) as feed:
        transaction = feed.transaction()
        transaction.prefixed = True
        for plain in (encode(remote.relation), encode(remote.insert(1)), encode(truncate(remote)), encode(remote.insert(2))):
            transaction.records.append(plain[:1] + (9000 + len(plain)).to_bytes(4, "big") + plain[1:])
        await feed.opened.apply(feed.batch(transaction))
        assert target_db.fetch("SELECT id FROM t") == [(2,)]


async def test_records_that_are_no_rows(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    remote = Remote("t", "*id")
    async with opened(target_db) as feed:
        message = LogicalMessage(True, Lsn(1), "prefix", b"content")
        await feed.apply(Type(99999, "public", "mood"), message, remote.relation, remote.insert(1))
        assert target_db.fetch("SELECT id FROM t") == [(1,)]


async def test_unknown_relation(target_db: Database) -> None:
    async with opened(target_db) as feed:
        with pytest.raises(ProtocolError, match="no relation map entry for remote relation ID 4711"):
            await feed.apply(Remote("t", "*id").insert(1))
        with pytest.raises(ProtocolError, match="no relation map entry for remote relation ID 4711"):
            await feed.apply(truncate(Remote("t", "*id")))
        assert feed.position() == START


async def test_columns_by_name_and_extra_ones(any_target_db: Database) -> None:
    any_target_db.execute("""
        CREATE TABLE t (
            extra int DEFAULT 7, v text, id int PRIMARY KEY, doubled int GENERATED ALWAYS AS (id * 2) STORED, n int NOT NULL DEFAULT 3
        )
    """)
    remote = Remote("t", "*id", "v")
    async with opened(any_target_db) as feed:
        await feed.apply(remote.relation, remote.insert(1, "a"), remote.insert(2, "b"))
        any_target_db.execute("UPDATE t SET extra = 100 WHERE id = 1")
        await feed.apply(remote.update(10, "z", old=(1, None)))
        assert any_target_db.fetch("SELECT id, v, extra, doubled, n FROM t ORDER BY id") == [(2, "b", 7, 4, 3), (10, "z", 100, 20, 3)]


async def test_table_without_columns(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t ()")
    remote = Remote("t")
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, remote.insert(), remote.insert())
        assert target_db.value("SELECT count(*) FROM t") == 2


async def test_unchanged_toast(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, big text, v int, w text)")
    remote = Remote("t", "*id", "big", "v", "w")
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, remote.insert(1, "long", 1, "w"), remote.insert(2, UNCHANGED, 2, "w"))
        await feed.apply(
            remote.update(1, UNCHANGED, 5, "x"),
            remote.update(3, UNCHANGED, 6, UNCHANGED, old=(2, None, None, None)),
            remote.update(1, "new", UNCHANGED, "y"),
        )
        assert target_db.fetch("SELECT * FROM t ORDER BY id") == [(1, "new", 5, "y"), (3, None, 6, "w")]


async def test_update_that_sets_nothing(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    target_db.execute("CREATE TABLE always (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY)")
    target_db.execute("INSERT INTO t VALUES (1); INSERT INTO always OVERRIDING SYSTEM VALUE VALUES (1)")
    plain, always = Remote("t", "*id", relation_id=1), Remote("always", "*id", relation_id=2)
    async with opened(target_db) as feed:
        await feed.apply(plain.relation, always.relation, plain.update(UNCHANGED, old=(1,)), always.update(1), always.update(1, old=(1,)))
        assert feed.sink.statistics.updates == 3
        assert target_db.fetch("SELECT id FROM t UNION ALL SELECT id FROM always") == [(1,), (1,)]


async def test_swapping_and_moving_keys(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (a int, b int, v text, PRIMARY KEY (a, b))")
    remote = Remote("t", "*a", "*b", "v")
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, remote.insert(1, 1, "x"), remote.insert(2, 2, "y"))
        await feed.apply(
            remote.update(9, 9, "x", old=(1, 1, None)),
            remote.update(1, 1, "y", old=(2, 2, None)),
            remote.update(2, 2, "x", old=(9, 9, None)),
        )
        assert target_db.fetch("SELECT * FROM t ORDER BY a") == [(1, 1, "y"), (2, 2, "x")]


async def test_missing_rows_are_skipped_counted_and_logged(any_target_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    any_target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    any_target_db.execute("CREATE TABLE f (id int, v text)")
    remote, full = Remote("t", "*id", "v"), Remote("f", "id", "v", identity="f", relation_id=2)
    async with opened(any_target_db) as feed:
        with caplog.at_level(logging.INFO, logger="subscriber"):
            done = await feed.apply(
                remote.relation,
                full.relation,
                remote.update(1, "S3CRET"),
                remote.delete(2, None),
                full.update(1, "S3CRET", old=(1, "old S3CRET")),
                full.delete(1, "S3CRET"),
                remote.insert(5, "there"),
            )
        assert any_target_db.fetch("SELECT * FROM t") == [(5, "there")]
        assert feed.position() == done.end_lsn
        counted = feed.sink.statistics
        assert (counted.confl_update_missing, counted.confl_delete_missing, counted.updates, counted.deletes) == (2, 2, 0, 0)
        for table in ("t", "f"):
            assert caplog.text.count(f'conflict detected on relation "public.{table}"') == 1
        assert caplog.text.count("conflict=update_missing: Could not find the row to be updated.") == 2
        assert caplog.text.count("conflict=delete_missing: Could not find the row to be deleted.") == 2
        assert "S3CRET" not in caplog.text


async def test_gate_hides_tables(target_db: Database) -> None:
    target_db.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)")
    a, b = (Remote(name, "*id", relation_id=number) for number, name in enumerate(("a", "b"), 1))
    async with opened(target_db) as feed:
        feed.closed = {"public.b"}
        target_db.execute("INSERT INTO b VALUES (0)")
        await feed.apply(a.relation, b.relation, a.insert(1), b.insert(1), b.delete(0))
        await feed.apply(truncate(a, b), a.insert(2))
        await feed.apply(truncate(b))
        assert target_db.fetch("SELECT * FROM a") == [(2,)]
        assert target_db.fetch("SELECT * FROM b") == [(0,)]
        assert feed.sink.statistics.skipped_tables == {"public.b"}


async def test_gate_is_asked_by_final_lsn(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    remote = Remote("t", "*id")
    async with opened(target_db) as feed:
        transactions = [feed.transaction(remote.relation, remote.insert(number)) for number in (1, 2, 3)]
        since = transactions[1].final_lsn
        feed.subscribe("public", "t")
        target_db.execute(f"UPDATE subscriber.pg_subscription_rel SET srsubstate = 's', srsublsn = '{since}'")
        batch = feed.batch(*transactions)
        await feed.opened.apply(type(batch)(batch.transactions, lambda _relation, final_lsn: final_lsn >= since))
        assert target_db.fetch("SELECT id FROM t ORDER BY id") == [(2,), (3,)]


async def test_truncate_several_tables(any_target_db: Database) -> None:
    any_target_db.execute("""
        CREATE TABLE parent (id int GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY);
        CREATE TABLE child (id serial PRIMARY KEY, parent int REFERENCES parent);
        CREATE TABLE heir () INHERITS (child);
        INSERT INTO parent DEFAULT VALUES; INSERT INTO child (parent) VALUES (1); INSERT INTO heir (id) VALUES (77)
    """)
    parent, child = Remote("parent", "*id", relation_id=1), Remote("child", "*id", "parent", relation_id=2)
    async with opened(any_target_db) as feed:
        await feed.apply(parent.relation, child.relation, truncate(parent, child))
        assert any_target_db.fetch("SELECT id FROM child") == [(77,)]  # the inheriting table's own row
        any_target_db.execute("INSERT INTO child DEFAULT VALUES")
        assert any_target_db.fetch("SELECT id FROM ONLY child") == [(2,)]
        await feed.apply(truncate(child, parent, restart=True))
        any_target_db.execute("INSERT INTO parent DEFAULT VALUES; INSERT INTO child (parent) VALUES (1)")
        assert any_target_db.fetch("SELECT p.id, c.id FROM parent p, ONLY child c") == [(1, 1)]
        assert feed.sink.statistics.truncates == 2


async def test_share_of_a_truncate_while_a_referencing_table_is_not_ours(any_target_db: Database) -> None:
    """The bug was that both workers, each with its own table of the two, were rejected for ever."""
    any_target_db.execute("""
        CREATE TABLE parent (id serial PRIMARY KEY, born int GENERATED ALWAYS AS IDENTITY);
        CREATE TABLE child (parent int REFERENCES parent);
        CREATE TABLE heir () INHERITS (parent);
        INSERT INTO parent DEFAULT VALUES; INSERT INTO parent DEFAULT VALUES; INSERT INTO child VALUES (1); INSERT INTO heir VALUES (77, 77)
    """)
    parent, child = Remote("parent", "*id", "born", relation_id=1), Remote("child", "parent", relation_id=2)
    async with opened(any_target_db) as feed:
        feed.closed = {"public.child"}
        await feed.apply(parent.relation, child.relation, truncate(parent, child))
        assert any_target_db.fetch("SELECT id FROM parent") == [(77,)]
        any_target_db.execute("INSERT INTO parent DEFAULT VALUES")
        assert any_target_db.fetch("SELECT id, born FROM ONLY parent") == [(3, 3)]
        await feed.apply(truncate(child, parent, restart=True))
        any_target_db.execute("INSERT INTO parent DEFAULT VALUES")
        assert any_target_db.fetch("SELECT id, born FROM ONLY parent") == [(1, 1)]
        assert any_target_db.fetch("SELECT parent FROM child") == [(1,)]
        assert feed.sink.statistics.truncates == 2
        feed.closed = {"public.parent"}
        any_target_db.execute("UPDATE subscriber.pg_subscription_rel SET srsubstate = 'f' WHERE srrelid = 'parent'::regclass")
        await feed.apply(truncate(child, parent))
        assert any_target_db.value("SELECT count(*) FROM child") == 0
        assert any_target_db.value("SELECT count(*) FROM ONLY parent") == 1


async def test_truncate_of_partitions_with_their_root(target_db: Database) -> None:
    target_db.execute("""
        CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id);
        CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10);
        CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (10) TO (20);
        INSERT INTO p VALUES (1), (11)
    """)
    root, first = Remote("p", "*id", relation_id=1), Remote("p1", "*id", relation_id=2)
    async with opened(target_db) as feed:
        await feed.apply(first.relation, truncate(first))
        assert target_db.fetch("SELECT id FROM p") == [(11,)]
        await feed.apply(root.relation, truncate(first, root))
        assert target_db.value("SELECT count(*) FROM p") == 0


async def test_described_again_behind_a_truncate_of_partitions(any_target_db: Database) -> None:
    """Reading the partitions' keys took locks on them, and waited for ever for the transaction's own TRUNCATE."""
    any_target_db.execute("""
        CREATE TABLE p (id int, v int) PARTITION BY RANGE (id);
        CREATE TABLE p1 (id int PRIMARY KEY, v int); ALTER TABLE p ATTACH PARTITION p1 FOR VALUES FROM (0) TO (10);
        CREATE TABLE p2 (v int, id int PRIMARY KEY); ALTER TABLE p ATTACH PARTITION p2 FOR VALUES FROM (10) TO (20);
        CREATE TABLE other (id int PRIMARY KEY)
    """)
    root, other = Remote("p", "*id", "v", relation_id=1), Remote("other", "*id", relation_id=2)
    # enough of them for the TRUNCATE to be under way
    many = [other.insert(number) for number in range(5000)]
    async with opened(any_target_db) as feed, asyncio.timeout(WAIT_SECONDS):
        await feed.apply(root.relation, other.relation, root.insert(1, 1), root.insert(11, 1))
        again = [root.insert(2, 1), root.insert(12, 1)]
        await feed.apply(truncate(root), *many, root.relation, *again, root.update(12, 2), root.delete(2, None))
        assert any_target_db.fetch("SELECT id, v FROM p") == [(12, 2)]


async def test_truncate_is_restricted(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE local (t int REFERENCES t)")
    remote = Remote("t", "*id")
    async with opened(target_db) as feed:
        with pytest.raises(Exception, match="cannot truncate a table referenced in a foreign key constraint"):
            await feed.apply(remote.relation, truncate(remote))


async def test_partitioned_target(any_target_db: Database) -> None:
    any_target_db.execute("""
        CREATE TABLE p (id int, region text, v text, PRIMARY KEY (id, region)) PARTITION BY LIST (region);
        CREATE TABLE east (v text, region text NOT NULL, junk int, id int NOT NULL);
        ALTER TABLE east DROP COLUMN junk;
        ALTER TABLE p ATTACH PARTITION east FOR VALUES IN ('east');
        CREATE TABLE west PARTITION OF p FOR VALUES IN ('west')
    """)
    remote = Remote("p", "*id", "*region", "v")
    async with opened(any_target_db) as feed:
        await feed.apply(remote.relation, remote.insert(1, "east", "a"), remote.insert(2, "west", "b"), remote.insert(3, "east", "c"))
        assert any_target_db.fetch("SELECT id FROM east ORDER BY id") == [(1,), (3,)]
        await feed.apply(
            remote.update(1, "west", "moved", old=(1, "east", None)), remote.update(2, "west", "b2"), remote.delete(3, "east", None)
        )
        assert any_target_db.fetch("SELECT id, v FROM west ORDER BY id") == [(1, "moved"), (2, "b2")]
        assert any_target_db.value("SELECT count(*) FROM east") == 0


async def test_partitioned_target_with_keys_on_partitions_only(target_db: Database) -> None:
    target_db.execute("""
        CREATE TABLE p (id int, region text) PARTITION BY LIST (region);
        CREATE TABLE east PARTITION OF p (PRIMARY KEY (id)) FOR VALUES IN ('east');
        CREATE TABLE west PARTITION OF p (PRIMARY KEY (id)) FOR VALUES IN ('west')
    """)
    remote = Remote("p", "*id", "region")
    async with opened(target_db) as feed:
        await feed.apply(
            remote.relation, remote.insert(1, "east"), remote.insert(2, "west"), remote.update(1, "west"), remote.delete(2, None)
        )
        assert target_db.fetch("SELECT id, region FROM west") == [(1, "west")]
        target_db.execute("CREATE TABLE keyless PARTITION OF p FOR VALUES IN ('mid')")
        with pytest.raises(RelationError, match="has neither REPLICA IDENTITY index nor PRIMARY KEY column"):
            await feed.apply(remote.relation, remote.update(1, "east"))


async def test_identity_always(any_target_db: Database) -> None:
    any_target_db.execute("""
        CREATE TABLE keyed (
            id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text, extra text DEFAULT 'e', g int GENERATED ALWAYS AS (1) STORED
        );
        CREATE TABLE beside (id int PRIMARY KEY, n int GENERATED ALWAYS AS IDENTITY, v text, extra text DEFAULT 'e');
        CREATE TABLE whole (n int GENERATED ALWAYS AS IDENTITY, v text, extra text DEFAULT 'e')
    """)
    keyed, beside = Remote("keyed", "*id", "v", relation_id=1), Remote("beside", "*id", "n", "v", relation_id=2)
    whole = Remote("whole", "n", "v", identity="f", relation_id=3)
    async with opened(any_target_db) as feed:
        await feed.apply(
            keyed.relation,
            beside.relation,
            whole.relation,
            keyed.insert(50, "a"),
            beside.insert(1, 60, "b"),
            whole.insert(70, "c"),
            whole.insert(71, "c"),
        )
        any_target_db.execute("UPDATE keyed SET extra = 'kept'; UPDATE beside SET extra = 'kept'; UPDATE whole SET extra = 'kept'")
        await feed.apply(
            keyed.update(50, "a2"),
            keyed.update(51, "a3", old=(50, None)),
            beside.update(1, 61, UNCHANGED),
            whole.update(70, "c2", old=(70, "c")),
            whole.update(72, "c3", old=(71, "c")),
        )
        assert any_target_db.fetch("SELECT * FROM keyed") == [(51, "a3", "kept", 1)]
        assert any_target_db.fetch("SELECT * FROM beside") == [(1, 61, "b", "kept")]
        assert any_target_db.fetch("SELECT * FROM whole ORDER BY n") == [(70, "c2", "kept"), (72, "c3", "kept")]
        assert feed.sink.statistics.updates == 5


async def test_triggers_and_rules(target_db: Database) -> None:
    target_db.execute("""
        CREATE TABLE t (id int PRIMARY KEY, v text);
        CREATE TABLE seen (id serial, what text);
        CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN INSERT INTO public.seen (what) VALUES (TG_NAME || ' ' || TG_OP); RETURN NEW; END $$;
        CREATE TRIGGER ordinary BEFORE INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION note();
        CREATE TRIGGER replica BEFORE INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION note();
        CREATE TRIGGER always BEFORE INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION note();
        ALTER TABLE t ENABLE REPLICA TRIGGER replica; ALTER TABLE t ENABLE ALWAYS TRIGGER always;
        CREATE RULE instead AS ON INSERT TO t DO INSTEAD NOTHING;
        CREATE TABLE child (t int REFERENCES t)
    """)
    remote, child = Remote("t", "*id", "v", relation_id=1), Remote("child", "t", identity="n", relation_id=2)
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, child.relation, child.insert(404), remote.insert(1, "a"), remote.update(1, "b"))
        assert target_db.fetch("SELECT what FROM seen ORDER BY id") == [
            ("always INSERT",),
            ("replica INSERT",),
            ("always UPDATE",),
            ("replica UPDATE",),
        ]
        assert target_db.fetch("SELECT t FROM child") == [(404,)]  # foreign keys are the publisher's matter


async def test_names_that_need_quotes(target_db: Database) -> None:
    target_db.execute('CREATE SCHEMA "S x"; CREATE TABLE "S x"."a""b%s" ("Id" int PRIMARY KEY, "x.""%s$1" text, "select" text)')
    remote = Remote('a"b%s', "*Id", 'x."%s$1', "select", namespace="S x")
    async with opened(target_db) as feed:
        await feed.apply(
            remote.relation, remote.insert(1, "a", "b"), remote.update(1, "c", UNCHANGED), truncate(remote), remote.insert(2, "d", "e")
        )
        assert target_db.fetch('SELECT * FROM "S x"."a""b%s"') == [(2, "d", "e")]


async def test_batches_replay_as_nothing(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int)")
    remote = Remote("t", "id", identity="n")
    async with opened(target_db) as feed:
        transactions = [feed.transaction(remote.relation, remote.insert(number)) for number in range(3)]
        await feed.opened.apply(feed.batch(*transactions[:2]))
        await feed.opened.apply(feed.batch(*transactions))
        await feed.reopen()
        await feed.opened.apply(feed.batch(*transactions))
        assert target_db.fetch("SELECT id FROM t ORDER BY id") == [(0,), (1,), (2,)]
        assert feed.durable[-1] == transactions[-1].end_lsn


async def test_spools_are_freed(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    remote = Remote("t", "*id")
    async with opened(target_db) as feed:
        spool = SpooledOnce([[encode(remote.relation)], [encode(remote.insert(1)), encode(remote.insert(2))]])
        transaction = feed.transaction(remote.insert(3))
        transaction.spool, transaction.spilled = spool, 3
        await feed.opened.apply(feed.batch(transaction))
        assert spool.discarded == 1
        await feed.opened.apply(feed.batch(transaction))
        assert spool.discarded == 2
        assert target_db.fetch("SELECT id FROM t ORDER BY id") == [(1,), (2,), (3,)]


async def test_large_transaction_takes_bounded_memory(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    remote = Remote("t", "*id", "v")
    rows = 60_000

    def chunks() -> object:
        yield [encode(remote.relation)]
        for start in range(0, rows, 1000):
            yield [encode(remote.insert(number, "x" * 1500)) for number in range(start, start + 1000)]

    async with opened(target_db) as feed:
        await feed.apply(remote.relation, remote.insert(-1, ""))
        transaction = feed.transaction()
        transaction.spool, transaction.spilled = SpooledOnce(chunks()), rows + 1  # type: ignore[arg-type]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await feed.opened.apply(feed.batch(transaction))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert target_db.value("SELECT count(*) FROM t") == rows + 1
        # 90 MB went through
        assert grown < 32 * 1024


async def test_values_larger_than_the_pipelines_budget(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v bytea)")
    remote = Remote("t", "*id", "v")
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, *(remote.insert(number, "\\x" + f"{number:02x}" * 3_000_000) for number in range(4)))
        assert target_db.value("SELECT sum(length(v)) FROM t") == 12_000_000


async def test_more_statements_than_are_kept_prepared(target_db: Database) -> None:
    width = 10
    target_db.execute(f"CREATE TABLE t (id int PRIMARY KEY, {', '.join(f'c{number} int' for number in range(width))})")
    remote = Remote("t", "*id", *(f"c{number}" for number in range(width)))
    async with opened(target_db) as feed:
        patterns = range(2**width)
        updates = (
            remote.update(1, *(pattern if pattern >> bit & 1 else UNCHANGED for bit in range(width))) for pattern in [*patterns, *patterns]
        )
        await feed.apply(remote.relation, remote.insert(1, *(None,) * width), *updates)
        last = 2**width - 1
        assert target_db.fetch("SELECT * FROM t") == [(1, *(last,) * width)]
        session = feed.opened.session
        assert (await session.fetch("SELECT count(*) FROM pg_prepared_statements"))[0][0] == 500


async def test_advance_moves_the_position(target_db: Database) -> None:
    async with opened(target_db) as feed:
        await feed.opened.advance(Lsn(0x5000))
        assert feed.position() == Lsn(0x5000)
        assert feed.durable == [Lsn(0x5000)]
        await feed.opened.advance(Lsn(0x4000))
        assert feed.position() == Lsn(0x5000)


@pytest.mark.parametrize("option", ["off", "local", "on"])
async def test_durable_means_flushed(target_db: Database, option: str) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    remote = Remote("t", "*id")
    async with opened(target_db, synchronous_commit=option) as feed:
        session = feed.opened.session
        assert (await session.fetch("SHOW synchronous_commit"))[0][0] == option
        done = await feed.apply(remote.relation, remote.insert(1))
        if option != "off":
            assert feed.durable == [done.end_lsn]
        await feed.opened.close()
        assert feed.durable[-1] == done.end_lsn


async def test_asynchronous_commits_are_reported_when_flushed(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    remote = Remote("t", "*id")
    async with opened(target_db, synchronous_commit="off") as feed:
        done = await feed.apply(remote.relation, remote.insert(1))
        async with asyncio.timeout(20):
            while not feed.durable:
                await asyncio.sleep(0.01)
        assert feed.durable == [done.end_lsn]


async def test_skipped_transaction_still_describes_its_relations(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    remote = Remote("t", "*id")
    async with opened(target_db) as feed:
        first = await feed.apply(remote.relation, remote.insert(1))
        await feed.reopen()
        await feed.opened.apply(feed.batch(first))
        await feed.apply(remote.insert(2))
    assert target_db.fetch("SELECT id FROM t ORDER BY id") == [(1,), (2,)]
