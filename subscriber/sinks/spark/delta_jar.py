"""Whether the Delta jar of a session is there, and made for this Spark: else MERGE INTO would fail deep inside, round after round."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from subscriber.errors import ConfigurationError
from subscriber.sinks.spark.jobs import job_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["jar_is_for", "require_delta_jar"]

_EXTENSION: Final = "io.delta.sql.DeltaSparkSessionExtension"
_JAR: Final = re.compile(r"delta-spark_(?:(\d+\.\d+)_)?2\.\d+-(\d+)\.(\d+)\.\d+")
_HINT: Final = "set spark.jars.packages as docs/spark.md says, or use engine rewrite"
_BEFORE_NAMES: Final = {("3", "2"): "3.5", ("3", "3"): "3.5", ("4", "0"): "4.0"}
"""Which Spark a Delta was for while its jar's name did not say."""


def jar_is_for(path: str) -> str | None:
    """The Spark (major.minor) that a Delta jar was made for, by its file's name; None: it does not say, or is none."""
    match = _JAR.search(path)
    if match is None:
        return None
    return match[1] or _BEFORE_NAMES.get((match[2], match[3]))


def require_delta_jar(spark: SparkSession) -> None:
    """See that it is there, and for this Spark.

    Raises:
        ConfigurationError: it is not.
    """
    context = spark.sparkContext
    jars = str(context._jsc.sc().listJars().mkString(","))  # noqa: SLF001 -- pyspark has no other way to ask
    ours = ".".join(spark.version.split(".")[:2])
    for jar in jars.split(","):
        made_for = jar_is_for(jar)
        if made_for is not None and made_for != ours:
            raise ConfigurationError(
                f"Delta's jar {jar.rsplit('/', 1)[-1]} is for Spark {made_for}, and this is {spark.version}", hint=_HINT
            )
    try:
        java: Any = context._jvm  # noqa: SLF001 -- as above
        java.Thread.currentThread().getContextClassLoader().loadClass(_EXTENSION)
    except job_errors():
        raise ConfigurationError("Spark's settings name Delta's extension, and its jar is not there", hint=_HINT) from None
