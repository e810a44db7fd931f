"""The option ``--config``: find the configuration file, read it, and read what it refers to."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from subscriber.cli.options import add_name_argument, add_target_argument
from subscriber.config.suggestion import suggestion
from subscriber.errors import ConfigurationError

if TYPE_CHECKING:
    from subscriber.config.file.configuration import Configuration

__all__ = [
    "VARIABLE",
    "add_config_argument",
    "add_located_arguments",
    "chosen",
    "configuration_of",
    "connections_of",
    "load",
    "locate",
    "reload",
    "target_urls",
]

VARIABLE: Final = "SUBSCRIBER_CONFIG"
_MOST_BYTES: Final = 16 * 1024**2
_IN_PLACE: Final = ("connection", "publication", "target")
"""Arguments that say what the file says."""


def add_config_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--config``. :func:`configuration_of` reads the file before the verb begins."""
    parser.add_argument(
        "--config", metavar="FILE", help=f"a configuration file (TOML), in place of --connection and --target; default: ${VARIABLE}"
    )
    parser.set_defaults(configuration=None)


def configuration_of(args: argparse.Namespace, environment: Mapping[str, str]) -> Configuration | None:
    """Read the file that the arguments name. None: the verb takes none, or its arguments say everything.

    Raises:
        ConfigurationError: the file cannot be read, or what it says cannot be used.
    """
    if not hasattr(args, "config"):
        return None
    given = [name for name in _IN_PLACE if getattr(args, name, None)]
    if args.config is not None and given:
        args.usage(f"--config and --{given[0]} exclude each other: the file says it")
    if args.config is None and not given:
        args.config = environment.get(VARIABLE) or None
    return None if args.config is None else load(args.config, environment)


def load(file: str, environment: Mapping[str, str], *, needs_secrets: bool = True) -> Configuration:
    """Read a configuration file.

    Args:
        file: its path.
        environment: has the secrets that it refers to.
        needs_secrets: False: a reference that leads nowhere stays as it is.

    Raises:
        ConfigurationError: it cannot be read, or what it says cannot be used.
    """
    from subscriber.config.file.configuration import parse_configuration  # noqa: PLC0415 -- most verbs have no file

    text = _read(file, file)
    try:
        return parse_configuration(text, lambda reference: _secret(reference, environment) if needs_secrets else reference)
    except ConfigurationError as error:
        raise ConfigurationError(f"{file}: {error}", hint=error.hint) from None


def reload(args: argparse.Namespace, before: Configuration, apply: Callable[[Configuration], None]) -> tuple[Configuration, list[str]]:
    """Read the file of ``args`` again. If it cannot be used, everything stays as it is.

    Args:
        args: of the verb.
        before: as it was read the last time.
        apply: uses the new one.

    Returns:
        The configuration that now holds, and the keys that changed.

    Raises:
        ConfigurationError: the file cannot be used.
    """
    from subscriber.config.file.configuration import differences  # noqa: PLC0415

    after = load(args.config, os.environ)
    apply(after)
    return after, differences(before, after)


def chosen(configuration: Configuration, names: list[str]) -> frozenset[str]:
    """Check the names of subscriptions that a command line gives.

    Raises:
        ConfigurationError: the file has no such subscription.
    """
    for name in names:
        if name not in configuration.subscriptions:
            raise ConfigurationError(
                f'the configuration file has no subscription "{name}"', hint=suggestion(name, configuration.subscriptions)
            )
    if not configuration.subscriptions and not any(target.launcher for target in configuration.targets.values()):
        raise ConfigurationError(
            "the configuration file has no subscriptions", hint="add [subscriptions.NAME], or a target with launcher = true"
        )
    return frozenset(names)


def target_urls(args: argparse.Namespace) -> list[str]:
    """The targets of a verb that reads: ``--target``, or all of the configuration file."""
    if args.configuration is None:
        if args.target is None:
            args.usage("one of --target and --config is required")
        return [args.target]
    from subscriber.subscription.configured import url_of  # noqa: PLC0415

    configuration: Configuration = args.configuration
    used = [each.target for each in configuration.subscriptions.values() if not args.names or each.name in args.names]
    targets = used if used and args.names else [*configuration.targets.values(), *used]
    return list(dict.fromkeys(url_of(target) for target in targets))


def connections_of(args: argparse.Namespace, target: str) -> Mapping[str, str]:
    """The connection strings of the file's subscriptions that have this target, by name: the target does not store them."""
    if args.configuration is None:
        return {}
    from subscriber.subscription.configured import connection_of, url_of  # noqa: PLC0415

    found = args.configuration.subscriptions.values()
    return {each.name: connection_of(each) for each in found if url_of(each.target) == target}


def add_located_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``NAME``, ``--target`` and ``--config`` of a verb that works with one subscription. :func:`locate` completes them."""
    add_name_argument(parser)
    add_target_argument(parser, required=False)
    add_config_argument(parser)
    parser.set_defaults(usage=parser.error)


def locate(args: argparse.Namespace) -> None:
    """Take the target of the subscription NAME from the configuration file, and its publisher for a verb that has ``--connection``.

    Raises:
        ConfigurationError: the file does not say which target it is.
    """
    if args.configuration is None:
        if args.target is None:
            args.usage("one of --target and --config is required")
        return
    from subscriber.subscription.configured import connection_of, url_of  # noqa: PLC0415

    configuration: Configuration = args.configuration
    found = configuration.subscriptions.get(args.name)
    if found is not None:
        args.target = url_of(found.target)
        if not getattr(args, "stores_connection", False):
            args.connection = connection_of(found)
        return
    # one of a catalog
    launched = [each for each in configuration.targets.values() if each.launcher]
    if len(launched) != 1:
        chosen(configuration, [args.name])
    args.target = url_of(launched[0])


def _secret(reference: str, environment: Mapping[str, str]) -> str:
    kind, _, name = reference.partition(":")
    if kind == "env":
        value = environment.get(name, "")
        if not value:
            raise ConfigurationError(f"the environment variable {name} is not set or empty", hint="set it for this program")
        return value
    value = _read(name, reference).removesuffix("\n").removesuffix("\r")
    if not value or "\0" in value:
        raise ConfigurationError(f"{reference} is empty or not text", hint="the file holds the secret alone")
    return value


def _read(file: str, shown: str) -> str:
    try:
        if Path(file).stat().st_size > _MOST_BYTES:
            raise ConfigurationError(f"{shown} is larger than {_MOST_BYTES // 1024**2} MB", hint="name another file")
        return Path(file).read_text("utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot read {shown}: {error.strerror or error}", hint="check its path and its permissions") from None
    except ValueError as error:
        hint = "write it as UTF-8" if isinstance(error, UnicodeDecodeError) else "check its path"
        raise ConfigurationError(f"cannot read {shown}: not UTF-8, or not a path", hint=hint) from None
