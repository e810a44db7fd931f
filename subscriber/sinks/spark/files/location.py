"""The target's URL: the location of a lake and how it is written. Also the directories of tables in it.

``spark:///path`` is a directory. Its name is percent-encoded where URLs need it (``%23`` is ``#``). ``spark+s3://bucket/prefix`` is in an
object store; every file system of pyarrow is supported.
Parameters follow a question mark:

=================  =========  ====================================================================================
``confirm``        landed     ``landed``: acknowledge what is durable in the landing zone; ``applied``: acknowledge only
                              what the applier has published, if the disk of the landing zone is not trusted
``batch_delay``    300ms      how long collected transactions wait for more before they are landed; by default at most a fifth of
                              ``freshness``
``batch_size``     64MB       size in bytes at which a batch is landed at once
``apply``          none       run the applier as a thread of this process: ``local``, ``spark``; ``none``: separately
``freshness``      2s         how old changes may be when they can be read. The applier writes as few bytes as that allows
``max_write_rate``            bytes per second that the applier writes at most, on average
``retain_hours``   24         how long removed files, versions and published snapshots can be read
``target_rows``    250000     rows that a file of a table should have
``deletion_vectors`` on       ``off``: rewrite files even for few changes, for readers that are too old for deletion vectors
``copy``           subscriber ``executors``: the applier's tasks read the tables from the publisher, and write them
``copy_connection``           for executors: libpq keywords and values that replace the subscriber's (host, service, passfile)
``history.S.T``               keep a history of table S.T: ``scd2``, ``soft_delete``
=================  =========  ====================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, cast, get_args
from urllib.parse import parse_qsl, unquote, urlsplit

from subscriber.abc import TableName
from subscriber.config import Settings, parse_bytes, parse_seconds
from subscriber.errors import ConfigurationError

__all__ = ["DEFAULT_FRESHNESS", "Copying", "HistoryKind", "Location", "escape_glob", "parse_freshness", "parse_rate", "table_directory"]

Confirm = Literal["landed", "applied"]
Apply = Literal["none", "local", "spark"]
Copy = Literal["subscriber", "executors"]
HistoryKind = Literal["scd2", "soft_delete"]
_HISTORY: Final = "history."
DEFAULT_FRESHNESS: Final = 2.0
_BATCH_DELAY: Final = 0.3
_ENGINES: Final = ("none", "local", "spark")
_PARAMETER: Final = re.compile(r"\s*([a-z_]+)\s*=\s*('(?:[^'\\]|\\.)*'|(?!')(?:[^\s\\]|\\.)*)(?:\s+|$)", re.DOTALL)
"""A libpq keyword with its value."""
_SECRETS: Final = frozenset({"password", "sslpassword", "scram_client_key", "scram_server_key", "oauth_client_secret"})
_INNER: Final = re.compile(r"'?\s*postgres(?:ql)?\\?:|.*=", re.DOTALL)
"""A value of dbname that is itself a connection string, which may contain a password."""
_WITH_PORT: Final = re.compile(r"(?:hdfs|viewfs)://(?:[^:@]+@)?[^:@]+:\d+")
_MISTAKEN: Final = re.compile(r"\\|%[0-9A-Fa-f]{2}")
"""Parts of a path that delta-rs decodes once too often, in every notation."""
_EXAMPLE: Final = "as in spark:///var/lib/lake?confirm=landed"


@dataclass(frozen=True, slots=True)
class Copying:
    """How executors copy a table.

    Attributes:
        connection: libpq keywords and values that executors use in place of the subscriber's own.
        workers: how many parts they read at once.
    """

    connection: str
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """The location of a lake and its parameters, see the module.

    Attributes:
        path: an absolute path. None for an object store.
        uri: the URI for pyarrow. None for a directory.
        confirm, batch_size, apply, target_rows, deletion_vectors, retain_hours, copy, copy_connection: see the module. In seconds and
            bytes.
        delay: ``batch_delay``. None: the default.
        freshness, max_write_rate: see the module. None: the default.
        history: tables with a history, and its form.
    """

    path: str | None = None
    uri: str | None = None
    confirm: Confirm = "landed"
    delay: float | None = None
    batch_size: int = 64 * 1024**2
    apply: Apply = "none"
    freshness: float = DEFAULT_FRESHNESS
    max_write_rate: int | None = None
    retain_hours: int = 24
    target_rows: int = 250_000
    deletion_vectors: bool = True
    copy: Copy = "subscriber"
    copy_connection: str = ""
    history: tuple[tuple[TableName, HistoryKind], ...] = ()

    @property
    def batch_delay(self) -> float:
        """How long collected transactions wait for more before they are landed. This is a part of the freshness."""
        return self.delay if self.delay is not None else min(_BATCH_DELAY, self.freshness / 5)

    def copying(self, settings: Settings) -> Copying:
        """How executors copy."""
        return Copying(self.copy_connection, settings.max_copy_workers_per_table)

    @classmethod
    def of(cls, target: str) -> Location:
        """The location of a lake for readers and the applier: by the target's URL, or by its directory, whose name is not decoded.

        Raises:
            ConfigurationError: as :meth:`parse`, or the directory is not absolute.
        """
        if "://" in target:
            return cls.parse(target)
        if not target.startswith("/"):
            # Spark's processes may have another working directory
            raise ConfigurationError(f"the lake's directory {target!r} is not an absolute path", hint=f"as in /var/lib/lake, or {_EXAMPLE}")
        return cls(path=_directory(target))

    @classmethod
    def parse(cls, url: str) -> Location:
        """Parse a target's URL.

        Raises:
            ConfigurationError: the URL has no location, or an unknown parameter.
        """
        try:
            parts = urlsplit(url)
        except ValueError:
            # the error's text may contain a secret
            raise ConfigurationError("the target is not a URL", hint=_EXAMPLE) from None
        if "#" in url:
            raise ConfigurationError(
                "the target's URL contains a #, which must be encoded", hint="write %23 for it, as in spark:///lakes/a%231"
            )
        kind, _, inner = parts.scheme.partition("+")
        if kind != "spark":
            raise ConfigurationError(f'"{parts.scheme}" is not a Spark target', hint=_EXAMPLE)
        if inner and inner != "file":
            # Spark's name for S3 is s3a
            place = f"{'s3' if inner == 's3a' else inner}://{parts.netloc}"
            # a secret key may contain a slash; then there is no @ in netloc
            if ":" in parts.netloc and not _WITH_PORT.fullmatch(place):
                raise ConfigurationError(
                    "the target's URL contains a secret key, which error messages would show",
                    hint="set it in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or a profile",
                )
            found = cls(uri=f"{place}{parts.path}")
        else:
            if parts.netloc not in {"", "localhost"}:
                raise ConfigurationError("the target names a host where a directory is expected", hint=f"use three slashes, {_EXAMPLE}")
            found = cls(path=_directory(unquote(parts.path)))
        return replace(found, **_parameters(parts.query))

    def changed(self, parameters: Mapping[str, str]) -> Location:
        """The location with these parameters of its URL.

        Raises:
            ConfigurationError: as :meth:`parse`.
        """
        return replace(self, **_parsed(parameters.items()))

    def __str__(self) -> str:
        """The URL without parameters."""
        return self.path or self.uri or ""


def _directory(path: str) -> str:
    path = path.rstrip("/")
    if not path:
        raise ConfigurationError("the target names no directory", hint=_EXAMPLE)
    if _MISTAKEN.search(path):
        raise ConfigurationError(
            f"the target's directory {path!r} is another one for Delta's library", hint="use a path without a backslash and without %XX"
        )
    return path


def _parameters(query: str) -> dict[str, Any]:
    return _parsed(parse_qsl(query, keep_blank_values=True))


def _parsed(parameters: Iterable[tuple[str, str]]) -> dict[str, Any]:
    known = {field.name for field in fields(Location)} - {"path", "uri", "delay", "history"} | {"batch_delay"}
    values: dict[str, Any] = {}
    histories: dict[TableName, HistoryKind] = {}
    for name, text in parameters:
        if name.startswith(_HISTORY):
            table, kind = _history(name.removeprefix(_HISTORY), text)
            if histories.setdefault(table, kind) != kind:
                raise ConfigurationError(f'table "{table}" has two forms of history', hint="scd2 or soft_delete")
        elif name not in known:
            # an & that was not encoded may have made a part of a value look like a name
            shown = f': "{name}"' if name.isidentifier() else ""
            raise ConfigurationError(
                f"unrecognized parameter of a Spark target{shown}", hint=f"one of {', '.join(sorted(known))}, history.SCHEMA.TABLE"
            )
        elif name == "confirm":
            if text not in {"landed", "applied"}:
                raise ConfigurationError(f'unrecognized confirm value: "{text}"', hint="landed or applied")
            values[name] = cast("Confirm", text)
        elif name == "apply":
            if text not in _ENGINES:
                hint = "these engines are now one: use apply=spark" if text in {"rewrite", "merge"} else f"one of {', '.join(_ENGINES)}"
                raise ConfigurationError(f'unrecognized apply value: "{text}"', hint=hint)
            values[name] = cast("Apply", text)
        elif name in {"target_rows", "retain_hours"}:
            if not text.isdecimal() or not int(text):
                hint = "a number of rows, as in 250000" if name == "target_rows" else "a number of hours, as in 24"
                raise ConfigurationError(f'invalid value for parameter "{name}": "{text}"', hint=hint)
            values[name] = int(text)
        elif name == "deletion_vectors":
            if text not in {"on", "off"}:
                raise ConfigurationError(f'unrecognized deletion_vectors value: "{text}"', hint="on or off")
            values[name] = text == "on"
        elif name == "copy":
            if text not in {"subscriber", "executors"}:
                raise ConfigurationError(f'unrecognized copy value: "{text}"', hint="subscriber or executors")
            values[name] = cast("Copy", text)
        elif name == "copy_connection":
            _require_no_secret(text)
            values[name] = text
        elif name == "batch_delay":
            values["delay"] = parse_seconds(name, text)
        elif name == "freshness":
            values[name] = parse_freshness(text)
        elif name == "max_write_rate":
            values[name] = parse_rate(text)
        else:
            values[name] = parse_bytes(name, text)
    if histories:
        values["history"] = tuple(sorted(histories.items(), key=lambda one: str(one[0])))
    return values


def _history(table: str, text: str) -> tuple[TableName, HistoryKind]:
    namespace, dot, name = table.partition(".")
    if not (dot and namespace and name):
        raise ConfigurationError("a history needs a table", hint="as in history.public.accounts=scd2")
    if text not in get_args(HistoryKind):
        raise ConfigurationError(f'unrecognized history value of table "{table}"', hint=f"one of {', '.join(get_args(HistoryKind))}")
    return TableName(namespace, name), cast("HistoryKind", text)


def parse_freshness(text: str) -> float:
    """Parse a freshness target.

    Raises:
        ConfigurationError: it is not a time, or 0.
    """
    found = parse_seconds("freshness", text)
    if not found:
        raise ConfigurationError(f'invalid value for parameter "freshness": "{text}"', hint="a time above 0, as in 500ms or 10s")
    return found


def parse_rate(text: str) -> int:
    """Parse bytes per second, such as ``10MB/s``.

    Raises:
        ConfigurationError: it is not a size, or 0.
    """
    found = parse_bytes("max_write_rate", text.removesuffix("/s"))
    if not found:
        raise ConfigurationError(f'invalid value for parameter "max_write_rate": "{text}"', hint="a size above 0, as in 10MB/s")
    return found


def _require_no_secret(connection: str) -> None:
    """Refuse passwords. The text is not shown, because if libpq cannot parse it, a password may be in an unexpected place."""
    found, position = set(), 0
    while connection[position:].strip():
        match = _PARAMETER.match(connection, position)
        if match is None:
            raise ConfigurationError(
                "copy_connection is not a connection string of keywords and values",
                hint="as in host=db1 passfile=/path, URL-encoded",
            )
        if match[1] == "dbname" and _INNER.match(match[2]):
            raise ConfigurationError(
                "copy_connection has a connection string as dbname, which would be stored in the lake",
                hint="give its parts as keywords, as in host=db1 dbname=app passfile=/path, URL-encoded",
            )
        found.add(match[1])
        position = match.end()
    if found & _SECRETS:
        raise ConfigurationError(
            "copy_connection contains a password, which would be stored in the lake",
            hint="use passfile= or service=, or give executors PGPASSFILE: --conf spark.executorEnv.PGPASSFILE=/path",
        )


_PLAIN: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_NUMBERED: Final = re.compile(r"-\d+\Z")
_PATTERN: Final = re.compile(r"[\[\]{}*?\\]")


def table_directory(root: str, name: TableName, table_id: int) -> str:
    """``root/schema/table``. If a path or URL would have to quote a name, the table's number makes the directory unique.

    The same is done if a name ends like such a number. So no two tables have the same directory.
    """
    if _PLAIN.fullmatch(name.namespace) and _PLAIN.fullmatch(name.name) and not _NUMBERED.search(name.name):
        return f"{root}/{name.namespace}/{name.name}"
    plain = [re.sub(r"[^A-Za-z0-9_-]", "_", part)[:60] or "_" for part in (name.namespace, name.name)]
    return f"{root}/{plain[0]}/{plain[1]}-{table_id}"


def escape_glob(path: str) -> str:
    """A path for Spark's readers, with the characters of glob patterns escaped."""
    return _PATTERN.sub(r"\\\g<0>", path)
