"""The Spark session of the applier, and its Delta jar. Besides this package, only modules that read a lake with Spark import pyspark."""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from subscriber.errors import ConfigurationError, TargetUnavailable
from subscriber.sinks.required_packages import requiring
from subscriber.sinks.spark.session.java import find_java
from subscriber.sinks.spark.session.jobs import end_session, first_words, has_class, job_errors
from subscriber.sinks.spark.session.object_stores import s3a_conf

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession


__all__ = [
    "DELTA_CONF",
    "has_delta",
    "is_under_spark",
    "jar_is_for",
    "refuse_connect",
    "require_delta_jar",
    "spark_session",
    "warn_of_another_python",
]

_log = logging.getLogger(__name__)

_NO_CONNECT: Final = (
    "the applier needs Spark's own session, not one of Spark Connect: it runs functions of Python on executors, and starts sessions",
    "run it on a driver: spark-submit, or --master spark://…, yarn, k8s://… or local[*]; Spark Connect can read lakes",
)
_CONF: Final[Mapping[str, str]] = {
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.python.worker.reuse": "true",
    "spark.sql.shuffle.partitions": "8",
}
"""Our defaults, which the user's settings replace."""
_EXTENSION: Final = "io.delta.sql.DeltaSparkSessionExtension"
DELTA_CONF: Final[Mapping[str, str]] = {
    "spark.jars.packages": "io.delta:delta-spark_4.1_2.13:4.4.0",
    "spark.sql.extensions": _EXTENSION,
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
"""Settings with which a Spark 4.1 session has MERGE INTO. The jar comes from Maven."""
_LOCAL: Final[Mapping[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}

_FILE: Final = re.compile("^file:(//)?")


def spark_session(master: str | None, conf: Mapping[str, str] | None = None, *, packages: str | None = None) -> SparkSession:
    """The existing session, or a new one.

    Args:
        master: as for ``spark-submit``. None: the value in the configuration, as under spark-submit.
        conf: settings that take precedence over ours, as those of the user's spark-defaults.conf and spark-submit do.
        packages: a wheel or zip of this program that executors need. None: they have it.

    Raises:
        ConfigurationError: pyspark or Java is missing, the session is one of Spark Connect, or the wheel or zip cannot be read or shipped.
        TargetUnavailable: the session does not start.
    """
    with requiring("engine spark", "spark"):
        from pyspark.sql import SparkSession  # noqa: PLC0415 -- an extra
    if (master or "").startswith("sc://") or os.environ.get("SPARK_REMOTE"):
        raise ConfigurationError(_NO_CONNECT[0], hint=_NO_CONNECT[1])
    active = SparkSession.getActiveSession()
    if active is not None:
        refuse_connect(active)
    found = active if active is not None else _started(master, conf or {})
    submitted = (found.sparkContext.getConf().get("spark.submit.pyFiles") or "").split(",")
    try:
        for path in filter(None, [packages, *(path for path in submitted if path.endswith(".whl"))]):
            _ship(found.sparkContext, path)
    except ConfigurationError:
        if active is None:
            end_session(found)
        raise
    return found


def is_under_spark() -> bool:
    """Whether this process was started by spark-submit, or has a Spark session."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return True
    if sys.modules.get("pyspark") is None:
        return False
    from pyspark import SparkContext  # noqa: PLC0415 -- an extra

    return SparkContext._active_spark_context is not None  # noqa: SLF001 -- a session is active only in its own thread


def _started(master: str | None, conf: Mapping[str, str]) -> SparkSession:
    """A new session with these settings, and our defaults for those that the user does not have."""
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415 -- an extra
    from pyspark.sql import SparkSession  # noqa: PLC0415

    home = find_java(_private_directory)
    if home is not None:
        os.environ["JAVA_HOME"] = home
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    defaults = {**_CONF, **s3a_conf()}
    if master is not None and master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        defaults |= _LOCAL
    if master is not None:
        conf = {**conf, "spark.master": master}
    failures: tuple[type[Exception], ...] = (*job_errors(), RuntimeError)
    try:
        # Java reads spark-defaults.conf and the arguments of spark-submit
        SparkContext._ensure_initialized(conf=SparkConf(loadDefaults=False).setAll([*conf.items()]))  # noqa: SLF001 -- pyspark has no other way
        theirs, builder = SparkConf(), SparkSession.builder.appName("subscriber spark-apply")
        for name, value in {**{name: value for name, value in defaults.items() if not theirs.contains(name)}, **conf}.items():
            builder = builder.config(name, value)
        return builder.getOrCreate()
    except failures as error:
        where = f" with master {master}" if master is not None else ""
        raise TargetUnavailable(
            f"could not start Spark{where}: {first_words(error)}",
            hint="see Java's output above; check the master and the settings, which are those of spark-submit",
        ) from error


def _ship(context: SparkContext, path: str) -> None:
    """Let executors import from a wheel or zip. A wheel is a zip, but Spark adds only files named ``.zip`` to Python's path."""
    plain = Path(_FILE.sub("", path))
    shipped = path
    try:
        if plain.suffix == ".whl":
            shipped = str(_private_directory() / f"{plain.stem}.zip")
            shutil.copyfile(plain, shipped)
        elif "://" not in _FILE.sub("", path):
            plain.open("rb").close()
    except OSError as error:
        raise ConfigurationError(
            f"cannot read {path}: {error.strerror or type(error).__name__}", hint="build it: pip wheel . --no-deps"
        ) from error
    try:
        context.addPyFile(shipped)
    except job_errors() as error:
        raise ConfigurationError(f"cannot ship {path}: {first_words(error)}", hint="build it: pip wheel . --no-deps") from error


def refuse_connect(spark: SparkSession) -> None:
    """Check that a session is not one of Spark Connect, which has no driver here, or raise ConfigurationError."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise ConfigurationError(_NO_CONNECT[0], hint=_NO_CONNECT[1])


def has_delta(spark: SparkSession) -> bool:
    """Whether a session can MERGE INTO Delta tables."""
    return _EXTENSION in (spark.conf.get("spark.sql.extensions", "") or "")


def warn_of_another_python(spark: SparkSession) -> None:
    """Warn if the Python workers of a local session are of another environment, as where this one is not activated."""
    if type(spark).__module__.startswith("pyspark.sql.connect") or not str(spark.sparkContext.master).startswith("local"):
        return
    worker = spark.sparkContext.pythonExec
    found = shutil.which(worker)
    if found is None or Path(found).absolute().parent != Path(sys.executable).parent:
        _log.warning(
            "Spark's Python workers run %s, not %s: if pg-subscriber is not installed there, queries of postgres_changes and"
            " postgres_snapshot end with ModuleNotFoundError. Set the environment variable PYSPARK_PYTHON before the session starts",
            found or worker,
            sys.executable,
        )


def _private_directory() -> Path:
    """A temporary directory of this process, for a wrapper of Java and for code for executors."""
    directory = Path(tempfile.mkdtemp(prefix="subscriber-spark-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


_JAR: Final = re.compile(r"delta-spark_(?:(\d+\.\d+)_)?2\.\d+-(\d+)\.(\d+)\.\d+")
_HINT: Final = "set spark.jars.packages as docs/explanation/lake.md says, or leave out spark.sql.extensions to do without MERGE INTO"
_BEFORE_NAMES: Final = {("3", "2"): "3.5", ("3", "3"): "3.5", ("4", "0"): "4.0"}
"""The Spark version of a Delta whose jar does not have it in its name."""


def jar_is_for(path: str) -> str | None:
    """The Spark version (major.minor) of a Delta jar, by its file name. None: the name does not have it, or the file is not a Delta jar."""
    match = _JAR.search(path)
    if match is None:
        return None
    return match[1] or _BEFORE_NAMES.get((match[2], match[3]))


def require_delta_jar(spark: SparkSession) -> None:
    """Check that the Delta jar exists and is for this Spark, or raise ConfigurationError: MERGE INTO would fail with obscure errors."""
    jars = str(spark.sparkContext._jsc.sc().listJars().mkString(","))  # noqa: SLF001 -- pyspark has no other way to ask
    ours = ".".join(spark.version.split(".")[:2])
    for jar in jars.split(","):
        made_for = jar_is_for(jar)
        if made_for is not None and made_for != ours:
            raise ConfigurationError(
                f"Delta's jar {jar.rsplit('/', 1)[-1]} is for Spark {made_for}, but this is {spark.version}", hint=_HINT
            )
    if not has_class(spark, _EXTENSION):
        raise ConfigurationError("Spark's settings name Delta's extension, but its jar is missing", hint=_HINT)
