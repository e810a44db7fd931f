"""Arguments that several verbs share."""

from __future__ import annotations

import argparse
from typing import Any

from subscriber.protocol.lsn import Lsn

__all__ = [
    "Verbs",
    "add_create_tables_option",
    "add_name_argument",
    "add_name_option",
    "add_publisher_arguments",
    "add_settings_argument",
    "add_target_argument",
    "lsn",
]

Verbs = Any
"""What ``add_subparsers`` returns: argparse names its class only privately."""


def add_publisher_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """``--connection``, ``--publication`` and ``-o``."""
    parser.add_argument(
        "--connection", required=required, metavar="CONNINFO", help="the publisher: keywords and values, or a URL, as libpq takes them"
    )
    parser.add_argument(
        "--publication", required=required, action="append", metavar="P", help="a publication to subscribe to; give it again for more"
    )
    parser.add_argument(
        "-o", dest="options", action="append", default=[], metavar="parameter=value", help="a parameter of CREATE SUBSCRIPTION … WITH (…)"
    )


def add_settings_argument(parser: argparse.ArgumentParser) -> None:
    """``-c``, as the postgres program has it."""
    parser.add_argument(
        "-c", dest="settings", action="append", default=[], metavar="name=value", help="a setting, such as wal_receiver_timeout=30s"
    )


def add_create_tables_option(parser: argparse.ArgumentParser) -> None:
    """``--create-tables``: the setting of that name. To be added behind :func:`add_settings_argument`."""
    parser.add_argument(
        "--create-tables",
        dest="settings",
        action="append_const",
        const="create_tables=on",
        help="create tables that the target lacks, as they are published; not for a PostgreSQL target (pg_dump --schema-only)",
    )


def add_target_argument(parser: argparse.ArgumentParser) -> None:
    """``--target``."""
    parser.add_argument(
        "--target",
        required=True,
        metavar="URL",
        help="for example postgresql://user@host:5432/dbname, sqlite:///file.db, mariadb://user@host/dbname, spark:///directory",
    )


def add_name_argument(parser: argparse.ArgumentParser) -> None:
    """``NAME``, of a subscription in the target's catalog."""
    parser.add_argument("name", metavar="NAME", help="of the subscription")


def add_name_option(parser: argparse.ArgumentParser) -> None:
    """``--name``."""
    parser.add_argument("--name", default="subscriber", metavar="N", help="of the subscription, and of its slot; default: %(default)s")


def lsn(text: str) -> Lsn:
    """An argument's type."""
    try:
        return Lsn.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
