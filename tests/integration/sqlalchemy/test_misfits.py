"""Tables that a target cannot have: ``check`` names each of them, and none stops or hides the others."""

from __future__ import annotations

import re

import pytest

from tests.support.database import Database
from tests.support.mariadb_database import MariaDatabase
from tests.support.program import running, subscriber
from tests.support.sqlalchemy_targets import OtherTarget, Replica


def _columns(number: int, kind: str) -> str:
    return ", ".join(f"c{place} {kind}" for place in range(number))


def _keyed(number: int, kind: str) -> str:
    return f"({_columns(number, f'{kind} NOT NULL')}, PRIMARY KEY ({', '.join(f'c{place}' for place in range(number))}))"


# by kind of target: table, its definition, and the message of check
EVERYWHERE = [
    ('"none"', "()", 'table "public.none" has no columns'),
    ('"case"', '(id int PRIMARY KEY, v text, "V" text)', 'columns "v" and "V" of table "public.case" have the same name'),
    ('"subscriber_position"', "(id int PRIMARY KEY)", 'table "public.subscriber_position" would be .* subscriber reserves for its own'),
]
SQLITE = [
    ("sqlite_x", "(id int PRIMARY KEY)", 'table "public.sqlite_x" would be table "sqlite_x" .* SQLite\'s own'),
    ('"SQLite_Sequence"', "(id int PRIMARY KEY)", 'table "public.SQLite_Sequence" would be table "SQLite_Sequence" .* SQLite\'s own'),
    ("rowids", "(rowid int, oid int, _rowid_ int)", 'table "public.rowids" has no key, and its columns hide'),
    ('other."FITS"', "(id int PRIMARY KEY)", None),
    ('"other__fits"', "(id int PRIMARY KEY)", 'tables "other.FITS" and "public.other__fits" would both be table "other__fits"'),
]
MARIADB = [
    ("wide", f"({_columns(1100, 'int')})", 'table "public.wide" cannot be created in the target: .*[Tt]oo many columns'),
    ("wide_row", f"({_columns(900, 'numeric(65,2)')})", 'table "public.wide_row" cannot be created in the target: Row size too large'),
    ("long_key", _keyed(20, "numeric(60,2)"), None),
    ("key_of_names", _keyed(16, "bytea"), None),
    ("key_of_32", _keyed(32, "int"), 'table "public.key_of_32" has a key of 32 columns'),
    ('"\U0001f418"', "(id int PRIMARY KEY)", 'table "public.\U0001f418" would be .* no characters beyond U'),
    ("emoji", '(id int PRIMARY KEY, "\U0001f418" text)', 'column "\U0001f418" of table "public.emoji": names have no characters beyond U'),
    ("blank", '(id int PRIMARY KEY, "x " text)', 'column "x " of table "public.blank": no name ends with a blank'),
    (f"long_schema_name.{'t' * 60}", "(id int PRIMARY KEY)", "where names have at most 64 characters"),
    ("innodbs", "(id int PRIMARY KEY, db_trx_id int)", 'table "public.innodbs" cannot be created in the target: .*db_trx_id'),
]
CASES = [("sqlite", SQLITE), ("mariadb", MARIADB)]


@pytest.mark.parametrize(("other_target", "more"), CASES, ids=["sqlite", "mariadb"], indirect=["other_target"])
def test_check_names_each_and_the_others_are_replicated(
    publisher18_db: Database, other_target: OtherTarget, more: list[tuple[str, str, str | None]]
) -> None:
    publisher18_db.execute("CREATE SCHEMA long_schema_name; CREATE SCHEMA other; CREATE TABLE fits (id int PRIMARY KEY, v text)")
    publisher18_db.execute("INSERT INTO fits VALUES (1, 'x'); CREATE PUBLICATION pub FOR TABLE fits")
    expected = []
    for table, definition, said in [*EVERYWHERE, *more]:
        publisher18_db.execute(f"CREATE TABLE {table} {definition}; ALTER PUBLICATION pub ADD TABLE {table}")
        if "KEY" not in definition:
            publisher18_db.execute(f"ALTER TABLE {table} REPLICA IDENTITY FULL")
        if said is not None:
            expected.append(said)
    pair = Replica(publisher18_db, other_target, ["--create-tables"])
    done = subscriber(*pair.arguments(verb="check"))
    assert done.status == 1
    errors = [line for line in done.output.splitlines() if line.startswith("error: ")]
    for said in expected:
        assert any(re.search(said, line) for line in errors), (said, done.output)
    assert len(errors) == len(expected), done.output
    # the others are copied and followed; those that are left out are named
    for value in ("copied", "followed"):
        publisher18_db.execute(f"UPDATE fits SET v = '{value}'")
        done = subscriber(*pair.arguments("--until-caught-up", "--allow-missing-tables"))
        assert done.status == 0, done.errors
        assert other_target.fetch("SELECT id, v FROM fits") == [(1, value)]
        for said in expected:
            assert re.search(said, done.errors), (said, done.errors)
    assert len(other_target.states()) == 1 + len(more) + len(EVERYWHERE) - len(expected)


