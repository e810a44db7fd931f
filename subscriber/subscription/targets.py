"""Find the kind of a target by its URL, and what verbs open there.

The scheme of a URL is the name of an entry point of the group ``subscriber.targets`` (:mod:`subscriber.catalog.target_kind`). A text
without a scheme is a conninfo of libpq, and a scheme that nothing registers is tried as one of SQLAlchemy's dialects.
``plugin:package.module:Class`` is an output plugin, which has no sink and no catalog.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

from subscriber.catalog import Catalog, Observation
from subscriber.catalog.target_kind import CatalogKind, PublishingKind, SchemaKind, SequencesKind, TargetKind
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import ConfigurationError
from subscriber.interfaces import Sink

if TYPE_CHECKING:
    from subscriber.catalog.subscriptions import StoredCatalog

__all__ = [
    "GROUP",
    "has_schema",
    "has_sequences",
    "is_plugin",
    "is_postgres",
    "observe_target",
    "observed",
    "open_catalog",
    "open_target",
    "opened_catalog",
    "required_ability",
    "stored_catalog",
    "target_kind",
]

GROUP: Final = "subscriber.targets"
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9._-]*)(\+[A-Za-z0-9+._-]*)?://")
_CONNINFO: Final = "postgresql"
_OTHERS: Final = "sqlalchemy"

_Ability = TypeVar("_Ability")


def target_kind(target: str) -> TargetKind:
    """Return the kind of a target.

    Raises:
        ConfigurationError: it is an output plugin, or names a driver of PostgreSQL; two packages register its scheme; or the kind's package
            cannot be imported.
    """
    if is_plugin(target):
        raise ConfigurationError(
            "an output plugin stores no subscription",
            hint="use subscriber run --connection … --publication … --target plugin:…; its status is that of the slot on the publisher",
        )
    scheme = _SCHEME.match(target)
    kind = _kind(_CONNINFO if scheme is None else scheme[1].lower())
    if scheme is not None and scheme[2] and isinstance(kind, PublishingKind):
        raise ConfigurationError(f'a PostgreSQL target is postgresql://, not "{scheme[0]}"', hint="leave the driver out of the URL")
    return kind


@cache
def _kind(scheme: str) -> TargetKind:
    from importlib.metadata import entry_points  # noqa: PLC0415 -- not every verb has a target

    known = entry_points(group=GROUP)
    found = {point.value: point for point in known.select(name=scheme) or known.select(name=_OTHERS)}
    if not found:
        raise ConfigurationError("this installation registers no kinds of targets", hint="install pg-subscriber again with pip")
    if len(found) > 1:
        raise ConfigurationError(f"targets {scheme}:// are registered by {' and by '.join(sorted(found))}", hint="uninstall one of them")
    (point,) = found.values()
    try:
        kind: TargetKind = point.load()()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"targets {scheme}:// need {point.value}: {error}", hint="install that package again") from error
    if lacking := [name for name in ("noun", "sink") if not hasattr(kind, name)]:
        raise ConfigurationError(
            f"targets {scheme}:// are registered by {point.value}, which has no {' and no '.join(lacking)}",
            hint="a TargetKind has both: correct that class, or install another version of its package",
        )
    return kind


def required_ability(target: str, ability: type[_Ability], lacks: str, hint: str) -> _Ability:
    """Return the kind of a target as one that has an ability.

    Args:
        target: its URL.
        ability: one of the protocols in :mod:`subscriber.catalog.target_kind`.
        lacks: what such a target lacks otherwise, after its noun, for example "has no sequences".
        hint: for the error.

    Raises:
        ConfigurationError: it does not have it.
    """
    kind = target_kind(target)
    if not isinstance(kind, ability):
        raise ConfigurationError(f"{kind.noun} {lacks}", hint=hint)
    return kind


def is_plugin(target: str) -> bool:
    """Whether the target is an output plugin, ``plugin:package.module:Class``."""
    return target.startswith("plugin:")


def is_postgres(target: str) -> bool:
    """Whether the target is a PostgreSQL database. pg_dump copies its schema, and it can be a publisher."""
    return isinstance(target_kind(target), PublishingKind)


def has_schema(target: str) -> bool:
    """Whether the schema of the target can be compared with the publisher's."""
    return is_postgres(target) or isinstance(target_kind(target), SchemaKind)


def has_sequences(target: str) -> bool:
    """Whether the target gives numbers to new rows, so that an application can be switched to it."""
    return isinstance(target_kind(target), SequencesKind)


def open_target(target: str, options: SubscriptionOptions, settings: Settings, *, defined: bool = False) -> Sink:
    """Make the sink for a URL or conninfo. See :meth:`subscriber.catalog.target_kind.TargetKind.sink`.

    Raises:
        ConfigurationError: no sink supports this kind of URL, its driver is not installed, the text is neither a URL nor a conninfo, or a
            setting does not apply to this kind of target.
    """
    return target_kind(target).sink(target, options, settings, defined=defined)


def _catalog_kind(target: str) -> CatalogKind:
    hint = (
        "use subscriber run with --connection and --publication; to remove a subscription, drop its slot on the publisher, and delete"
        " what the target stores"
    )
    return required_ability(target, CatalogKind, "has no catalog of subscriptions", hint)


async def open_catalog(target: str, application_name: str) -> Catalog:
    """Connect to the target's catalog of subscriptions. Create the catalog if it does not exist.

    Raises:
        ConfigurationError: as :func:`open_target`; or this kind of target has no catalog.
        TargetUnavailable, TargetError: the target cannot be reached, or rejected a request.
    """
    return await _catalog_kind(target).open_catalog(target, application_name)


@contextlib.asynccontextmanager
async def opened_catalog(target: str, application_name: str) -> AsyncIterator[Catalog]:
    """As :func:`open_catalog`, until the block ends."""
    catalog = await open_catalog(target, application_name)
    try:
        yield catalog
    finally:
        await catalog.close()


@contextlib.asynccontextmanager
async def stored_catalog(target: str, application_name: str) -> AsyncIterator[StoredCatalog[Any]]:
    """As :func:`opened_catalog`, for a target whose catalog has rows.

    Raises:
        ConfigurationError: as :func:`open_catalog`; or its catalog has no rows.
        TargetUnavailable, TargetError: as there.
    """
    from subscriber.catalog.subscriptions import StoredCatalog  # noqa: PLC0415 -- most verbs do not need it

    async with opened_catalog(target, application_name) as catalog:
        if not isinstance(catalog, StoredCatalog):
            raise ConfigurationError(f"the catalog of {target_kind(target).noun} has no rows", hint="use another kind of target")
        yield catalog


async def observe_target(target: str) -> Sequence[Observation]:
    """Read what the target knows of its subscriptions. Nothing is created.

    Raises:
        ConfigurationError, TargetUnavailable, TargetError: as :func:`open_catalog`.
    """
    return await _catalog_kind(target).observe(target)


async def observed(target: str, name: str) -> Observation | None:
    """What the target knows of one subscription; None: it does not exist. Raises as :func:`observe_target`."""
    return next((each for each in await observe_target(target) if each.definition.name == name), None)
