"""``on_error = park``: a table that the target rejects is left out, the others continue, and reconciling brings it back."""

from __future__ import annotations

import asyncio

import pytest

from subscriber import Launcher, SubscriberError, SubscriptionOptions, create_subscription, drop_subscription
from subscriber.subscription.setup.synchronous_publisher import names_in, own_names
from subscriber.walreceiver.session import Session
from tests.support.database import Database
from tests.support.managed import create, launched, same
from tests.support.observation import until
from tests.support.program import slots, subscriber
from tests.support.replica import QUICK, at_work
from tests.support.roles import role as temporary_role

TABLES = ("good", "taken", "null", "narrow", "checked", "trigger", "denied", "gone", "column", "first", "second", "late", "part")
STATES = "SELECT srrelname::text, srsubstate::text FROM subscriber.pg_subscription_rel"
PARKED = "SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate::text = 'p'"


def options(*items: str) -> SubscriptionOptions:
    return SubscriptionOptions.parse(["on_error=park", "park_after=2", *items])


def tables(*databases: Database, names: tuple[str, ...] = TABLES) -> None:
    for database in databases:
        for name in names:
            partitioned = " PARTITION BY LIST (id)" if name == "part" else ""
            database.execute(f'CREATE TABLE "{name}" (id int PRIMARY KEY, v text){partitioned}')
        if "part" in names:
            database.execute("CREATE TABLE part_rest PARTITION OF part DEFAULT")


async def resync(target: Database, name: str, *names: str) -> None:
    arguments = [f"--resync=public.{table}" for table in names]
    done = await asyncio.to_thread(subscriber, "alter", name, f"--target={target.dsn}", *arguments)
    assert done.status == 0, done.errors


