"""The keys of the configuration file that are not options or settings, declared as these are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from subscriber.config.option import declared, option
from subscriber.config.reading import BOOLEAN, STRING, OptionType, choice
from subscriber.log_fields import LOG_OPTIONS

__all__ = ["APPLIER", "LOG", "NAMES", "PROGRAM", "REQUIRED", "SECRETS", "SUBSCRIPTION", "TARGET", "LogOptions"]

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "notice", "warning", "error"]

NAMES: Final = OptionType(name="array of strings", parse=lambda name, text: json.loads(text))
"""The configuration file writes an array; as text it is JSON."""

REQUIRED: Final = "required"
"""Shown as the default of a key that must be given."""

SECRETS: Final = frozenset({"connection", "password", "url"})
"""Keys whose value may be a reference, ``env:NAME`` or ``file:PATH``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """The section ``[log]``, and the options ``--log-…``."""

    format: LogFormat = option("text", choice(*LOG_OPTIONS["format"][0]), LOG_OPTIONS["format"][1])
    level: LogLevel = option("notice", choice(*LOG_OPTIONS["level"][0]), LOG_OPTIONS["level"][1])
    file: str | None = option(None, STRING, LOG_OPTIONS["file"][1], default_text="standard error")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    http: str | None = option(None, STRING, "HOST:PORT at which a page, metrics and probes are served", default_text="not served")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    url: str = option("", STRING, "URL of the target, as --target takes it", default_text=REQUIRED)
    password: str | None = option(None, STRING, "a reference to the password of the URL's user", default_text="none")
    launcher: bool = option(False, BOOLEAN, "also run the subscriptions that `subscriber create` defined in this target")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Applier:
    """The options of ``spark-apply`` for a target that is a lake."""

    engine: str | None = option(
        None,
        choice("local", "spark"),
        "local: threads of this program; spark: executors of Spark",
        default_text="local, or spark with master",
    )
    master: str | None = option(None, STRING, "as spark-submit takes it", default_text="what Spark's configuration says, else local[*]")
    conf: Mapping[str, Any] | None = option(None, STRING, "settings of Spark, by name", default_text="none", keyed=True)
    py_files: str | None = option(
        None, STRING, "this program as a wheel or zip, for executors on which it is not installed", default_text="none"
    )
    freshness: str | None = option(
        None, STRING, "how old a change may be when it can be read, such as 500ms or 1min; more time writes less", default_text="2s"
    )
    max_write_rate: str | None = option(
        None, STRING, "write no more on average, such as 10MB/s, even if changes become older", default_text="no limit"
    )
    retain_hours: str | None = option(
        None, STRING, "how many hours removed files, versions and published snapshots can be read", default_text="24"
    )
    target_rows: str | None = option(None, STRING, "number of rows to aim for in a file", default_text="250000")
    progress: str | None = option(None, STRING, "append a progress event for each round to this file, as JSON", default_text="none")
    http: str | None = option(None, STRING, "HOST:PORT at which metrics and probes are served", default_text="not served")
    register: str | None = option(
        None, STRING, "catalog and schema of Spark, such as spark_catalog.lake, that get tables and snapshot views", default_text="none"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subscription:
    connection: str = option("", STRING, "connection string of the publisher, as --connection takes it", default_text=REQUIRED)
    password: str | None = option(None, STRING, "a reference to the publisher's password", default_text="none")
    publications: tuple[str, ...] = option((), NAMES, "the publications to subscribe to", default_text=REQUIRED)
    target: str = option("", STRING, "a name from [targets], or a URL", default_text=REQUIRED)


LOG: Final = declared(LogOptions)
PROGRAM: Final = declared(_Program)
TARGET: Final = declared(_Target)
APPLIER: Final = declared(_Applier)
SUBSCRIPTION: Final = declared(_Subscription)
