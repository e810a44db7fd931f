"""The URL of a lake: what it says, and what is refused."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from subscriber.errors import ConfigurationError
from subscriber.interfaces import PublishedTable, TableName
from subscriber.sinks.spark.catalog.checks import check_histories
from subscriber.sinks.spark.files.location import Location


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("spark://host/path", "names a host"),
        ("spark://", "names no directory"),
        ("spark:///lakes/a#1", "contains a #"),
        ("spark:///lakes/a#", "contains a #"),
        ("spark:///a/%2541/b", r"'/a/%41/b' is another one"),
        ("spark:///a%5Cb", "is another one"),
        ("spark:///lake?confirm=maybe", "unrecognized confirm value"),
        ("spark:///lake?colour=red", "unrecognized parameter"),
        ("spark:///lake?apply=always", "unrecognized apply value"),
        ("spark:///lake?apply=rewrite", "unrecognized apply value"),
        ("spark:///lake?deletion_vectors=no", 'unrecognized deletion_vectors value: "no"'),
        ("spark:///lake?target_rows=many", 'invalid value for parameter "target_rows"'),
        ("spark:///lake?batch_delay=soon", "invalid value"),
        ("spark:///lake?history.accounts=scd2", "parameter .history.. of a Spark target needs a table"),
        ("spark:///lake?history.public.accounts=scd3", 'unrecognized history value of table "public.accounts"'),
    ],
)
def test_a_url_that_says_nothing_is_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Location.parse(url)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("spark+s3://KEY:hush@bucket/prefix", "secret key"),
        ("spark+s3://KEY:0/hush@bucket/prefix", "secret key"),
        ("spark+abfs://container:hush@account.dfs.core.windows.net/prefix", "secret key"),
        ("spark://u:hush@h/lake", "names a host"),
        ("spark+s3://KEY:hush\u2100@bucket", "not a URL"),
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_shown(url: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as refused:
        Location.parse(url)
    assert "hush" not in f"{refused.value} {refused.value.hint} {refused.value.one_line()}"


def test_a_url_is_read() -> None:
    assert Location.parse("spark:///a%20b/?confirm=applied&batch_size=1MB") == Location(path="/a b", confirm="applied", batch_size=1024**2)
    assert Location.parse("spark:///lakes/a%231") == Location(path="/lakes/a#1")
    one = Location.parse("spark:///a?deletion_vectors.public.t=off&deletion_vectors.public.u=on")
    assert one == Location(path="/a", without_vectors=(TableName("public", "t"),))
    assert Location.parse("spark:///a?deletion_vectors=off") == Location(path="/a", deletion_vectors=False)
    assert Location.parse("spark:///a?apply=spark&target_rows=1000") == Location(path="/a", apply="spark", target_rows=1000)
    assert Location.parse("spark+hdfs://me@name:8020/lake") == Location(uri="hdfs://me@name:8020/lake")
    assert Location.parse("spark+abfs://container@account.dfs.core.windows.net/a").uri == "abfs://container@account.dfs.core.windows.net/a"
    assert Location.parse("spark+s3://bucket/prefix?batch_delay=1s") == Location(uri="s3://bucket/prefix", delay=1.0)
    assert Location.parse("spark+s3a://bucket/prefix") == Location(uri="s3://bucket/prefix")
    paced = Location.parse("spark:///a?freshness=1min&max_write_rate=10MB/s&retain_hours=48")
    assert paced == Location(path="/a", freshness=60.0, max_write_rate=10 * 1024**2, retain_hours=48)
    assert paced.changed({"freshness": "500ms"}) == Location(path="/a", freshness=0.5, max_write_rate=10 * 1024**2, retain_hours=48)


def test_landing_delay_is_a_small_part_of_the_freshness() -> None:
    assert Location.parse("spark:///a?freshness=500ms").batch_delay == pytest.approx(0.1)
    assert Location.parse("spark:///a?freshness=1min").batch_delay == pytest.approx(0.3)
    assert Location.parse("spark:///a?freshness=500ms&batch_delay=1s").batch_delay == pytest.approx(1.0)


@pytest.mark.parametrize("query", ["freshness=0s", "freshness=soon", "max_write_rate=0kB/s", "max_write_rate=fast", "retain_hours=0"])
def test_wrong_pace_is_rejected(query: str) -> None:
    with pytest.raises(ConfigurationError, match=f'invalid value for parameter "{query.partition("=")[0]}"'):
        Location.parse(f"spark:///a?{query}")


@pytest.mark.parametrize("query", ["freshness=5", "freshness=0", "freshness=0.5 ", "max_write_rate=10", "max_write_rate=10/s"])
def test_pace_needs_a_unit(query: str) -> None:
    with pytest.raises(ConfigurationError, match=r'invalid value for parameter "\w+": "\S+ ?" has no unit') as refused:
        Location.parse("spark:///a").changed({query.partition("=")[0]: query.partition("=")[2]})
    assert refused.value.hint in {"as in 500ms, 10s or 1min", "as in 10MB/s"}


@pytest.mark.parametrize("name", ["a#1", "a?b=c", "a b", "a:b", "50%", "file:"])
def test_directory_of_a_path_is_not_decoded(name: str) -> None:
    assert Location.of(f"/lakes/{name}/") == Location(path=f"/lakes/{name}")
    assert Location.of(f"spark:///lakes/{quote(name)}?confirm=applied") == Location(path=f"/lakes/{name}", confirm="applied")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("lake", "'lake' is not an absolute path"),
        ("file:/lake", "is not an absolute path"),
        ("file:///lake", '"file" is not a Spark target'),
        ("", "is not an absolute path"),
        ("/", "names no directory"),
        ("/a%41", "is another one"),
        ("/a\\b", "is another one"),
    ],
)
def test_invalid_urls_of_a_lake_are_rejected(target: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Location.of(target)


def test_histories_are_by_table() -> None:
    found = Location.parse("spark:///lake?history.public.accounts=scd2&batch_delay=1s&history.Sales%20EU.a.b=scd2").history
    assert found == (TableName("Sales EU", "a.b"), TableName("public", "accounts"))


def test_check_finds_histories_that_cannot_be() -> None:
    table = PublishedTable(
        name=TableName("public", "t"), relation_id=5, kind="r", columns=("id", "_valid_to"), key_columns=("id",), replica_identity="d"
    )
    asked = [table.name, TableName("public", "other")]
    found = {(finding.severity, finding.message) for finding in check_histories([table], asked)}
    assert found == {
        ("warning", 'table "public.t" gets no history: column "_valid_to" has the name of a column of it'),
        ("warning", 'table "public.other" of which a history is asked for is not published'),
    }
