"""The applier's jobs on Spark itself, in one session; and reading back by Spark."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from subscriber.errors import ConfigurationError, TargetError, TargetUnavailable
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.files.file_errors import AccessDenied, DamagedFile, StorageFull
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.session.java import find_java, java_version
from tests.unit.sinks.spark.model import NAMES, Publisher, read
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, storage
from tests.unit.sinks.spark.stream import batch, begun, make

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install '.[spark]'")
    from subscriber.sinks.spark.session.spark_session import spark_session

    try:
        session = spark_session("local[2]", {"spark.log.level": "ERROR", "spark.sql.shuffle.partitions": "2"})
    except ConfigurationError as error:
        pytest.skip(error.one_line())
    yield session
    session.stop()


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")
async def test_spark_gives_the_publishers_rows_and_reads_them_as_of_a_snapshot(tmp_path: Path, spark: SparkSession) -> None:
    from subscriber.sinks.spark.pipeline.engines.spark_engine import SparkEngine
    from subscriber.spark import snapshot as spark_snapshot

    publisher = Publisher(3)
    sink = await begun(make(tmp_path), tables=NAMES)
    work = Applier(storage(tmp_path), SparkEngine(spark, Location(path=str(tmp_path))), ApplierSettings(target_rows=30))
    history: dict[int, int] = {}
    for _ in range(2):
        for _ in range(3):
            await sink.apply(batch(publisher.transaction(30)))
            await sink.advance(Lsn(publisher.end))
        snapshot = all_rounds(work)
        assert read(tmp_path, snapshot) == publisher.rows()
        history[publisher.end] = len(publisher.keyed["keyed"])
    await sink.close()
    for lsn, count in history.items():
        assert spark_snapshot(spark, str(tmp_path), as_of_lsn=Lsn(lsn)).table("public.keyed").count() == count
    newest = spark_snapshot(spark, str(tmp_path))
    rows = newest.table("public.pairs").collect()
    expected = {(name, int(n or 0)) for name, n in publisher.keyed["pairs"]}
    assert {(row["name"], row["n"]) for row in rows} == expected
    with pytest.raises(TargetError, match="no published snapshot at or before 0/1"):
        spark_snapshot(spark, str(tmp_path), as_of_lsn="0/1")
    with pytest.raises(TargetError, match="is not in the snapshot"):
        newest.table("public.nothing")
    # a file that an executor cannot read stops its table only
    await _and_damage(tmp_path, publisher)
    (stop,) = all_rounds(work).stopped.values()
    assert ".parquet is damaged" in stop.error
    assert spark_snapshot(spark, str(tmp_path)).lsn > newest.lsn


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["a blank ümläut [x]{y}*? 50%", "a%zz:b"])
async def test_spark_reads_a_lake_in_a_directory_of_any_name(tmp_path: Path, spark: SparkSession, name: str) -> None:
    from subscriber.sinks.spark.pipeline.engines.spark_engine import SparkEngine
    from subscriber.spark import snapshot as spark_snapshot

    publisher, lake = Publisher(4), tmp_path / name
    sink = await begun(make(Path(quote(str(lake)))), tables=NAMES)
    await sink.apply(batch(publisher.transaction(20)))
    await sink.advance(Lsn(publisher.end))
    await sink.close()
    snapshot = all_rounds(Applier(storage(lake), SparkEngine(spark, Location(path=str(lake))), ApplierSettings(target_rows=30)))
    assert read(lake, snapshot) == publisher.rows()
    assert spark_snapshot(spark, f"spark://{quote(str(lake))}").table("public.keyed").count() == len(publisher.keyed["keyed"])


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("number", "kind", "line"),
    [
        (
            errno.ENOSPC,
            StorageFull,
            "cannot write {}/a: no space left (ENOSPC) (hint: make room, or run the applier: it removes landed files)",
        ),
        (
            errno.EACCES,
            AccessDenied,
            "cannot write {}/a: permission denied (EACCES) (hint: give this user the right to read and write there)",
        ),
        (0, DamagedFile, "{}/a is damaged (hint: restore it from a backup, or start over in a new directory)"),
        (errno.EIO, TargetUnavailable, "cannot read or write {}/a: EIO (hint: check that the file system is available)"),
    ],
)
def test_error_on_an_executor_keeps_its_kind_and_its_hint(
    tmp_path: Path, spark: SparkSession, number: int, kind: type[TargetError], line: str
) -> None:
    """The bug was a second hint, which was wrong after the round was published."""
    from subscriber.sinks.spark.pipeline.engines.spark_engine import SparkEngine

    def fails(storage: Storage, item: str) -> None:
        if item == "b":
            return
        if not number:
            raise DamagedFile(storage.what(item), item)
        with storage.reading(item):
            raise OSError(number, "told by the system")

    engine = SparkEngine(spark, Location(path=str(tmp_path)))
    assert engine.outcomes(fails, ["a", "b"], [1, 1], "test")[1] is None, "the others go on"
    with pytest.raises(TargetError) as raised:
        engine.each(fails, ["a"], [1], "test")
    assert type(raised.value) is kind
    assert getattr(raised.value, "path", "a") == "a"
    assert raised.value.one_line() == line.format(tmp_path)


async def _and_damage(path: Path, publisher: Publisher) -> None:
    """A file of a table loses its footer: only whoever merges into it sees that."""
    sink = await make(path).open("replica", lambda _: None)
    publisher.forget_described()
    await sink.apply(batch(publisher.transaction(60)))
    await sink.close()
    for file in (path / "tables/public/keyed").glob("*.parquet"):
        content = file.read_bytes()
        file.write_bytes(content[:-8] + b"\0" * 8)


def _java(directory: Path, output: str) -> Path:
    program = directory / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{output}' >&2\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("output", "version"),
    [('openjdk version "17.0.15" 2025-04-15', 17), ('java version "1.8.0_392"', 8), ('openjdk version "25" 2025', 25), ("no", None)],
)
def test_javas_version_is_read(tmp_path: Path, output: str, version: int | None) -> None:
    assert java_version(str(_java(tmp_path, output))) == version


def test_a_java_that_is_missing_or_too_old_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match="Spark needs Java, but found none"):
        find_java(lambda: tmp_path)
    _java(tmp_path, 'openjdk version "11.0.2"')
    with pytest.raises(ConfigurationError, match=r"Spark needs Java 17 or later, but .* is Java 11"):
        find_java(lambda: tmp_path)
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(ConfigurationError, match="JAVA_HOME=/nowhere is not a Java program"):
        find_java(lambda: tmp_path)
