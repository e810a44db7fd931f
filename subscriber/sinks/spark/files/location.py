"""The target's URL: where a lake is and how it is written. And the directories of tables in it.

``spark:///path`` is a directory, its name percent-encoded where URLs need it (``%23`` is ``#``); ``spark+s3://bucket/prefix`` (and what
else pyarrow has a file system for) a place in an object store.
Parameters follow a question mark:

=================  =========  ====================================================================================
``confirm``        landed     ``landed``: what is durable in the landing zone is acknowledged; ``applied``: not before
                              the applier has published it, for those who do not trust the disk of the landing zone
``batch_delay``    300ms      how long landed batches wait for more transactions
``batch_size``     64MB       bytes after which a batch is landed at once
``apply``          none       the applier as a thread of this process: ``local``, ``rewrite``, ``merge``; ``none``: a program of its own
``target_rows``    250000     rows that a file of a table should have, where the applier is this process's
``copy``           subscriber ``executors``: the applier's tasks read the tables from the publisher, and write them
``copy_connection``           for executors: keywords and values of libpq in place of the subscriber's (host, service, passfile)
=================  =========  ====================================================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from subscriber.abc import TableName
from subscriber.config import Settings, parse_bytes, parse_seconds
from subscriber.errors import ConfigurationError

__all__ = ["Copying", "Location", "escape_glob", "table_directory"]

Confirm = Literal["landed", "applied"]
Apply = Literal["none", "local", "rewrite", "merge"]
Copy = Literal["subscriber", "executors"]
_ENGINES: Final = ("none", "local", "rewrite", "merge")
_PARAMETER: Final = re.compile(r"\s*([a-z_]+)\s*=\s*('(?:[^'\\]|\\.)*'|(?!')(?:[^\s\\]|\\.)*)(?:\s+|$)", re.DOTALL)
"""One of libpq's keywords with its value."""
_SECRETS: Final = frozenset({"password", "sslpassword", "scram_client_key", "scram_server_key", "oauth_client_secret"})
_INNER: Final = re.compile(r"'?\s*postgres(?:ql)?\\?:|.*=", re.DOTALL)
"""A value of dbname that is a connection string of its own, in which a password may be."""
_WITH_PORT: Final = re.compile(r"(?:hdfs|viewfs)://(?:[^:@]+@)?[^:@]+:\d+")
_MISTAKEN: Final = re.compile(r"\\|%[0-9A-Fa-f]{2}")
"""In a path: what delta-rs decodes once too often, however it is written."""
_EXAMPLE: Final = "as in spark:///var/lib/lake?confirm=landed"


@dataclass(frozen=True, slots=True)
class Copying:
    """How executors copy a table.

    Attributes:
        connection: keywords and values for libpq that they use in place of the subscriber's own.
        workers: how many parts they read at once.
    """

    connection: str
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """See the module.

    Attributes:
        path: an absolute path; None for an object store.
        uri: what pyarrow opens; None for a directory.
        confirm, batch_delay, batch_size, apply, target_rows, copy, copy_connection: see the module; seconds and bytes.
    """

    path: str | None = None
    uri: str | None = None
    confirm: Confirm = "landed"
    batch_delay: float = 0.3
    batch_size: int = 64 * 1024**2
    apply: Apply = "none"
    target_rows: int = 250_000
    copy: Copy = "subscriber"
    copy_connection: str = ""

    def copying(self, settings: Settings) -> Copying:
        """How executors copy."""
        return Copying(self.copy_connection, settings.max_copy_workers_per_table)

    @classmethod
    def of(cls, target: str) -> Location:
        """The location of a lake for readers and the applier: by the target's URL, or by its directory, whose name is not decoded.

        Raises:
            ConfigurationError: as :meth:`parse`; or the directory is a relative one.
        """
        if "://" in target:
            return cls.parse(target)
        if not target.startswith("/"):
            # a process of Spark's may be in another directory
            raise ConfigurationError(f"the lake's directory {target!r} is not an absolute one", hint=f"as in /var/lib/lake, or {_EXAMPLE}")
        return cls(path=_directory(target))

    @classmethod
    def parse(cls, url: str) -> Location:
        """Read a target's URL.

        Raises:
            ConfigurationError: it names no place, or a parameter that there is not.
        """
        try:
            parts = urlsplit(url)
        except ValueError:
            # its text may quote a secret
            raise ConfigurationError("the target is no URL", hint=_EXAMPLE) from None
        if "#" in url:
            raise ConfigurationError(
                "the target has a #, which no name in a URL can have", hint="write %23 for it, as in spark:///lakes/a%231"
            )
        kind, _, inner = parts.scheme.partition("+")
        if kind != "spark":
            raise ConfigurationError(f'"{parts.scheme}" is no Spark target', hint=_EXAMPLE)
        if inner and inner != "file":
            place = f"{inner}://{parts.netloc}"
            # a secret key may have a slash, so that no @ follows it here
            if ":" in parts.netloc and not _WITH_PORT.fullmatch(place):
                raise ConfigurationError(
                    "the target holds a secret key, and would be shown in errors",
                    hint="give it by the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or a profile",
                )
            found = cls(uri=f"{place}{parts.path}")
        else:
            if parts.netloc not in {"", "localhost"}:
                raise ConfigurationError("the target names a host, but a directory is meant", hint=f"three slashes, {_EXAMPLE}")
            found = cls(path=_directory(unquote(parts.path)))
        return replace(found, **_parameters(parts.query))

    def __str__(self) -> str:
        """The URL without parameters."""
        return self.path or self.uri or ""


