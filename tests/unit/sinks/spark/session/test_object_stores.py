"""What Spark is told about a lake in an object store."""

from __future__ import annotations

import pytest

from subscriber.sinks.spark.session.object_stores import hadoop_uri, s3a_conf


@pytest.mark.parametrize(
    ("uri", "expected"),
    [("s3://bucket/s3://x", "s3a://bucket/s3://x"), ("gs://bucket/lake", "gs://bucket/lake"), ("/var/lib/s3:/lake", "/var/lib/s3:/lake")],
)
def test_s3_has_the_scheme_of_hadoops_connector(uri: str, expected: str) -> None:
    assert hadoop_uri(uri) == expected


def test_endpoint_and_region_come_from_the_environment() -> None:
    environment = {"AWS_ENDPOINT_URL": "http://store:9000", "AWS_DEFAULT_REGION": "eu-west-1", "AWS_SECRET_ACCESS_KEY": "hush"}
    expected = {
        "spark.hadoop.fs.s3a.endpoint": "http://store:9000",
        "spark.hadoop.fs.s3a.path.style.access": "true",
        "spark.hadoop.fs.s3a.endpoint.region": "eu-west-1",
    }
    assert s3a_conf(environment) == expected
    assert s3a_conf({"AWS_REGION": "eu-west-1"}) == {"spark.hadoop.fs.s3a.endpoint.region": "eu-west-1"}
    assert s3a_conf({}) == {}
