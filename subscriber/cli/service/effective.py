"""``config show``: each value that holds, and where it comes from. Passwords are never part of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from subscriber.catalog import Definition
from subscriber.config import PARAMETERS, SETTINGS, STORED, Option
from subscriber.config.file.configuration import Configuration
from subscriber.config.file.sections import APPLIER, LOG, PROGRAM, SUBSCRIPTION, TARGET
from subscriber.redaction import redacted

__all__ = ["EffectiveValue", "effective", "stored"]


class EffectiveValue(NamedTuple):
    """One value.

    Attributes:
        key: as in the file.
        value: as it may be shown.
        source: ``default``, ``file``, ``file, settings`` (of all subscriptions), ``command line``, ``environment NAME``, ``secret PATH``
            or ``stored subscription``.
    """

    key: str
    value: str
    source: str


def effective(
    configuration: Configuration, options: Mapping[str, str], settings: Mapping[str, str], log: Mapping[str, str]
) -> Iterator[EffectiveValue]:
    """All values of a configuration, with those of the command line, and the defaults."""
    yield from _values(configuration, "", PROGRAM, {})
    yield from _values(configuration, "log", LOG, log)
    yield from _values(configuration, "settings", SETTINGS, settings)
    for name, target in configuration.targets.items():
        yield from _values(configuration, f"targets.{name}", TARGET, {})
        if target.applier:
            yield from _values(configuration, f"targets.{name}.applier", APPLIER, {})
    for name in configuration.subscriptions:
        path = f"subscriptions.{name}"
        yield from _values(configuration, path, SUBSCRIPTION, {})
        yield from _values(configuration, f"{path}.options", PARAMETERS, options)
        yield from _values(configuration, f"{path}.settings", SETTINGS, settings, above="settings")


def stored(target: str, definitions: Iterable[Definition]) -> Iterator[EffectiveValue]:
    """The options of the subscriptions that a target's catalog defines."""
    for definition in definitions:
        path = f"targets.{target}.{definition.name}"
        yield EffectiveValue(f"{path}.publications", ", ".join(definition.publications), "stored subscription")
        for name, each in STORED.items():
            value = getattr(definition.options, name)
            source = "default" if value == each.default else "stored subscription"
            yield EffectiveValue(f"{path}.options.{name}", redacted(each.type.show(value)) or each.shown_default, source)


def _values(
    configuration: Configuration, path: str, known: Mapping[str, Option], first: Mapping[str, str], above: str = ""
) -> Iterator[EffectiveValue]:
    """The values of one table. ``first``: of the command line; ``above``: the table whose values hold where this one has none."""
    own, inherited = _table(configuration, path), _table(configuration, above) if above else {}
    for name, each in known.items():
        given = dict.fromkeys([*first, *own, *inherited])
        keys = [key for key in given if key == name or (each.keyed and key.startswith(f"{name}."))]
        for key in keys:
            full = _joined(path, key)
            if key in first:
                yield EffectiveValue(full, redacted(first[key]), "command line")
            elif key in own:
                yield EffectiveValue(full, own[key], _source(configuration, full))
            else:
                yield EffectiveValue(full, inherited[key], f"file, {above}")
        if not keys:
            yield EffectiveValue(_joined(path, name), each.shown_default, "default")


def _table(configuration: Configuration, path: str) -> dict[str, str]:
    before = f"{path}." if path else ""
    return {key.removeprefix(before): text for key, text in configuration.given.items() if key.startswith(before)}


def _source(configuration: Configuration, key: str) -> str:
    kind, _, name = configuration.sources.get(key, "").partition(":")
    return f"{'environment' if kind == 'env' else 'secret'} {name}" if name else "file"


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
