"""What can be chosen, as frozen dataclasses.

:class:`SubscriptionOptions` holds the parameters of ``CREATE SUBSCRIPTION … WITH (…)`` under their own names and with their
own meanings; :class:`Settings` holds what a server keeps in its configuration file, under the names it has there.
Both are read from ``name=value`` texts as PostgreSQL reads them: booleans as on/off/true/false/yes/no/1/0 and their
prefixes, times and sizes with units.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, Self, get_type_hints

from subscriber.errors import ConfigurationError

__all__ = [
    "ALTERABLE",
    "NO_SLOT",
    "InsertConflict",
    "SchemaChange",
    "SchemaChangeCallback",
    "Settings",
    "Streaming",
    "SubscriptionOptions",
    "parse_assignments",
    "parse_changes",
]

Streaming = Literal["off", "on", "parallel"]
SynchronousCommit = Literal["off", "local", "remote_write", "remote_apply", "on"]
OriginFilter = Literal["none", "any"]
InsertConflict = Literal["error", "upsert"]
SchemaChange = Literal["error", "add", "ignore"]

SchemaChangeCallback = Callable[[str, str, tuple[str, ...]], SchemaChange]
"""``callback(schema, table, columns)``: what to do about columns that the publisher has and the target's table has not."""

NO_SLOT: Final = "none"
"""The value of ``slot_name`` that stands for NONE; no slot can be named so."""

_TIME_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE_UNITS: Final = {"B": 1, "kB": 1024, "MB": 1024**2, "GB": 1024**3, "TB": 1024**4}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bool(name: str, text: str) -> bool:
    """Read a boolean as PostgreSQL does: true/yes/on/1 and false/no/off/0, and unambiguous prefixes.

    Raises:
        ConfigurationError: with native's words.
    """
    word = text.strip().lower()
    if word and ("true".startswith(word) or "yes".startswith(word) or word in {"on", "1"}):
        return True
    if word and ("false".startswith(word) or "no".startswith(word) or word in {"of", "off", "0"}):
        return False
    raise ConfigurationError(f"{name} requires a Boolean value", hint=f"say {name}=true or {name}=false")


def _parse_quantity(name: str, text: str, units: Mapping[str, float], base: str) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None or (match[2] and match[2] not in units):
        raise ConfigurationError(
            f'invalid value for parameter "{name}": "{text}"', hint=f"a number with one of the units {', '.join(units)}"
        )
    return float(match[1]) * units[match[2] or base]


def parse_seconds(name: str, text: str, base: str = "ms") -> float:
    """Read a time such as ``10s``, ``500ms`` or ``1min``; without a unit it is in ``base``, as in postgresql.conf."""
    return _parse_quantity(name, text, _TIME_UNITS, base)


def parse_bytes(name: str, text: str) -> int:
    """Read a size such as ``64MB``; without a unit it is in kB, as in postgresql.conf."""
    return int(_parse_quantity(name, text, _SIZE_UNITS, "kB"))


