"""Arguments that several verbs share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from subscriber.config import PARAMETERS, SETTINGS, Option, SubscriptionOptions
from subscriber.errors import ConfigurationError
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn

__all__ = [
    "add_connection_option",
    "add_definition_arguments",
    "add_name_argument",
    "add_name_option",
    "add_names_arguments",
    "add_parameters_argument",
    "add_passwords",
    "add_publisher_arguments",
    "add_scope_arguments",
    "add_settings_argument",
    "add_sides_arguments",
    "add_target_argument",
    "complete_target",
    "lsn",
    "names_of",
    "parameters_of",
    "table_name",
]


def add_definition_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the arguments that define a subscription: publisher, target and settings. ``required``: they have no other source."""
    add_publisher_arguments(parser, required=required)
    add_mapping_arguments(parser)
    add_target_argument(parser, required=required)
    add_settings_argument(parser, flags=True)


def add_mapping_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--map`` and ``--exclude-table``. They are other forms of parameters (:func:`parameters_of`)."""
    parser.add_argument(
        "--map",
        dest="mapped",
        action="append",
        default=[],
        metavar="SCHEMA.TABLE=OTHER.NAME",
        help="the table has another name in the target; SCHEMA.*=OTHER.* is for all its tables; may be repeated",
    )
    parser.add_argument(
        "--exclude-table",
        dest="excluded",
        action="append",
        default=[],
        metavar="PATTERN",
        help="do not replicate tables that match this pattern, as pg_dump has them; may be repeated",
    )


def add_names_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--map``, ``--exclude-table``, and ``-o`` for ``columns`` and ``rename`` (:func:`names_of`)."""
    add_mapping_arguments(parser)
    known = {name: PARAMETERS[name] for name in ("columns", "rename")}
    add_parameters_argument(parser, known, "columns or rename of a subscription; default: those of NAME")


def names_of(args: argparse.Namespace) -> SubscriptionOptions | None:
    """The names that were given; None: none were.

    Raises:
        ConfigurationError: another parameter was given.
    """
    given = parameters_of(args)
    for each in given:
        if each.partition("=")[0].partition(".")[0].strip() not in {"map", "columns", "rename", "exclude_table"}:
            raise ConfigurationError(f"-o {each.partition('=')[0]} is not available here", hint="give columns or rename")
    return SubscriptionOptions.parse(given) if given else None


def parameters_of(args: argparse.Namespace) -> list[str]:
    """The texts of ``-o``, with those that stand for ``--map`` and ``--exclude-table``."""
    excluded = [f"exclude_table={', '.join(args.excluded)}"] if args.excluded else []
    return [*args.options, *(f"map.{each}" for each in args.mapped), *excluded]


def add_publisher_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add ``--connection``, ``--publication`` and ``-o``."""
    parser.add_argument(
        "-P",
        "--connection",
        required=required,
        metavar="CONNINFO",
        help="connection string of the publisher: keywords and values, or a URL, as for libpq",
    )
    parser.add_argument(
        "--publication", required=required, action="append", metavar="P", help="a publication to subscribe to; may be repeated"
    )
    add_parameters_argument(parser, PARAMETERS, "a parameter of CREATE SUBSCRIPTION … WITH (…)")


def add_parameters_argument(parser: argparse.ArgumentParser, parameters: Mapping[str, Option], help: str) -> None:
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="parameter=value", help=help)
    _add_list(parser, "parameters (-o)", parameters)


def add_settings_argument(parser: argparse.ArgumentParser, *, flags: bool = False) -> None:
    """Add ``-c``, as in the postgres program.

    Args:
        parser: of the verb.
        flags: add a flag for each setting that declares one.
    """
    parser.add_argument(
        "-c", dest="settings", action="append", default=[], metavar="name=value", help="a setting, such as wal_receiver_timeout=30s"
    )
    for name, setting in SETTINGS.items():
        if flags and setting.flag:
            flag = "--" + name.replace("_", "-")
            parser.add_argument(flag, dest="settings", action="append_const", const=f"{name}=on", help=setting.help)
    _add_list(parser, "settings (-c)", SETTINGS)


def _add_list(parser: argparse.ArgumentParser, title: str, options: Mapping[str, Option]) -> None:
    """List options at the end of the verb's help."""
    lines = [f"  {name}: {each.help} (default: {each.shown_default})" for name, each in options.items()]
    parser.epilog = "\n".join([*([parser.epilog, ""] if parser.epilog else []), f"{title}:", *lines])


