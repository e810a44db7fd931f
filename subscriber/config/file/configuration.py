"""Read a configuration file: TOML, whose options and settings have the names that ``-o`` and ``-c`` take.

Each error names the file and the key. Values are read by the same declarations as those of the command line: a value becomes the text
that the command line would have, and a table inside of ``options`` becomes a dotted name (``where.public.orders``).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from subscriber.config.file.sections import APPLIER, LOG, NAMES, PROGRAM, REQUIRED, SECRETS, SUBSCRIPTION, TARGET, LogOptions
from subscriber.config.option import Option, parse_options
from subscriber.config.parameters import PARAMETERS, SubscriptionOptions
from subscriber.config.reading import STRING
from subscriber.config.settings import SETTINGS, Settings
from subscriber.config.suggestion import suggestion
from subscriber.errors import ConfigurationError
from subscriber.redaction import HIDDEN, redacted

__all__ = ["Configuration", "ConfiguredSubscription", "ConfiguredTarget", "differences", "parse_configuration"]

_TABLES: Final = ("log", "settings", "targets", "subscriptions")
_UNKNOWN: Final = "unrecognized key"

ReadSecret = Callable[[str], str]
"""Reads what a reference, ``env:NAME`` or ``file:PATH``, names. Raises ConfigurationError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredTarget:
    """A target. ``url`` and ``password`` are resolved, so the object must not be shown."""

    name: str
    url: str = field(repr=False)
    password: str | None = field(default=None, repr=False)
    launcher: bool = False
    applier: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredSubscription:
    """A subscription. ``connection`` and ``password`` are resolved, so the object must not be shown."""

    name: str
    connection: str = field(repr=False)
    password: str | None = field(default=None, repr=False)
    publications: tuple[str, ...]
    target: ConfiguredTarget
    options: Mapping[str, str]
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What a file says.

    Attributes:
        http: the address of the page and metrics, or None.
        log: the section ``[log]``, what it leaves out by its default.
        settings: those of all subscriptions, as texts.
        targets: by name.
        subscriptions: by name.
        given: all values of the file by key, as they may be shown.
        sources: where a value comes from that the file refers to: ``env:NAME`` or ``file:PATH``.
        secrets: the resolved values of keys that may hold one.
    """

    http: str | None
    log: LogOptions
    settings: Mapping[str, str]
    targets: Mapping[str, ConfiguredTarget]
    subscriptions: Mapping[str, ConfiguredSubscription]
    given: Mapping[str, str]
    sources: Mapping[str, str]
    secrets: Mapping[str, str] = field(repr=False)


def parse_configuration(text: str, read_secret: ReadSecret) -> Configuration:
    """Read the text of a file.

    Raises:
        ConfigurationError: not TOML, an unknown key, a wrong value, a missing key, or a reference that leads nowhere.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"not valid TOML: {error}", hint="https://toml.io describes the format") from None
    except RecursionError:
        raise ConfigurationError("not valid TOML: it is nested too deeply", hint="https://toml.io describes the format") from None
    return _Reader(read_secret).read(document)