@pytest.mark.parametrize("other_target", ["sqlite", "mariadb"], indirect=True)
def test_only_tables_that_cannot_be_created(publisher18_db: Database, other_target: OtherTarget) -> None:
    publisher18_db.execute('CREATE TABLE "none" (); CREATE PUBLICATION pub FOR TABLE "none"')
    done = subscriber(*Replica(publisher18_db, other_target, ["--create-tables"]).arguments("--until-caught-up"))
    assert done.status == 1
    assert 'table "public.none" has no columns' in done.errors


def test_type_without_a_binary_format(publisher18_db: Database, sqlite_file: OtherTarget) -> None:
    publisher18_db.execute("CREATE TABLE acl (id int PRIMARY KEY, a aclitem); CREATE TABLE fits (id int PRIMARY KEY)")
    publisher18_db.execute("INSERT INTO fits VALUES (1); CREATE PUBLICATION pub FOR TABLE acl, fits")
    pair = Replica(publisher18_db, sqlite_file, ["-o", "binary=true"])
    done = subscriber(*pair.arguments(verb="check"))
    assert done.status == 1
    assert 'error: column "a" of table "public.acl": type aclitem has no binary format' in done.output
    assert "binary = false" in done.output
    with running(*pair.arguments()) as program:
        program.says('synchronization of table "public.acl" failed')
        publisher18_db.execute("INSERT INTO fits VALUES (2)")
        sqlite_file.wait("SELECT id FROM fits ORDER BY id", [(1,), (2,)])


def test_1600_columns_in_sqlite(publisher18_db: Database, sqlite_file: OtherTarget) -> None:
    """SQLite takes 2000 columns, and expressions up to a depth of 1000."""
    for name, key in (("keyless", ""), ("keyed", ", PRIMARY KEY (c0)")):
        publisher18_db.execute(f"CREATE TABLE {name} ({_columns(1600, 'int')}{key}); ALTER TABLE {name} REPLICA IDENTITY FULL")
        publisher18_db.execute(f"INSERT INTO {name} (c0) VALUES (1), (2)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE keyless, keyed")
    pair = Replica(publisher18_db, sqlite_file)
    assert subscriber(*pair.arguments("--until-caught-up")).status == 0
    for name in ("keyless", "keyed"):
        publisher18_db.execute(f"UPDATE {name} SET c1599 = 7 WHERE c0 = 1; DELETE FROM {name} WHERE c0 = 2")
    done = subscriber(*pair.arguments("--until-caught-up"))
    assert (done.status, done.errors) == (0, "")
    for name in ("keyless", "keyed"):
        assert sqlite_file.fetch(f"SELECT * FROM {name}") == publisher18_db.fetch(f"SELECT * FROM {name}")


@pytest.mark.parametrize("characters", ["latin1", "utf8mb3"])
def test_character_set_that_lacks_characters(publisher18_db: Database, mariadb_db: MariaDatabase, characters: str) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text, u uuid); CREATE PUBLICATION pub FOR TABLE t")
    mariadb_db.execute(f"CREATE TABLE t (id int PRIMARY KEY, v text, u char(36)) CHARACTER SET {characters}")
    pair = Replica(publisher18_db, OtherTarget("mariadb", mariadb_db.url, mariadb_db.fetch, mariadb_db.execute))
    done = subscriber(*pair.arguments(verb="check"))
    assert f'warning: column "v" of table "public.t" has character set {characters} in the target' in done.output
    assert 'column "u"' not in done.output
    publisher18_db.execute("INSERT INTO t VALUES (1, '\U0001f418')")
    done = subscriber(*pair.arguments("--until-caught-up"))
    assert done.status == 1
    assert 'while copying table "public.t" column "v"' in done.errors
