"""The parameters of ``CREATE SUBSCRIPTION … WITH (…)``. Source: PostgreSQL manual, CREATE SUBSCRIPTION and ALTER SUBSCRIPTION."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from subscriber.config.conflicts import CONFLICT, ConflictRules
from subscriber.config.copy_window import COPY_WINDOW, CopyWindow
from subscriber.config.mapping import COLUMNS, MAP, RENAME, TableMapping, parse_excluded, table_mapping
from subscriber.config.option import Alterable, Option, declared, option, parse_options
from subscriber.config.parameter_types import (
    CONFLICT_LOG,
    COPY_DATA,
    NO_SLOT,
    SLOT_NAME,
    STREAMING,
    SYNCHRONOUS_COMMIT,
    TIMEOUT,
    CopyData,
    OnError,
    OriginFilter,
    Streaming,
    SynchronousCommit,
    read_conflict_log,
)
from subscriber.config.reading import BOOLEAN, RATE, SECONDS, WHOLE, OptionType, choice
from subscriber.config.table_names import TableOption, patterns_of
from subscriber.config.where import WHERE, filters_of
from subscriber.errors import ConfigurationError

__all__ = [
    "ALTERABLE",
    "KEYED",
    "LIVE",
    "PARAMETERS",
    "STORED",
    "SubscriptionOptions",
    "parse_changes",
]

_UNRECOGNIZED: Final = "unrecognized subscription parameter:"

KEYED: Final = (WHERE, CONFLICT, MAP, COLUMNS, RENAME)
"""The parameters that have a value for each key."""


def _keyed(
    given: TableOption, type: str, help: str, *, column: str, alter: Alterable = "never", ours: bool = False
) -> str | Mapping[str, str]:
    """Declare one of them."""
    found: str | Mapping[str, str] = option(
        "",
        OptionType(name=type, parse=given.parse),
        help,
        default_text="none",
        alter=alter,
        column=column,
        length=given.most,
        keyed=True,
        ours=ours,
    )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionOptions:
    """The parameters of CREATE SUBSCRIPTION.

    As in a native subscription, a parameter that the publisher is too old for is not sent to it (:mod:`subscriber.protocol.capabilities`).
    """

    connect: bool = option(
        True, BOOLEAN, "connect to the publisher at once; false: only define the subscription, disabled and without tables"
    )
    create_slot: bool = option(True, BOOLEAN, "create the replication slot on the publisher")
    enabled: bool = option(True, BOOLEAN, "replicate as soon as the subscription is created")
    slot_name: str | None = option(
        None,
        SLOT_NAME,
        "replication slot; none: no slot",
        default_text="the subscription's name",
        alter="always",
    )
    """None: the subscription's name. :data:`NO_SLOT`: no slot."""
    binary: bool = option(False, BOOLEAN, "receive values in binary format", since=14, alter="always", column="subbinary")
    copy_data: CopyData = option(
        True,
        COPY_DATA,
        "copy the rows that the published tables have; reconcile: compare them with the target's, and write only what differs",
    )
    streaming: Streaming = option(
        "parallel",
        STREAMING,
        "receive large transactions before they are committed; parallel (publisher 16 or later): also apply them before",
        since=14,
        alter="always",
        column="substream",
        codes={"off": "f", "on": "t", "parallel": "p"},
    )
    synchronous_commit: SynchronousCommit = option(
        "off", SYNCHRONOUS_COMMIT, "of the sessions that apply; on: each batch waits for the disk", alter="always", column="subsynccommit"
    )
    two_phase: bool = option(False, BOOLEAN, "prepare transactions in the target too", since=15, alter="disabled", alter_since=18)
    disable_on_error: bool = option(
        False, BOOLEAN, "as in PostgreSQL; the same as on_error: true is disable, false is retry", alter="always"
    )
    """True if and only if :attr:`on_error` is ``disable``."""
    on_error: OnError = option(
        "retry",
        choice("retry", "disable", "park"),
        "disable: stop after an error; park: leave out the table that an error belongs to, and continue with the others",
        alter="always",
        column="subonerror",
        codes={"retry": "r", "disable": "d", "park": "p"},
        ours=True,
    )
    park_after: int = option(
        3,
        WHOLE,
        "attempts to apply a transaction or to copy a table, before on_error = park parks the table",
        least=1,
        alter="always",
        column="subparkafter",
        ours=True,
    )
    park_retry: float = option(
        0.0,
        SECONDS,
        "how long after it was parked a table is reconciled; 0: only by alter --resync",
        least=0,
        alter="always",
        column="subparkretry",
        ours=True,
    )
    """In seconds."""
    password_required: bool = option(
        False, BOOLEAN, "fail if the publisher asks for no password", alter="always", column="subpasswordrequired"
    )
    """Unlike in PostgreSQL, the default is false: this program has the rights of the user who starts it, not those of a superuser."""
    run_as_owner: bool = option(
        False, BOOLEAN, "apply as the subscription's owner, not each table's", alter="always", column="subrunasowner"
    )
    origin: OriginFilter = option(
        "any", choice("none", "any"), "none: only changes that have no origin", since=16, alter="always", column="suborigin"
    )
    failover: bool = option(
        False, BOOLEAN, "synchronize the slot to standbys", since=17, alter="disabled", alter_since=17, column="subfailover"
    )
    wal_receiver_timeout: float = option(
        -1.0,
        TIMEOUT,
        "reconnect when nothing arrives from the publisher for this long; 0: never; -1: as the setting of this name",
        default_text="-1",
        least=-1,
        alter="always",
        column="subwalrcvtimeout",
    )
    """In seconds."""
    retain_dead_tuples: bool = option(False, BOOLEAN, "only false: the conflict update_deleted is not detected")
    max_copy_rate: float = option(
        0.0,
        RATE,
        "how fast tables are copied, or compared to reconcile them, all together; 0: no limit",
        least=0,
        alter="always",
        column="submaxcopyrate",
        ours=True,
        live=True,
    )
    """In bytes per second."""
    max_apply_rate: float = option(
        0.0,
        RATE,
        "how fast changes are applied, on average; 0: no limit",
        least=0,
        alter="always",
        column="submaxapplyrate",
        ours=True,
        live=True,
    )
    """In bytes per second, as the publisher sends them."""
    copy_window: str = option(
        "",
        COPY_WINDOW,
        "the hours in which copies may begin, such as 22:00-06:00; those that run are completed",
        default_text="none",
        alter="always",
        column="subcopywindow",
        length=80,
        ours=True,
        live=True,
    )
    where: str | Mapping[str, str] = _keyed(
        WHERE,
        "expression",
        "where.SCHEMA.TABLE: a row filter, applied by this program to the changes of the table, and by the publisher to its copy",
        column="subwhere",
        alter="always",
    )
    """Give a mapping of ``SCHEMA.TABLE`` to expressions. It is kept as one text; :attr:`row_filters` returns the mapping."""
    conflict: str | Mapping[str, str] = _keyed(
        CONFLICT,
        "rule",
        "conflict.KIND, or conflict.KIND.SCHEMA.TABLE: what to do about a conflict",
        column="subconflict",
        alter="always",
        ours=True,
    )
    """Give a mapping of ``KIND`` or ``KIND.SCHEMA.TABLE`` to rules. It is kept as one text; :attr:`conflict_rules` reads it."""
    conflict_log: str = option(
        "",
        CONFLICT_LOG,
        "table of the target in which each conflict that is no error is written; it is created if it does not exist",
        default_text="none",
        alter="always",
        column="subconflictlog",
        length=300,
        ours=True,
    )
    conflict_log_rows: bool = option(
        False, BOOLEAN, "also write the target's row and the new row into it", alter="always", column="subconflictlogrows", ours=True
    )
    conflict_log_retention: float = option(
        30 * 86400.0,
        SECONDS,
        "how long its rows are kept; 0: for ever",
        default_text="30d",
        least=0,
        most=1e10,
        alter="always",
        column="subconflictlogretention",
        ours=True,
    )
    """In seconds."""
    map: str | Mapping[str, str] = _keyed(
        MAP,
        "schema.table",
        "map.SCHEMA.TABLE=OTHER.NAME: the table has another name in the target; map.SCHEMA.*=OTHER.*: all tables of the schema",
        column="submap",
    )
    """Give a mapping. It is kept as one text; :attr:`mapping` has all names."""
    columns: str | Mapping[str, str] = _keyed(
        COLUMNS,
        "list of columns",
        "columns.SCHEMA.TABLE=(a, b): the target has only these columns of the table; others are left out",
        column="subcolumns",
    )
    rename: str | Mapping[str, str] = _keyed(
        RENAME, "column:name", "rename.SCHEMA.TABLE=a:x, b:y: columns have other names in the target", column="subrename"
    )
    exclude_table: str = option(
        "",
        OptionType(name="patterns", parse=parse_excluded),
        "tables that are left out, as pg_dump --exclude-table has them, separated by commas",
        default_text="none",
        alter="always",
        column="subexclude",
        length=1000,
        ours=True,
    )

    def __post_init__(self) -> None:
        for name in ("wal_receiver_timeout", "max_copy_rate", "max_apply_rate", "park_after", "park_retry", "conflict_log_retention"):
            PARAMETERS[name].check_range(getattr(self, name))
        if self.disable_on_error and self.on_error == "park":
            raise ConfigurationError(
                "disable_on_error = true and on_error = park are mutually exclusive options", hint="specify one of them"
            )
        if self.disable_on_error:
            object.__setattr__(self, "on_error", "disable")
        object.__setattr__(self, "disable_on_error", self.on_error == "disable")
        if self.retain_dead_tuples:
            raise ConfigurationError(
                "retain_dead_tuples = true is not supported: it keeps deleted rows of a PostgreSQL target for the conflict update_deleted,"
                " which this program does not detect",
                hint="omit it; an update of such a row is counted as update_missing",
            )
        object.__setattr__(self, "conflict_log", CONFLICT_LOG.parse("conflict_log", self.conflict_log))
        object.__setattr__(self, "copy_window", COPY_WINDOW.parse("copy_window", self.copy_window))
        for keyed in KEYED:
            if not isinstance(given := getattr(self, keyed.name), str):
                object.__setattr__(self, keyed.name, keyed.changed("", given))
        object.__setattr__(self, "exclude_table", parse_excluded("exclude_table", self.exclude_table))
        # refuses what contradicts itself
        _ = self.mapping

    @property
    def row_filters(self) -> dict[tuple[str, str], str]:
        """The expressions of ``where`` by schema and name of the table."""
        return filters_of(str(self.where))

    @property
    def conflict_rules(self) -> ConflictRules:
        """The rules of ``conflict``, with the target's names of tables."""
        return ConflictRules.read(str(self.conflict), self.mapping.target)

    @property
    def conflict_log_table(self) -> tuple[str, str]:
        """Schema and name of ``conflict_log``."""
        return read_conflict_log(self.conflict_log)

    @property
    def window(self) -> CopyWindow | None:
        """``copy_window``; None: copies may always begin."""
        return CopyWindow.parse("copy_window", self.copy_window) if self.copy_window else None

    @property
    def without_limits(self) -> Self:
        """These options without those that a subscription follows while it runs."""
        return replace(self, **{name: each.default for name, each in LIVE.items()})

    @property
    def given_conflict_rules(self) -> Mapping[str, str]:
        """The rules that are given, by ``KIND`` or ``KIND.SCHEMA.TABLE``."""
        return CONFLICT.values(str(self.conflict))

    @property
    def mapping(self) -> TableMapping:
        """The names and columns of the target's tables."""
        return table_mapping(str(self.map), str(self.columns), str(self.rename), self.exclude_table)

    @property
    def mapping_texts(self) -> dict[str, dict[str, str]]:
        """What :attr:`mapping` is made of, as a user writes it: by parameter, and by table or pattern."""
        texts = {option.name: option.values(str(getattr(self, option.name))) for option in (MAP, COLUMNS, RENAME)}
        return {**texts, "exclude_table": dict.fromkeys(patterns_of(self.exclude_table), "") if self.exclude_table else {}}

    @classmethod
    def parse(cls, items: Iterable[str]) -> Self:
        """Build from ``parameter=value`` texts.

        Raises:
            ConfigurationError: unknown parameter or value, or a combination that CREATE SUBSCRIPTION rejects.
        """
        values = _one_name(parse_options(items, declared(cls), _UNRECOGNIZED))
        for conflicting in ("enabled", "create_slot", "copy_data"):
            if values.get("connect") is False and values.get(conflicting):
                given = PARAMETERS[conflicting].type.show(values[conflicting])
                raise ConfigurationError(
                    f"connect = false and {conflicting} = {given} are mutually exclusive options", hint="leave one of them out"
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


PARAMETERS: Final = declared(SubscriptionOptions)
"""All parameters, by name."""

STORED: Final = {name: each for name, each in PARAMETERS.items() if each.column}
"""The parameters that have a column in the target's catalog."""

ALTERABLE: Final = {name: each for name, each in PARAMETERS.items() if each.alter != "never"}
"""The parameters that ``ALTER SUBSCRIPTION … SET (…)`` takes."""

LIVE: Final = {name: each for name, each in PARAMETERS.items() if each.live}
"""The limits that a subscription follows while it runs."""


def parse_changes(items: Iterable[str], allowed: Mapping[str, Option] = ALTERABLE) -> dict[str, Any]:
    """Read ``parameter=value`` texts of an ALTER SUBSCRIPTION.

    Returns:
        Values by parameter.

    Raises:
        ConfigurationError: unknown parameter or value.
    """
    return _one_name(parse_options(items, allowed, _UNRECOGNIZED))


def _one_name(values: dict[str, Any]) -> dict[str, Any]:
    """``on_error`` in place of PostgreSQL's ``disable_on_error``."""
    if "disable_on_error" in values:
        if "on_error" in values:
            raise ConfigurationError(
                'conflicting or redundant options: "disable_on_error" and "on_error" are given', hint="specify one of them"
            )
        values["on_error"] = "disable" if values.pop("disable_on_error") else "retry"
    return values