class _Reader:
    def __init__(self, read_secret: ReadSecret) -> None:
        self._read_secret = read_secret
        self._given: dict[str, str] = {}
        self._sources: dict[str, str] = {}
        self._secrets: dict[str, str] = {}

    def read(self, document: Mapping[str, Any]) -> Configuration:
        own = {key: value for key, value in document.items() if key not in _TABLES}
        tables = {key: _table(key, document.get(key, {})) for key in _TABLES}
        program = self._values("", own, PROGRAM, also=_TABLES)
        log = LogOptions(**self._values("log", tables["log"], LOG))
        settings = self._texts("settings", tables["settings"], SETTINGS)
        _checked("settings", Settings.parse, settings)
        targets = {name: self._target(name, _table(f"targets.{name}", given)) for name, given in tables["targets"].items()}
        subscriptions = {
            name: self._subscription(name, _table(f"subscriptions.{name}", given), targets, settings)
            for name, given in tables["subscriptions"].items()
        }
        return Configuration(
            http=program.get("http"),
            log=log,
            settings=settings,
            targets=targets,
            subscriptions=subscriptions,
            given=self._given,
            sources=self._sources,
            secrets=self._secrets,
        )

    def _target(self, name: str, table: Mapping[str, Any]) -> ConfiguredTarget:
        path = f"targets.{name}"
        applier = self._values(f"{path}.applier", _table(f"{path}.applier", table.get("applier", {})), APPLIER)
        own = {key: value for key, value in table.items() if key != "applier"}
        return ConfiguredTarget(name=name, applier=applier, **self._values(path, own, TARGET, also=("applier",)))

    def _subscription(
        self, name: str, table: Mapping[str, Any], targets: Mapping[str, ConfiguredTarget], settings: Mapping[str, str]
    ) -> ConfiguredSubscription:
        path = f"subscriptions.{name}"
        options = self._texts(f"{path}.options", _table(f"{path}.options", table.get("options", {})), PARAMETERS)
        _checked(f"{path}.options", SubscriptionOptions.parse, options)
        own_settings = self._texts(f"{path}.settings", _table(f"{path}.settings", table.get("settings", {})), SETTINGS)
        _checked(f"{path}.settings", Settings.parse, {**settings, **own_settings})
        own = {key: value for key, value in table.items() if key not in {"options", "settings"}}
        values = self._values(path, own, SUBSCRIPTION, also=("options", "settings"))
        values["publications"] = tuple(values["publications"])
        target = values.pop("target")
        if target not in targets and ":" not in target and "=" not in target:
            known = suggestion(target, targets) if targets else f"add [targets.{target}] with its url, or write a URL"
            raise ConfigurationError(f'{path}.target: there is no target "{target}"', hint=known)
        found = targets.get(target) or ConfiguredTarget(name=target, url=target)
        return ConfiguredSubscription(name=name, target=found, options=options, settings={**settings, **own_settings}, **values)

    def _values(self, path: str, table: Mapping[str, Any], known: Mapping[str, Option], also: tuple[str, ...] = ()) -> dict[str, Any]:
        """Read a table with keys of its own. ``also``: keys that are read elsewhere, for suggestions."""
        for key in table:
            if key not in known:
                where = f"{path}: " if path else ""
                raise ConfigurationError(f'{where}{_UNKNOWN} "{key}"', hint=suggestion(key, [*known, *also]))
        texts = self._texts(path, table, known)
        secrets = {key: self._resolved(_joined(path, key), texts.pop(key), must=key == "password") for key in SECRETS & texts.keys()}
        values: dict[str, Any] = secrets | _checked(path, lambda items: parse_options(items, known, _UNKNOWN), texts)
        for key, each in known.items():
            if each.default_text == REQUIRED and not values.get(key):
                raise ConfigurationError(f"{path} has no {key}", hint=f"add {key} = …: {each.help}")
        return values

    def _texts(self, path: str, table: Mapping[str, Any], known: Mapping[str, Option]) -> dict[str, str]:
        """The values as the command line would have them, by (dotted) name."""
        found: dict[str, str] = {}
        for name, value in _leaves("", table):
            key = _joined(path, name)
            found[name] = _text(key, value, known.get(name) or known.get(name.partition(".")[0]))
            self._given[key] = redacted(found[name])
        return found

    def _resolved(self, key: str, text: str, *, must: bool) -> str:
        """What a reference names; any other text as it is. ``must``: only a reference is allowed."""
        kind, colon, _ = text.partition(":")
        if colon and kind in {"env", "file"}:
            try:
                value = self._read_secret(text)
            except ConfigurationError as error:
                raise _located(key, error) from None
            self._given[key], self._sources[key] = HIDDEN, text
        elif must:
            raise ConfigurationError(
                f"{key} holds the password itself",
                hint='refer to it: "env:NAME" (a variable) or "file:PATH" (a file that only you can read)',
            )
        else:
            value = text
        self._secrets[key] = value
        return value


def differences(before: Configuration, after: Configuration) -> list[str]:
    """The keys whose values differ, in the order of the file. Also a secret whose reference is the same, but not its value.

    A subscription that was added or removed is one key.
    """
    found = [
        key
        for key in dict.fromkeys([*before.given, *after.given])
        if before.given.get(key) != after.given.get(key)
        or before.sources.get(key) != after.sources.get(key)
        or before.secrets.get(key) != after.secrets.get(key)
    ]
    changed = {*before.subscriptions} ^ {*after.subscriptions}
    whole = {f"subscriptions.{name}." for name in changed}
    return [key for key in found if not key.startswith(tuple(whole))] + [f"subscriptions.{name}" for name in sorted(changed)]


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _table(path: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path} is not a table", hint=f"write [{path}] and its keys below")
    return value


def _leaves(path: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(_joined(path, key), value)
        else:
            yield _joined(path, key), value


def _text(key: str, value: Any, known: Option | None) -> str:
    if known is not None and (known.type is NAMES) != isinstance(value, list):
        wanted = "an array of strings" if known.type is NAMES else "one value"
        raise ConfigurationError(f"{key} requires {wanted}", hint=f"{known.name}: {known.help}")
    match value:
        case bool():
            if known is not None and known.type is STRING and not known.keyed:
                raise ConfigurationError(f"{key} requires a string", hint=f"{known.name}: {known.help}")
            return "true" if value else "false"
        case str():
            if "\0" in value:
                raise ConfigurationError(f"{key} has a null character", hint="remove it")
            return value
        case int() | float():
            return str(value)
        case list() if all(isinstance(each, str) for each in value):
            return json.dumps(value)
    raise ConfigurationError(f"{key} requires a string, a number or true or false", hint="https://toml.io describes the format")


def _checked(path: str, parse: Callable[[list[str]], Any], texts: Mapping[str, str]) -> Any:
    try:
        return parse([f"{name}={text}" for name, text in texts.items()])
    except ConfigurationError as error:
        raise _located(path, error) from None


def _located(path: str, error: ConfigurationError) -> ConfigurationError:
    return ConfigurationError(f"{path}: {error}" if path else str(error), hint=error.hint)