async def test_every_reason(publisher18_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    """Each kind of error parks its table and no other one; the rest of each transaction is applied, once."""
    publisher, target = publisher18_db, target_db
    tables(publisher, target)
    publisher.execute(f"""CREATE PUBLICATION pub FOR TABLE "{'", "'.join(TABLES)}" WITH (publish_via_partition_root)""")
    publisher.execute("CREATE TABLE counted (n int); ALTER TABLE counted REPLICA IDENTITY FULL; ALTER PUBLICATION pub ADD TABLE counted")
    target.execute("CREATE TABLE counted (n int)")
    name = await create(publisher, target, options=options())
    breaks = {
        "taken": ("INSERT INTO taken VALUES (5, 'of the target')", "DELETE FROM taken"),
        "null": ('ALTER TABLE "null" ALTER v SET NOT NULL', 'ALTER TABLE "null" ALTER v DROP NOT NULL'),
        "narrow": ("ALTER TABLE narrow ALTER v TYPE varchar(1)", "ALTER TABLE narrow ALTER v TYPE text"),
        "checked": ("ALTER TABLE checked ADD CONSTRAINT small CHECK (id < 3)", "ALTER TABLE checked DROP CONSTRAINT small"),
        "denied": (
            "CREATE ROLE {role}; ALTER TABLE denied OWNER TO {role}; REVOKE ALL ON denied FROM {role}",
            "ALTER TABLE denied OWNER TO CURRENT_USER; DROP ROLE {role}",
        ),
        "trigger": (
            """
            CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''no: %'', NEW; END';
            CREATE TRIGGER t BEFORE INSERT ON trigger FOR EACH ROW EXECUTE FUNCTION f(); ALTER TABLE trigger ENABLE REPLICA TRIGGER t
            """,
            "DROP TRIGGER t ON trigger",
        ),
        "late": (
            """
            ALTER TABLE late ADD CONSTRAINT other FOREIGN KEY (id) REFERENCES first DEFERRABLE INITIALLY DEFERRED;
            DO $$ BEGIN EXECUTE (SELECT format('ALTER TABLE late ENABLE ALWAYS TRIGGER %I', tgname) FROM pg_trigger
                                  WHERE tgrelid = 'late'::regclass AND tgfoid = 'pg_catalog."RI_FKey_check_ins"'::regproc); END $$
            """,
            "ALTER TABLE late DROP CONSTRAINT other",
        ),
        "part": ("ALTER TABLE part_rest ADD CONSTRAINT small CHECK (id < 3)", "ALTER TABLE part_rest DROP CONSTRAINT small"),
        "gone": ("DROP TABLE gone", "CREATE TABLE gone (id int PRIMARY KEY, v text)"),
        "column": ('ALTER TABLE "column" DROP v', 'ALTER TABLE "column" ADD v text'),
    }
    role = f"role_{target.name}"
    async with launched(target):
        publisher.execute("INSERT INTO counted VALUES (0)")
        await same(publisher, target, name, "SELECT n FROM counted")
        for number, (table, (broken, fixed)) in enumerate(breaks.items(), 1):
            target.execute(broken.replace("{role}", role))
            value = "NULL" if table == "null" else "'long'"
            # other tables' changes before, behind and in the same transaction
            publisher.execute(f"""
                BEGIN; INSERT INTO good VALUES ({number}, 'a'); INSERT INTO "{table}" VALUES (5, {value});
                UPDATE counted SET n = n + 1; COMMIT;
                UPDATE counted SET n = n + 1; INSERT INTO "{table}" VALUES (6, {value}); UPDATE good SET v = 'b' WHERE id = {number}
            """)
            await asyncio.to_thread(target.wait, PARKED, number)
            await asyncio.to_thread(target.wait, "SELECT n FROM counted", number * 2)
            row = target.fetch(
                "SELECT srerror, srerrortime IS NOT NULL, srsublsn IS NOT NULL FROM subscriber.pg_subscription_rel"
                f" WHERE srrelname = '{table}' AND srsubstate::text = 'p'"
            )
            assert len(row) == 1, (table, target.fetch(STATES))
            assert row[0][1:] == (True, True)
            assert f'"public.{table}"' in row[0][0] or table in row[0][0]
            assert "long" not in row[0][0]
            target.execute(fixed.replace("{role}", role))
    # a restart keeps them out
    publisher.execute("UPDATE counted SET n = n + 1; INSERT INTO taken VALUES (7, NULL); INSERT INTO gone VALUES (7, NULL)")
    async with launched(target):
        await asyncio.to_thread(target.wait, "SELECT n FROM counted", len(breaks) * 2 + 1)
        assert target.value(PARKED) == len(breaks)
        assert target.value("SELECT count(*) FROM gone") == 0
        await resync(target, name, *breaks)
        publisher.execute("UPDATE counted SET n = n + 1; UPDATE \"null\" SET v = 'w'; DELETE FROM taken WHERE id = 6")
        for table in ("good", "counted", *breaks):
            await same(publisher, target, name, f'SELECT * FROM "{table}" ORDER BY 1')
    assert target.value(PARKED) == 0
    assert target.value("SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srerror IS NOT NULL OR srsubstate::text <> 'r'") == 0
    assert caplog.text.count("is parked") == len(breaks)
    await drop_subscription(name, target=target.dsn, settings=QUICK)
    assert slots(publisher) == []


async def test_which_table_and_since_when(publisher18_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    """The table whose change is rejected, since the first time; a parked table keeps no other from being parked; recover brings it back."""
    publisher, target = publisher18_db, target_db
    names = ("good", "parent", "child", "fires", "checked")
    tables(publisher, target, names=names)
    publisher.execute(f"CREATE PUBLICATION pub FOR TABLE {', '.join(names)}; INSERT INTO parent VALUES (1, 'a'), (2, 'a'), (3, 'a')")
    name = await create(publisher, target, options=options())
    row = "SELECT srsublsn, srerrortime FROM subscriber.pg_subscription_rel WHERE srrelname = 'checked'"
    async with launched(target):
        await same(publisher, target, name, "SELECT * FROM parent ORDER BY 1")
        target.execute("""
            ALTER TABLE child ADD CONSTRAINT other FOREIGN KEY (id) REFERENCES parent DEFERRABLE INITIALLY DEFERRED;
            DO $$ DECLARE each record; BEGIN
                FOR each IN SELECT tgname, tgrelid::regclass AS name FROM pg_trigger
                    WHERE tgfoid IN ('pg_catalog."RI_FKey_noaction_del"'::regproc, 'pg_catalog."RI_FKey_check_ins"'::regproc)
                LOOP EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', each.name, each.tgname); END LOOP; END $$
        """)
        target.execute("INSERT INTO child VALUES (1, 'of the target')")
        # the report names the referencing table
        publisher.execute("BEGIN; DELETE FROM parent WHERE id = 1; INSERT INTO good VALUES (1, 'a'); COMMIT")
        await asyncio.to_thread(target.wait, "SELECT count(*) FROM good", 1)
        assert {table for table, state in target.fetch(STATES) if state == "p"} == {"parent"}
        publisher.execute("BEGIN; INSERT INTO child VALUES (9, 'a'); INSERT INTO good VALUES (2, 'a'); COMMIT")
        await asyncio.to_thread(target.wait, "SELECT count(*) FROM good", 2)
        assert {table for table, state in target.fetch(STATES) if state == "p"} == {"child", "parent"}
        target.execute("""
            CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''no''; END';
            CREATE TRIGGER t BEFORE INSERT ON fires FOR EACH ROW EXECUTE FUNCTION f(); ALTER TABLE fires ENABLE REPLICA TRIGGER t
        """)
        publisher.execute("INSERT INTO fires VALUES (1, 'a')")
        await asyncio.to_thread(target.wait, PARKED, 3)
        target.execute("ALTER TABLE checked ADD CONSTRAINT small CHECK (id < 3)")
        publisher.execute("INSERT INTO checked VALUES (5, 'a')")
        await asyncio.to_thread(target.wait, PARKED, 4)
        since = target.fetch(row)
        await resync(target, name, "checked")
        await until(lambda: caplog.text.count('table "public.checked" is parked') == 2, "the second time")
        assert target.fetch(row) == since
        publisher.execute("INSERT INTO checked VALUES (6, 'a')")
    told = [record.getMessage() for record in caplog.records if "is parked" in record.getMessage()]
    assert [(text.count("(hint: "), "--resync" in text) for text in told] == [(1, True)] * 5, told
    target.execute("ALTER TABLE child DROP CONSTRAINT other; DROP TRIGGER t ON fires")
    publisher.execute(f"SELECT pg_drop_replication_slot('{name}')")
    done = await asyncio.to_thread(subscriber, "recover", name, f"--target={target.dsn}")
    assert done.status == 0, done.errors
    assert target.fetch(row) == [(None, None)]
    async with launched(target):
        await asyncio.to_thread(target.wait, PARKED, 1)
        assert target.value(f"SELECT srerrortime > '{since[0][1]}' FROM ({row}) AS r")
        target.execute("ALTER TABLE checked DROP CONSTRAINT small")
        await resync(target, name, "checked")
        for table in names:
            await same(publisher, target, name, f"SELECT * FROM {table} ORDER BY 1")
    assert target.value("SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srerrortime IS NOT NULL") == 0
    await drop_subscription(name, target=target.dsn, settings=QUICK)


async def test_every_kind_of_transaction(publisher18_db: Database, target_db: Database) -> None:
    """Streamed, prepared, and TRUNCATE of several tables: nothing is applied twice, and nothing is lost."""
    publisher, target = publisher18_db, target_db
    names = ("good", "taken", "first", "second", "prepared")
    tables(publisher, target, names=names)
    for database in (publisher, target):
        database.execute("CREATE TABLE counted (n int); ALTER TABLE counted REPLICA IDENTITY FULL")
    publisher.execute(f"ALTER DATABASE {publisher.name} SET logical_decoding_work_mem = '64kB'")
    publisher.execute(f"CREATE PUBLICATION pub FOR TABLE counted, {', '.join(names)}; INSERT INTO counted VALUES (0)")
    target.execute("INSERT INTO taken VALUES (1, 'of the target')")
    name = await create(publisher, target, options=options("two_phase=true"))
    async with launched(target):
        await asyncio.to_thread(target.wait, "SELECT subtwophasestate::text FROM subscriber.pg_subscription", "e")
        # prepared with the table's changes, before it is parked: they are committed with the others
        publisher.execute("BEGIN; INSERT INTO taken VALUES (10, 'a'); INSERT INTO good VALUES (10, 'a'); PREPARE TRANSACTION 'before'")
        publisher.execute("""
            BEGIN; UPDATE counted SET n = n + 1; INSERT INTO good SELECT i, repeat('x', 400) FROM generate_series(1000, 1999) AS i;
            SAVEPOINT s; INSERT INTO taken VALUES (2, 'b'); ROLLBACK TO s; INSERT INTO taken VALUES (1, 'c'); COMMIT
        """)
        await asyncio.to_thread(target.wait, PARKED, 1)
        await asyncio.to_thread(target.wait, "SELECT n FROM counted", 1)
        assert publisher.value(f"SELECT stream_txns > 0 FROM pg_stat_replication_slots WHERE slot_name = '{name}'")
        publisher.execute("COMMIT PREPARED 'before'")
        await asyncio.to_thread(target.wait, "SELECT count(*) FROM taken WHERE id = 10", 1)
        # rejected at PREPARE
        target.execute("INSERT INTO prepared VALUES (1, 'of the target')")
        publisher.execute("""
            BEGIN; INSERT INTO prepared VALUES (1, 'a'); INSERT INTO taken VALUES (11, 'a'); UPDATE counted SET n = n + 1;
            PREPARE TRANSACTION 'rejected'
        """)
        publisher.execute("COMMIT PREPARED 'rejected'")
        await asyncio.to_thread(target.wait, "SELECT n FROM counted", 2)
        # a trigger of one of two tables rejects it
        publisher.execute("INSERT INTO first VALUES (1, 'a'); INSERT INTO second VALUES (1, 'a')")
        await asyncio.to_thread(target.wait, "SELECT count(*) FROM second", 1)
        target.execute("""
            CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''no''; END';
            CREATE TRIGGER t BEFORE TRUNCATE ON second FOR EACH STATEMENT EXECUTE FUNCTION f(); ALTER TABLE second ENABLE ALWAYS TRIGGER t
        """)
        publisher.execute("TRUNCATE first, second; UPDATE counted SET n = n + 1")
        await asyncio.to_thread(target.wait, "SELECT n FROM counted", 3)
        assert (target.value("SELECT count(*) FROM first"), target.value("SELECT count(*) FROM second")) == (0, 1)
        parked = {table for table, state in target.fetch(STATES) if state == "p"}
        assert parked == {"taken", "prepared", "second"}
        target.execute("DROP TRIGGER t ON second")
        done = await asyncio.to_thread(subscriber, "alter", name, f"--target={target.dsn}", "--resync=public.taken")
        assert (done.status, "when two_phase is enabled" in done.errors) == (1, True)
        for form in ("--disable", "-otwo_phase=false", "--enable"):
            assert (await asyncio.to_thread(subscriber, "alter", name, f"--target={target.dsn}", form)).status == 0
        await resync(target, name, *parked)
        for table in ("counted", *names):
            await same(publisher, target, name, f"SELECT * FROM {table} ORDER BY 1")
    await drop_subscription(name, target=target.dsn, settings=QUICK)


async def test_copies_and_ends(publisher18_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    """A table whose copy fails is parked; what waits for all tables says so; park_retry brings it back by itself."""
    publisher, target = publisher18_db, target_db
    names = tuple(f"t{number}" for number in range(8))
    tables(publisher, target, names=names)
    publisher.execute(f"CREATE PUBLICATION pub FOR TABLE {', '.join(names)}")
    publisher.execute("; ".join(f"INSERT INTO {each} SELECT i, 'a' FROM generate_series(1, 100) AS i" for each in names))
    target.execute("ALTER TABLE t3 ADD CONSTRAINT small CHECK (id < 50)")
    connection, arguments = f"--connection={publisher.dsn}", (f"--target={target.dsn}", "--publication=pub", "--name=s")
    parking = ("-oon_error=park", "-opark_after=2", "-cwal_retrieve_retry_interval=200ms")
    done = await asyncio.to_thread(subscriber, "run", connection, *arguments, *parking, "--until-caught-up")
    assert done.status == 1
    assert 'table "public.t3" is parked since ' in done.errors
    assert "--resync SCHEMA.TABLE" in done.errors
    assert sorted(target.fetch(STATES)) == [(each, "p" if each == "t3" else "r") for each in names]
    assert [slot for slot in slots(publisher) if slot != "s"] == []
    assert target.value("SELECT count(*) FROM t3") == 0
    done = await asyncio.to_thread(subscriber, "status", f"--target={target.dsn}")
    assert "t3: parked since " in done.output
    done = await asyncio.to_thread(subscriber, "status", f"--target={target.dsn}", "--check")
    assert "parked: public.t3 since " in done.output
    # managed from now on, with a retry
    done = await asyncio.to_thread(subscriber, "alter", "s", f"--target={target.dsn}", connection)
    assert done.status == 0, done.errors
    done = await asyncio.to_thread(subscriber, "alter", "s", f"--target={target.dsn}", "--enable")
    assert done.status == 0, done.errors
    publisher.execute("DELETE FROM t3 WHERE id = 7; INSERT INTO t2 VALUES (1000, 'b')")
    caplog.set_level("INFO", logger="subscriber")
    async with launched(target):
        await asyncio.to_thread(target.wait, "SELECT count(*) FROM t2", 101)
        done = await asyncio.to_thread(subscriber, "verify", "s", f"--target={target.dsn}")
        assert "it is parked since " in done.output + done.errors, done
        done = await asyncio.to_thread(subscriber, "cutover", "s", f"--target={target.dsn}", "--dry-run")
        assert (done.status, "table public.t3 is parked since " in done.output + done.errors) == (1, True), done
        done = await asyncio.to_thread(subscriber, "alter", "s", f"--target={target.dsn}", "-opark_retry=1s")
        assert done.status == 0, done.errors
        # it fails again, and is parked again
        await until(lambda: caplog.text.count("was parked, and is reconciled now") > 1, "a second attempt")
        await asyncio.to_thread(target.wait, PARKED, 1)
        target.execute("ALTER TABLE t3 DROP CONSTRAINT small")
        for each in names:
            await same(publisher, target, "s", f"SELECT * FROM {each} ORDER BY 1")
    await drop_subscription("s", target=target.dsn, settings=QUICK)
    assert slots(publisher) == []


async def test_where_it_would_be_wrong(publisher18_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    """A trigger that may read a parked table; a publisher that waits for the subscription; lakes do it by themselves."""
    publisher, target = publisher18_db, target_db
    tables(publisher, target, names=("good", "taken"))
    publisher.execute("CREATE PUBLICATION pub FOR TABLE good, taken")
    target.execute("""
        CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; INSERT INTO taken VALUES (1, 'of the target');
        CREATE TRIGGER "T" AFTER INSERT ON good FOR EACH ROW EXECUTE FUNCTION f(); ALTER TABLE good ENABLE REPLICA TRIGGER "T"
    """)
    said = 'trigger "T" of table "public.good" fires for changes, and may read a table that is parked'
    with pytest.raises(SubscriberError, match=said) as caught:
        await create(publisher, target, options=options())
    assert caught.value.hint == 'ALTER TABLE public.good DISABLE TRIGGER "T", or use on_error = retry'
    name = await create(publisher, target)
    done = await asyncio.to_thread(subscriber, "alter", name, f"--target={target.dsn}", "-oon_error=park")
    assert (done.status, said in done.errors, done.errors.count("\n")) == (1, True, 1)
    target.execute('ALTER TABLE good DISABLE TRIGGER "T"')
    for option in ("on_error=park", "park_after=1"):
        done = await asyncio.to_thread(subscriber, "alter", name, f"--target={target.dsn}", f"-o{option}")
        assert done.status == 0, done.errors
    async with launched(target):
        publisher.execute("INSERT INTO good VALUES (1, 'a')")
        await same(publisher, target, name, "SELECT * FROM good")
        # enabled meanwhile: then it is not parked, and nothing is lost
        target.execute('ALTER TABLE good ENABLE REPLICA TRIGGER "T"')
        publisher.execute("BEGIN; INSERT INTO taken VALUES (1, 'a'); INSERT INTO good VALUES (2, 'a'); COMMIT")
        await until(lambda: 'table "public.taken" cannot be parked: trigger "T"' in caplog.text, "the refusal")
        assert (target.value(PARKED), target.value("SELECT count(*) FROM good")) == (0, 1)
        target.execute("DELETE FROM taken")
        for table in ("good", "taken"):
            await same(publisher, target, name, f"SELECT * FROM {table} ORDER BY 1")
    await drop_subscription(name, target=target.dsn, settings=QUICK)


async def test_owner_that_the_role_cannot_become(publisher18_db: Database, target_db: Database) -> None:
    """SET ROLE is rejected before the change: that is the table's error as well."""
    publisher, target, name = publisher18_db, target_db, f"sub_{publisher18_db.name}"
    tables(publisher, target, names=("good", "denied"))
    publisher.execute("CREATE PUBLICATION pub FOR TABLE good, denied")
    with temporary_role(target) as plain:
        target.execute(f"""
            GRANT ALL ON DATABASE {target.name} TO {plain.name}; GRANT SET ON PARAMETER session_replication_role TO {plain.name};
            ALTER TABLE good OWNER TO {plain.name}; ALTER TABLE denied OWNER TO {plain.name}
        """)
        await create_subscription(
            name, connection=publisher.conninfo(), publications=["pub"], target=plain.conninfo, options=options(), settings=QUICK
        )
        async with at_work(Launcher(plain.conninfo, settings=QUICK)):
            publisher.execute("INSERT INTO denied VALUES (1, 'a')")
            await same(publisher, target, name, "SELECT * FROM denied")
            target.execute(f"ALTER TABLE denied OWNER TO CURRENT_USER; GRANT ALL ON denied TO {plain.name}")
            publisher.execute("BEGIN; INSERT INTO denied VALUES (2, 'a'); INSERT INTO good VALUES (2, 'a'); COMMIT")
            await asyncio.to_thread(target.wait, "SELECT count(*) FROM good", 1)
            assert dict(target.fetch(STATES)) == {"good": "r", "denied": "p"}
        await drop_subscription(name, target=plain.conninfo, settings=QUICK)


async def test_own_names(publisher18_db: Database) -> None:
    """The publisher compares the name that it knows: shortened, with other characters escaped, or that of the connection string."""
    async with await Session.connect(publisher18_db.conninfo(), application_name="check") as session:
        assert await own_names(session, "N" * 70) == {"check", "n" * 63}
        assert await own_names(session, "Ü'É") == {"check", "\\xc3\\x9c'\\xc3\\x89"}
    async with await Session.connect(f"{publisher18_db.conninfo()} application_name=MINE", application_name="check") as session:
        assert "mine" in await own_names(session, "s")


def test_names_of_synchronous_standbys() -> None:
    for setting, names in (
        ("", set()),
        ("s1, S2", {"s1", "s2"}),
        ('FIRST 2 (a, "b ""c")', {"a", 'b "c'}),
        ("any 1(*)", {"*"}),
        ("3 (x,y,z)", {"x", "y", "z"}),
    ):
        assert names_in(setting) == names