def parse_assignments(items: Iterable[str], *, case_matters: bool = False) -> dict[str, str]:
    """Split ``name=value`` texts.

    Args:
        items: the texts.
        case_matters: leave names as they are, as Spark's; PostgreSQL's become lower case.

    Raises:
        ConfigurationError: a text without ``=``, or a name given twice (native: conflicting or redundant options).
    """
    found: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        name = name.strip() if case_matters else name.strip().lower()
        if not equals or not name:
            raise ConfigurationError(f'"{item}" is not of the form parameter=value', hint="as in copy_data=false")
        if name in found:
            raise ConfigurationError(f'conflicting or redundant options: "{name}" is given twice', hint="say it once")
        found[name] = value.strip()
    return found


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    word = value.strip().lower()
    if word not in allowed:
        raise ConfigurationError(f'unrecognized {name} value: "{value}"', hint=f"one of {', '.join(allowed)}")
    return word


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionOptions:
    """The parameters of CREATE SUBSCRIPTION. Source: PostgreSQL manual, CREATE SUBSCRIPTION.

    What a publisher is too old for is left out on the wire, as the native subscription does
    (:mod:`subscriber.protocol.capabilities`).
    """

    connect: bool = True
    create_slot: bool = True
    enabled: bool = True
    slot_name: str | None = None
    """None: the subscription's own name. :data:`NO_SLOT`: none at all."""
    binary: bool = False
    copy_data: bool = True
    streaming: Streaming = "parallel"
    synchronous_commit: SynchronousCommit = "off"
    two_phase: bool = False
    disable_on_error: bool = False
    password_required: bool = False
    """Unlike native's the default is false: this program runs with its caller's rights, not with a superuser's."""
    run_as_owner: bool = False
    origin: OriginFilter = "any"
    failover: bool = False

    @classmethod
    def parse(cls, items: Iterable[str]) -> Self:
        """Build from ``parameter=value`` texts.

        Raises:
            ConfigurationError: unknown parameter or value, or a combination that CREATE SUBSCRIPTION refuses.
        """
        values = _parse_parameters(items, frozenset(get_type_hints(cls)))
        for conflicting in ("enabled", "create_slot", "copy_data"):
            if values.get("connect") is False and values.get(conflicting) is True:
                raise ConfigurationError(
                    f"connect = false and {conflicting} = true are mutually exclusive options", hint="leave one of them out"
                )
        options = cls(**values)
        if not options.connect:
            options = replace(options, enabled=False, create_slot=False, copy_data=False)
        if options.slot_name == NO_SLOT:
            for name, conflicts in (("enabled", options.enabled), ("create_slot", options.create_slot)):
                if conflicts and name in values:
                    raise ConfigurationError(f"slot_name = NONE and {name} = true are mutually exclusive options", hint="name a slot")
                if conflicts:
                    raise ConfigurationError(f"subscription with slot_name = NONE must also set {name} = false", hint="name a slot")
        return options


ALTERABLE: Final = frozenset(
    {
        "slot_name",
        "synchronous_commit",
        "binary",
        "streaming",
        "disable_on_error",
        "password_required",
        "run_as_owner",
        "origin",
        "failover",
        "two_phase",
    }
)
"""What ``ALTER SUBSCRIPTION … SET (…)`` takes."""


def parse_changes(items: Iterable[str], allowed: frozenset[str] = ALTERABLE) -> dict[str, Any]:
    """Read ``parameter=value`` texts of an ALTER SUBSCRIPTION.

    Returns:
        Values by parameter.

    Raises:
        ConfigurationError: unknown parameter or value.
    """
    return _parse_parameters(items, allowed)