def add_sides_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subscription's name or ``--connection``, which tell the publisher, and ``--target``."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="name of a subscription of the target, whose publisher is used")
    add_target_argument(parser)
    parser.add_argument(
        "-P",
        "--connection",
        metavar="CONNINFO",
        help="connection string of the publisher, without NAME or for a subscription that its command line defines",
    )


def add_connection_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--connection`` of a verb that works with one subscription, whose publisher the target may not know."""
    parser.add_argument(
        "-P",
        "--connection",
        metavar="CONNINFO",
        help="connection string of the publisher, for a subscription that its command line defines",
    )


def add_scope_arguments(parser: argparse.ArgumentParser, what: str, published: str) -> None:
    """Add ``--publication``, ``--schema`` and ``--all``, which choose tables or sequences of the publisher (``what``)."""
    parser.add_argument(
        "--publication",
        action="append",
        default=[],
        metavar="P",
        help=f"{published} of this publication; may be repeated; default: those of the subscription",
    )
    parser.add_argument("--schema", action="append", default=[], metavar="S", help=f"all {what} of this schema, too; may be repeated")
    parser.add_argument("--all", action="store_true", help=f"all {what} of the publisher's database")


def add_sequences_argument(parser: argparse.ArgumentParser, done: str) -> None:
    """Add ``--sequences``, which chooses sequences of the publisher."""
    parser.add_argument(
        "--sequences",
        action="append",
        default=[],
        metavar="owned|all|none|PATTERN",
        help=f"which sequences are {done}, also [SCHEMA.]NAME with * and ?; may be repeated; default: as the publications",
    )


def add_target_argument(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    parser.add_argument(
        "-d",
        "--target",
        required=required,
        metavar="URL",
        help="URL of the target: postgresql://user@host:5432/db, sqlite:///file.db, mariadb://user@host/db, spark:///directory",
    )
    # -h is help
    parser.add_argument("-p", dest="target_port", metavar="PORT", help="port of a PostgreSQL target")
    parser.add_argument("-U", dest="target_user", metavar="NAME", help="user of a PostgreSQL target")


def complete_target(args: argparse.Namespace) -> None:
    """Add ``-p`` and ``-U`` to ``--target``.

    Raises:
        ConfigurationError: there is no target, or it is no PostgreSQL database.
    """
    names = {"port": "target_port", "user": "target_user"}
    given = {name: value for name, each in names.items() if (value := getattr(args, each, None)) is not None}
    if not given:
        return
    from subscriber.subscription.targets import is_plugin, is_postgres  # noqa: PLC0415 -- not for all verbs
    from subscriber.walreceiver.session import with_keywords  # noqa: PLC0415

    if args.target is None:
        raise ConfigurationError("-p and -U need --target", hint="as in -d dbname=copy -U replicator")
    if is_plugin(args.target) or not is_postgres(args.target):
        raise ConfigurationError("-p and -U are for a PostgreSQL target", hint="put user and port into the URL of the target")
    args.target = with_keywords(args.target, **given)


def add_passwords(args: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Add the passwords of SUBSCRIBER_PUBLISHER_PASSWORD and SUBSCRIBER_TARGET_PASSWORD to ``--connection`` and ``--target``.

    Only to connection strings of this command: ``create``, ``alter`` and ``migrate`` store that of the publisher, and a password with it
    only if it is in the string.
    """
    given = {"connection": environment.get("SUBSCRIBER_PUBLISHER_PASSWORD"), "target": environment.get("SUBSCRIBER_TARGET_PASSWORD")}
    for name, password in given.items():
        conninfo = getattr(args, name, None)
        if not password or conninfo is None or (name == "connection" and getattr(args, "stores_connection", False)):
            continue
        from subscriber.subscription.targets import is_plugin, is_postgres  # noqa: PLC0415 -- not for all verbs
        from subscriber.walreceiver.session import with_password  # noqa: PLC0415

        if name == "connection" or (not is_plugin(conninfo) and is_postgres(conninfo)):
            setattr(args, name, with_password(conninfo, password))


def add_name_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``NAME``, the name of a subscription in the target's catalog."""
    parser.add_argument("name", metavar="NAME", help="name of the subscription")


def add_name_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default="subscriber", metavar="N", help="name of the subscription and of its slot; default: %(default)s")


def table_name(text: str) -> TableName:
    """Parse the name of a table as an argument."""
    namespace, dot, name = text.partition(".")
    if not (namespace and dot and name):
        raise argparse.ArgumentTypeError(f'"{text}" is not of the form schema.table')
    return TableName(namespace, name)


def lsn(text: str) -> Lsn:
    """Parse an LSN argument."""
    try:
        return Lsn.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