def _directory(path: str) -> str:
    path = path.rstrip("/")
    if not path:
        raise ConfigurationError("the target names no directory", hint=_EXAMPLE)
    if _MISTAKEN.search(path):
        raise ConfigurationError(
            f"the target's directory {path!r} is another one for Delta's library", hint="choose one without a backslash, and no %XX"
        )
    return path


def _parameters(query: str) -> dict[str, Any]:
    known = {field.name for field in fields(Location)} - {"path", "uri"}
    values: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            # an & that was not encoded may have made a name of a part of a value
            shown = f': "{name}"' if name.isidentifier() else ""
            raise ConfigurationError(f"unrecognized parameter of a Spark target{shown}", hint=f"one of {', '.join(sorted(known))}")
        if name == "confirm":
            if text not in {"landed", "applied"}:
                raise ConfigurationError(f'unrecognized confirm value: "{text}"', hint="landed or applied")
            values[name] = cast("Confirm", text)
        elif name == "apply":
            if text not in _ENGINES:
                raise ConfigurationError(f'unrecognized apply value: "{text}"', hint=f"one of {', '.join(_ENGINES)}")
            values[name] = cast("Apply", text)
        elif name == "target_rows":
            if not text.isdecimal() or not int(text):
                raise ConfigurationError(f'invalid value for parameter "target_rows": "{text}"', hint="a number of rows, as in 250000")
            values[name] = int(text)
        elif name == "copy":
            if text not in {"subscriber", "executors"}:
                raise ConfigurationError(f'unrecognized copy value: "{text}"', hint="subscriber or executors")
            values[name] = cast("Copy", text)
        elif name == "copy_connection":
            _require_no_secret(text)
            values[name] = text
        elif name == "batch_delay":
            values[name] = parse_seconds(name, text)
        else:
            values[name] = parse_bytes(name, text)
    return values


def _require_no_secret(connection: str) -> None:
    """The text is not shown: what libpq would not understand may hold a password at another place than it seems."""
    found, position = set(), 0
    while connection[position:].strip():
        match = _PARAMETER.match(connection, position)
        if match is None:
            raise ConfigurationError(
                "copy_connection is not keywords and values of libpq",
                hint="as in host=db1 passfile=/path, URL-encoded",
            )
        if match[1] == "dbname" and _INNER.match(match[2]):
            raise ConfigurationError(
                "copy_connection has a connection string as dbname, and it would be stored in the lake",
                hint="give its parts as keywords, as in host=db1 dbname=app passfile=/path, URL-encoded",
            )
        found.add(match[1])
        position = match.end()
    if found & _SECRETS:
        raise ConfigurationError(
            "copy_connection holds a password, and would be stored in the lake",
            hint="use passfile= or service=, or give executors PGPASSFILE: --conf spark.executorEnv.PGPASSFILE=/path",
        )


_PLAIN: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_NUMBERED: Final = re.compile(r"-\d+\Z")
_PATTERN: Final = re.compile(r"[\[\]{}*?\\]")


def table_directory(root: str, name: TableName, table_id: int) -> str:
    """``root/schema/table``; names that a path or URL would have to quote are told apart by the table's number.

    So are those that end as if they had one: no two tables have the same directory.
    """
    if _PLAIN.fullmatch(name.namespace) and _PLAIN.fullmatch(name.name) and not _NUMBERED.search(name.name):
        return f"{root}/{name.namespace}/{name.name}"
    plain = [re.sub(r"[^A-Za-z0-9_-]", "_", part)[:60] or "_" for part in (name.namespace, name.name)]
    return f"{root}/{plain[0]}/{plain[1]}-{table_id}"


def escape_glob(path: str) -> str:
    """A path for Spark's readers, with the characters of glob patterns escaped."""
    return _PATTERN.sub(r"\\\g<0>", path)
