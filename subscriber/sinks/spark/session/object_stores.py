"""Spark and lakes in object stores: the URI that Spark needs, settings of its S3 connector, and whether Delta's commits are safe there.

Only MERGE INTO, ``--register`` and readers with Delta's jar open a lake in the JVM. Everything else is done by pyarrow and delta-rs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from subscriber.errors import ConfigurationError
from subscriber.sinks.spark.session.jobs import has_class

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["creates_versions_once", "hadoop_uri", "s3a_conf"]

_S3: Final = "s3"
_LOG_STORES: Final = ("spark.delta.logStore.s3a.impl", "spark.delta.logStore.class")
_CONNECTOR: Final = "org.apache.hadoop.fs.s3a.S3AFileSystem"


def hadoop_uri(uri: str) -> str:
    """The URI of a directory or file for Spark. Hadoop's S3 connector has the scheme ``s3a``."""
    return f"s3a{uri.removeprefix(_S3)}" if uri.startswith(f"{_S3}://") else uri


def s3a_conf(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The endpoint and region for Spark's S3 connector, from the variables that pyarrow and delta-rs read. It reads the keys itself."""
    found: dict[str, str] = {}
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    if endpoint:
        found["spark.hadoop.fs.s3a.endpoint"] = endpoint
        # as pyarrow and delta-rs do with an endpoint of one's own
        found["spark.hadoop.fs.s3a.path.style.access"] = "true"
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    if region:
        found["spark.hadoop.fs.s3a.endpoint.region"] = region
    return found


def creates_versions_once(spark: SparkSession, uri: str | None) -> bool:
    """Whether Delta's own commits never replace a version that another program has committed. ``uri``: of a lake in an object store.

    On S3 they may do so, unless the user has chosen Delta's log store.

    Raises:
        ConfigurationError: the user has chosen one, but the session cannot access S3.
    """
    if uri is None or urlsplit(uri).scheme != _S3:
        return True
    if not any(spark.conf.get(name, None) for name in _LOG_STORES):
        return False
    if not has_class(spark, _CONNECTOR):
        raise ConfigurationError(
            "MERGE INTO on S3 needs Hadoop's S3 connector, but its jar is missing",
            hint="add org.apache.hadoop:hadoop-aws to spark.jars.packages, in the version of Spark's Hadoop",
        )
    return True
