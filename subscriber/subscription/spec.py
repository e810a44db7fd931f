"""What does not change while a subscription runs: its definition, the settings of the process, and the target."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from subscriber.apply.row_filters import filter_expressions
from subscriber.catalog import Definition
from subscriber.catalog.target_kind import ComparedKind
from subscriber.config import RULES, Settings, SubscriptionOptions, check_slot_name
from subscriber.errors import ConfigurationError, PublisherError
from subscriber.interfaces import ApplyWorkersSink, ResolvingSink, Sink
from subscriber.protocol.session_name import session_name
from subscriber.subscription.targets import open_target, required_ability
from subscriber.walreceiver.connection import WalReceiverConnection

__all__ = ["RunSpec", "require_rules"]


def require_rules(options: SubscriptionOptions, sink: Sink) -> None:
    """Check that a target can follow the rules for conflicts.

    Raises:
        ConfigurationError: it cannot.
    """
    rules = options.conflict_rules
    able: Mapping[str, Collection[str]] = sink.conflict_rules if isinstance(sink, ResolvingSink) else {}
    for kind in rules.kinds("changed"):
        known = (RULES[kind][0], *able.get(kind, ()))
        for rule in sorted(rules.uses(kind).difference(known)):
            raise ConfigurationError(
                f"conflict.{kind} = {rule} is not available for this kind of target",
                hint=f"use {' or '.join(known)}" if len(known) > 1 else "omit the rule",
            )
    if options.conflict_log and not (isinstance(sink, ResolvingSink) and sink.logs_conflicts):
        raise ConfigurationError(
            "conflict_log is not available for this kind of target", hint="omit it; conflicts are in the log of the run"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One subscription, ready to be set up and run.

    Attributes:
        name: name of the subscription.
        conninfo: connection string of the publisher.
        publications: the subscribed publications.
        options: the parameters of CREATE SUBSCRIPTION.
        settings: of the process.
        sink: the target.
        target: its URL or conninfo; None: the caller gave the sink.
        generation: the generation of the definition in the target's catalog that this comes from. None: the command line, or the arguments
            of a call, define the subscription.

    Raises:
        ConfigurationError: these values are not valid for a run.
    """

    name: str
    conninfo: str
    publications: tuple[str, ...]
    options: SubscriptionOptions
    settings: Settings
    sink: Sink
    target: str | None = None
    generation: int | None = None

    def __post_init__(self) -> None:
        options = self.options
        if not self.publications:
            raise ConfigurationError("no publication to subscribe to", hint="give at least one publication")
        if not options.connect or not options.enabled:
            word = "enabled" if options.connect else "connect"
            raise ConfigurationError(f"{word} = false is not allowed for run", hint="omit the parameter")
        check_slot_name(self.slot_name)
        filter_expressions(options)
        require_rules(options, self.sink)
        if self.settings.apply_workers > 1 and not (isinstance(self.sink, ApplyWorkersSink) and self.sink.has_apply_workers):
            raise ConfigurationError(
                f"apply_workers = {self.settings.apply_workers} is not available for this kind of target",
                hint="omit it: only a PostgreSQL target has several sessions that apply",
            )
        if options.wal_receiver_timeout >= 0:
            object.__setattr__(self, "settings", replace(self.settings, wal_receiver_timeout=options.wal_receiver_timeout))
        if self.settings.verify_interval:
            if self.target is None:
                raise ConfigurationError("verify_interval needs a target that is given as a URL", hint="call subscriber.verify instead")
            required_ability(self.target, ComparedKind, "cannot be compared with the publisher", "omit verify_interval")
        if self.settings.dropped_columns == "drop" and self.settings.schema_change != "follow":
            raise ConfigurationError(
                "dropped_columns = drop needs schema_change = follow: otherwise no column is known to be dropped",
                hint="set schema_change = follow, or omit dropped_columns",
            )
        if options.two_phase and self.settings.schema_change == "follow":
            raise ConfigurationError(
                "schema_change = follow is not available with two_phase = true: columns would be changed in a prepared transaction",
                hint="use two_phase = false, or schema_change = add",
            )
        if (options.columns or options.rename) and self.settings.schema_change == "follow":
            raise ConfigurationError(
                "schema_change = follow is not available with columns or rename: a column may have another name in the target",
                hint="use schema_change = add, or follow tables that have all columns under their names",
            )
        if options.two_phase and not self.sink.supports_two_phase:
            raise ConfigurationError("this kind of target cannot hold prepared transactions", hint="use two_phase = false")

    def require_two_phase(self, slot_name: str) -> None:
        """Check that the target can hold what a slot sends that was made, or altered, to send prepared transactions.

        Raises:
            PublisherError: it cannot.
        """
        if not self.sink.supports_two_phase:
            raise PublisherError(
                f'replication slot "{slot_name}" sends prepared transactions, which this kind of target cannot hold',
                hint="use a slot without two_phase",
            )

    @classmethod
    def of_arguments(
        cls,
        name: str,
        *,
        connection: str,
        publications: Sequence[str],
        target: str | Sink,
        options: SubscriptionOptions | None,
        settings: Settings | None,
    ) -> Self:
        """Take the arguments of :class:`subscriber.Subscription`.

        Raises:
            ConfigurationError: ``publications`` is a string, or no sink supports the target.
        """
        if isinstance(publications, str):
            raise ConfigurationError("publications is a string", hint='give a list, as in publications=["app"]')
        options, settings = options or SubscriptionOptions(), settings or Settings()
        return cls(
            name=name,
            conninfo=connection,
            publications=tuple(publications),
            options=options,
            settings=settings,
            sink=open_target(target, options, settings) if isinstance(target, str) else target,
            target=target if isinstance(target, str) else None,
        )

    @classmethod
    def of_definition(cls, definition: Definition, target: str, options: SubscriptionOptions, settings: Settings) -> Self:
        """Take a subscription that the target's catalog defines.

        Raises:
            ConfigurationError: no sink supports the target.
        """
        return cls(
            name=definition.name,
            conninfo=definition.conninfo or "",
            publications=definition.publications,
            options=options,
            settings=settings,
            sink=open_target(target, options, settings, defined=True),
            target=target,
            generation=definition.generation,
        )

    @property
    def managed(self) -> bool:
        """Whether the target's catalog defines the subscription."""
        return self.generation is not None

    @property
    def slot_name(self) -> str:
        """Name of the replication slot."""
        return self.options.slot_name or self.name

    async def connect(self, purpose: str) -> WalReceiverConnection:
        """Connect to the publisher. ``purpose`` is part of the session's application_name.

        Raises:
            PublisherError: the publisher cannot be reached, or rejects the connection.
        """
        return await WalReceiverConnection.connect(self.conninfo, application_name=session_name(self.name, purpose))
