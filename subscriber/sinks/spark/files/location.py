"""The target's URL: the location of a lake and how it is written. Also the directories of tables in it.

``spark:///path`` is a directory. Its name is percent-encoded where URLs need it (``%23`` is ``#``). ``spark+s3://bucket/prefix`` is in an
object store; every file system of pyarrow is supported.
Parameters follow a question mark: ``docs/reference/lake.md`` lists them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args
from urllib.parse import parse_qsl, unquote, urlsplit

from subscriber.config import parse_bytes, parse_seconds
from subscriber.config.reading import WHOLE, choice
from subscriber.errors import ConfigurationError
from subscriber.interfaces import TableName

__all__ = ["DEFAULT_FRESHNESS", "Location", "OnSchemaGap", "escape_glob", "inside", "table_directory"]

Confirm = Literal["landed", "applied"]
Apply = Literal["none", "local", "spark"]
OnSchemaGap = Literal["copy", "park", "null"]
_HISTORY: Final = "history."
_VECTORS: Final = "deletion_vectors."
DEFAULT_FRESHNESS: Final = 2.0
_BATCH_DELAY: Final = 0.3
_WITH_PORT: Final = re.compile(r"(?:hdfs|viewfs)://(?:[^:@]+@)?[^:@]+:\d+")
_MISTAKEN: Final = re.compile(r"\\|%[0-9A-Fa-f]{2}")
"""Parts of a path that delta-rs decodes once too often, in every notation."""
_EXAMPLE: Final = "as in spark:///var/lib/lake?confirm=landed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """The location of a lake and its parameters, see the module. In seconds and bytes.

    Attributes:
        path: an absolute path. None for an object store, which has a URI for pyarrow.
        delay: ``batch_delay``. None: the default.
        history: tables with a history. ``without_vectors``: those whose files get no deletion vectors.
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
    on_schema_gap: OnSchemaGap = "copy"
    history: tuple[TableName, ...] = ()
    without_vectors: tuple[TableName, ...] = ()

    @property
    def batch_delay(self) -> float:
        """How long collected transactions wait for more before they are landed. This is a part of the freshness."""
        return self.delay if self.delay is not None else min(_BATCH_DELAY, self.freshness / 5)

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
        return replace(found, **_parsed(parse_qsl(parts.query, keep_blank_values=True)))

    def changed(self, parameters: Mapping[str, str]) -> Location:
        """The location with these parameters of its URL. Raises as :meth:`parse`."""
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


def _parsed(parameters: Iterable[tuple[str, str]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    histories, without_vectors = set[TableName](), set[TableName]()
    for name, text in parameters:
        if name.startswith(_HISTORY):
            histories.add(table := _table(name, name.removeprefix(_HISTORY)))
            if text != "scd2":
                raise ConfigurationError(f'unrecognized history value of table "{table}"', hint="scd2")
        elif name.startswith(_VECTORS):
            table = _table(name, name.removeprefix(_VECTORS))
            if not _PARSERS["deletion_vectors"](name, text):
                without_vectors.add(table)
        elif (parse := _PARSERS.get(name)) is not None:
            values["delay" if name == "batch_delay" else name] = parse(name, text)
        else:
            # an & that was not encoded may have made a part of a value look like a name
            shown = f': "{name}"' if name.isidentifier() else ""
            known = ", ".join([*sorted(_PARSERS), "history.SCHEMA.TABLE", "deletion_vectors.SCHEMA.TABLE"])
            raise ConfigurationError(f"unrecognized parameter of a Spark target{shown}", hint=f"one of {known}")
    if histories:
        values["history"] = tuple(sorted(histories, key=str))
    if without_vectors:
        values["without_vectors"] = tuple(sorted(without_vectors, key=str))
    return values


def _table(parameter: str, table: str) -> TableName:
    namespace, dot, name = table.partition(".")
    if not (dot and namespace and name):
        kind = parameter.partition(".")[0]
        raise ConfigurationError(f'parameter "{kind}." of a Spark target needs a table', hint=f"as in {kind}.public.accounts")
    return TableName(namespace, name)


def _above_zero(parse: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    def parsed(name: str, text: str) -> Any:
        found = parse(name, text)
        if not found:
            raise ConfigurationError(f'invalid value for parameter "{name}": "{text}"', hint="it must be above 0")
        return found

    return parsed


def _with_unit(parse: Callable[[str, str], Any], example: str) -> Callable[[str, str], Any]:
    """Refuse a number without a unit: postgresql.conf's rule, milliseconds or kB, is not what is meant here."""

    def parsed(name: str, text: str) -> Any:
        if text.removesuffix("/s").rstrip()[-1:].isdecimal():
            raise ConfigurationError(f'invalid value for parameter "{name}": "{text}" has no unit', hint=f"as in {example}")
        return _above_zero(parse)(name, text)

    return parsed


_PARSERS: Final[Mapping[str, Callable[[str, str], Any]]] = {
    "confirm": choice(*get_args(Confirm)).parse,
    "batch_delay": parse_seconds,
    "batch_size": parse_bytes,
    "apply": choice(*get_args(Apply)).parse,
    "freshness": _with_unit(parse_seconds, "500ms, 10s or 1min"),
    "max_write_rate": _with_unit(lambda name, text: parse_bytes(name, text.removesuffix("/s")), "10MB/s"),
    "retain_hours": _above_zero(WHOLE.parse),
    "target_rows": _above_zero(WHOLE.parse),
    "on_schema_gap": choice(*get_args(OnSchemaGap)).parse,
    "deletion_vectors": lambda name, text: choice("on", "off").parse(name, text) == "on",
}
"""The parameters of the URL that are not of one table: each reads a value; its arguments are the name and the text."""


_PLAIN: Final = re.compile(r"(?!(?:con|prn|aux|nul|com\d|lpt\d)(?:\.|\Z))[a-z0-9](?:[a-z0-9_.-]{0,98}[a-z0-9_-])?")
"""No hidden name (``_delta_log``, ``_change_data``, ``.x``), no partition (``a=b``), no capitals (some file systems ignore case), no device
and no final dot (Windows)."""
_NUMBERED: Final = re.compile(r"-\d+\Z")
_PATTERN: Final = re.compile(r"[\[\]{}*?\\]")


def table_directory(root: str, name: TableName, table_id: int) -> str:
    """``root/schema/table``. If a path or URL would have to quote a name, or a program gives it a meaning, both are altered.

    The table's number then makes the directory unique. The same is done if a name ends like such a number. So no two tables have the same
    directory, even if letter case is ignored.
    """
    if _PLAIN.fullmatch(name.namespace) and _PLAIN.fullmatch(name.name) and not _NUMBERED.search(name.name):
        return f"{root}/{name.namespace}/{name.name}"
    schema, table = (re.sub(r"[^a-z0-9_-]", "_", part.lower())[:60].lstrip("_-") or "x" for part in (name.namespace, name.name))
    return f"{root}/{schema if _PLAIN.fullmatch(schema) else schema + '_'}/{table}-{table_id}"


def inside(path: str) -> str:
    """The path, if it is relative to the lake and stays there. If not, raise ValueError."""
    if path.startswith("/") or "\0" in path or ":" in path.partition("/")[0] or ".." in path.split("/"):
        raise ValueError("not a path inside of the lake")
    return path


def escape_glob(path: str) -> str:
    """A path for Spark's readers, with the characters of glob patterns escaped."""
    return _PATTERN.sub(r"\\\g<0>", path)
