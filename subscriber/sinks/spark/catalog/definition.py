"""A subscription that was created by ``subscriber create``: ``definition.json`` and ``generation.json`` in the lake.

``definition.json`` has the connection string, with its password if it has one, so only its owner may read it. The holder of the writer's
lock writes it. A verb writes ``generation.json`` when it claims the subscription while another process still runs it. In a lake without
``definition.json``, the command line defines the subscription (``subscriber run --connection``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from subscriber.config import STORED, CopyData, SubscriptionOptions, parse_changes
from subscriber.protocol.conninfo import StoredConninfo
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.spark.files.documents import parse_document, read_document, write_document
from subscriber.sinks.spark.files.storage import Storage

__all__ = ["DEFINITION", "GENERATION", "LakeDefinition", "read_definition", "read_generation", "write_definition", "write_generation"]

DEFINITION: Final = "definition.json"
GENERATION: Final = "generation.json"

OPTIONS: Final = {name: option for name, option in STORED.items() if name != "binary"}
"""The parameters that are stored. ``two_phase`` follows from the state in the catalog. A lake does not support ``binary``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeDefinition:
    """The stored part of a :class:`subscriber.catalog.Definition`, with the same attributes. ``options`` are those in :data:`OPTIONS`."""

    enabled: bool = True
    conninfo: str | None = None
    made: bool = True
    pending_refresh: CopyData | None = None
    skip_lsn: Lsn = INVALID_LSN
    options: SubscriptionOptions = field(default_factory=SubscriptionOptions)


def read_definition(storage: Storage) -> LakeDefinition | None:
    """Read the definition. None if there is none."""
    return parse_document(storage, DEFINITION, _parsed)


def _parsed(document: dict[str, Any]) -> LakeDefinition:
    stored = document["options"]
    # a time is stored in seconds; as the text of an option, it would have a unit
    times: dict[str, Any] = {name: value for name, value in stored.items() if name in OPTIONS and type(value) is float}
    texts = [f"{name}={value}" for name, value in stored.items() if name not in times]
    return LakeDefinition(
        enabled=bool(document["enabled"]),
        conninfo=None if document["conninfo"] is None else StoredConninfo(document["conninfo"]),
        made=bool(document["made"]),
        pending_refresh=document["pending_refresh"],
        skip_lsn=Lsn.parse(document["skip_lsn"]),
        options=SubscriptionOptions(**parse_changes(texts, OPTIONS), **times),
    )


def write_definition(storage: Storage, definition: LakeDefinition) -> None:
    """Store the definition. Only its owner may read it."""
    options: Mapping[str, Any] = {name: getattr(definition.options, name) for name in sorted(OPTIONS)}
    document = {
        "enabled": definition.enabled,
        "conninfo": definition.conninfo,
        "made": definition.made,
        "pending_refresh": definition.pending_refresh,
        "skip_lsn": str(definition.skip_lsn),
        "options": options,
    }
    write_document(storage, DEFINITION, document, private=True)


def read_generation(storage: Storage) -> int:
    """Read how often verbs have claimed the subscription."""
    document = read_document(storage, GENERATION)
    return 0 if document is None else int(document.get("generation", 0))


def write_generation(storage: Storage, generation: int) -> None:
    """Store the count of claims."""
    write_document(storage, GENERATION, {"generation": generation})