def _parse_parameters(items: Iterable[str], known: frozenset[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, text in parse_assignments(items).items():
        if name not in known:
            raise ConfigurationError(f'unrecognized subscription parameter: "{name}"', hint=f"one of {', '.join(sorted(known))}")
        if name == "slot_name":
            values[name] = _slot_name(text)
        elif name == "streaming":
            values[name] = _streaming(text)
        elif name == "synchronous_commit":
            values[name] = _synchronous_commit(text)
        elif name == "origin":
            values[name] = _choice(name, text, ("none", "any"))
        else:
            values[name] = parse_bool(name, text)
    return values


def _slot_name(text: str) -> str:
    if text.lower() == NO_SLOT:
        return NO_SLOT
    if not re.fullmatch(r"[a-z0-9_]{1,63}", text, re.ASCII):
        raise ConfigurationError(
            f'replication slot name "{text}" contains an invalid character or is empty or too long',
            hint="Replication slot names may only contain lower case letters, numbers, and the underscore character.",
        )
    return text


def _streaming(text: str) -> str:
    if text.strip().lower() == "parallel":
        return "parallel"
    try:
        return "on" if parse_bool("streaming", text) else "off"
    except ConfigurationError:
        raise ConfigurationError('streaming requires a Boolean value or "parallel"', hint="one of off, on, parallel") from None


def _synchronous_commit(text: str) -> str:
    word = text.strip().lower()
    if word in {"local", "remote_write", "remote_apply"}:
        return word
    try:
        return "on" if parse_bool("synchronous_commit", text) else "off"
    except ConfigurationError:
        raise ConfigurationError(
            f'invalid value for parameter "synchronous_commit": "{text}"',
            hint="Available values: local, remote_write, remote_apply, on, off.",
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a server keeps in postgresql.conf, under the same names; and ours for batches and copies.

    Times are seconds, sizes bytes.
    """

    wal_receiver_status_interval: float = 10.0
    wal_receiver_timeout: float = 60.0
    """0 disables it."""
    wal_retrieve_retry_interval: float = 5.0
    """Wait before the next attempt after an error; connections are tried again sooner at first, with backoff up to this."""
    watchdog_timeout: float = 60.0
    """An attempt that makes no progress for this long, although the target does nothing for it, is given up and made again; 0: never."""
    max_sync_workers_per_subscription: int = 2
    """Tables copied at the same time."""
    max_parallel_apply_workers_per_subscription: int = 2
    """Streamed transactions applied at the same time before their end, with ``streaming = parallel``; 0: none."""
    max_copy_workers_per_table: int = 2
    """Connections that copy one large table together."""
    copy_range_size: int = 256 * 1024**2
    """A table larger than this is copied in ranges of blocks of this many bytes."""
    logical_decoding_work_mem: int = 64 * 1024**2
    """Bytes of received changes kept in memory before transactions spill."""
    spool_directory: str | None = None
    """Where they spill; None: a private directory below the system's temporary one."""
    batch_rows: int = 50_000
    batch_size: int = 8 * 1024**2
    batch_delay: float = 0.0
    """How long a batch that is not full waits for more committed transactions. Waiting ones are always taken along."""
    create_tables: bool | None = None
    """Whether tables that the target lacks are created from the publication; None: if the target is an empty SQLite file. Not with
    PostgreSQL's own sink: the schema comes from ``pg_dump --schema-only`` there."""
    schema_change: SchemaChange | SchemaChangeCallback = "error"
    """What to do about a column that was added on the publisher: ``error``, ``add`` it to the target's table, or ``ignore`` it; or who
    is asked. Not with PostgreSQL's own sink, where a missing column is an error as natively."""
    insert_conflict: InsertConflict = "error"
    """What an INSERT of a key that is there already is: an ``error``, as natively, or an ``upsert``. Not with PostgreSQL's own sink."""

    @classmethod
    def parse(cls, items: Iterable[str]) -> Self:
        """Build from ``name=value`` texts.

        Raises:
            ConfigurationError: unknown name, or a value out of its range.
        """
        known = {field.name for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, text in parse_assignments(items).items():
            if name not in known:
                raise ConfigurationError(f'unrecognized configuration parameter "{name}"', hint=f"one of {', '.join(sorted(known))}")
            if name == "wal_receiver_status_interval":
                values[name] = parse_seconds(name, text, "s")
            elif name in {"wal_receiver_timeout", "wal_retrieve_retry_interval", "watchdog_timeout", "batch_delay"}:
                values[name] = parse_seconds(name, text)
            elif name in {"copy_range_size", "logical_decoding_work_mem", "batch_size"}:
                values[name] = parse_bytes(name, text)
            elif name == "spool_directory":
                values[name] = text
            elif name == "create_tables":
                values[name] = parse_bool(name, text)
            elif name in _CHOICES:
                values[name] = _choice(name, text, _CHOICES[name])
            else:
                if not text.isdecimal():
                    raise ConfigurationError(f'invalid value for parameter "{name}": "{text}"', hint="a whole number")
                values[name] = int(text)
        return cls(**values)

    def __post_init__(self) -> None:
        for name, low in _AT_LEAST.items():
            if getattr(self, name) < low:
                raise ConfigurationError(f'{getattr(self, name)} is outside the valid range for parameter "{name}"', hint=f"at least {low}")


_CHOICES: Final = {"schema_change": ("error", "add", "ignore"), "insert_conflict": ("error", "upsert")}

_AT_LEAST: Final[dict[str, float]] = {
    "wal_receiver_status_interval": 0,
    "wal_receiver_timeout": 0,
    "wal_retrieve_retry_interval": 0.001,
    "watchdog_timeout": 0,
    "max_sync_workers_per_subscription": 1,
    "max_parallel_apply_workers_per_subscription": 0,
    "max_copy_workers_per_table": 1,
    "copy_range_size": 64 * 1024,
    "logical_decoding_work_mem": 64 * 1024,
    "batch_rows": 1,
    "batch_size": 1024,
    "batch_delay": 0,
}
