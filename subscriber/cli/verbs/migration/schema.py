"""``subscriber schema copy`` and ``subscriber schema diff``."""

from __future__ import annotations

import argparse
import json
import time

from subscriber.cli.notices import confirm
from subscriber.cli.options import add_names_arguments, add_scope_arguments, add_sides_arguments, names_of
from subscriber.cli.output import complain, say
from subscriber.interfaces.schema import SchemaStep, Section, StepState
from subscriber.interfaces.table_schema import SchemaDifference
from subscriber.printable import counted, printable
from subscriber.subscription.management.schema import SchemaOptions, copy_schema, diff_schema

__all__ = ["SchemaNarrator", "add_arguments", "add_copy_options", "schema_options"]

_SHOWN_SECONDS = 1.0
_JOBS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = "Copies the publisher's schema to the target, or compares both."
    actions = parser.add_subparsers(metavar="action", required=True)
    _add_copy(actions.add_parser("copy", help="create what the target lacks"))
    _add_diff(actions.add_parser("diff", help="compare both"))


def _add_copy(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Creates the publisher's tables, types, functions, indexes, constraints and triggers in the target. What exists there is left as it"
        " is, so the command can be repeated. A PostgreSQL target needs pg_dump and pg_restore on this machine, not older than the"
        " publisher. Subscriptions are left out."
    )
    add_sides_arguments(parser)
    parser.add_argument(
        "--section",
        action="append",
        choices=[str(each) for each in Section],
        help="pre-data: what rows and changes need, with primary keys; post-data, after the copy: the rest; default: both",
    )
    parser.add_argument(
        "--publication",
        action="append",
        default=[],
        metavar="P",
        help="for other names, or a target that is not PostgreSQL: create the tables of this publication; may be repeated",
    )
    add_names_arguments(parser)
    add_copy_options(parser)
    parser.set_defaults(execute=_copy)


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compares the schema of the published tables on both sides: columns, types, nullability, defaults, keys, indexes, constraints and"
        " sequences. Exit status 1 if there is a difference. It changes nothing."
    )
    add_sides_arguments(parser)
    add_scope_arguments(parser, "tables", "compare the tables")
    add_names_arguments(parser)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print JSON")
    shown.add_argument("--ddl", action="store_true", help="print statements that remove the differences from the target")
    parser.set_defaults(execute=_diff)


def add_copy_options(parser: argparse.ArgumentParser, jobs: str = "") -> None:
    """Add the options of a copied schema. ``jobs``: what else ``--jobs`` limits."""
    parser.add_argument("--schema", action="append", default=[], metavar="S", help="copy only this schema; may be repeated")
    parser.add_argument("--exclude-schema", action="append", default=[], metavar="S", help="do not copy this schema; may be repeated")
    parser.add_argument(
        "--exclude-extension", action="append", default=[], metavar="E", help="do not create this extension; may be repeated"
    )
    parser.add_argument("--publications", action="store_true", help="also create the publisher's publications")
    parser.add_argument("--event-triggers", action="store_true", help="also create the publisher's event triggers")
    parser.add_argument(
        "--owners",
        action="store_true",
        help="keep owners and privileges, except those of roles that the target lacks; default: the target's role owns everything",
    )
    parser.add_argument(
        "--map-role",
        action="append",
        default=[],
        type=_renamed,
        metavar="OLD=NEW",
        help="the target's role for a role of the publisher; implies --owners; may be repeated",
    )
    parser.add_argument(
        "--jobs",
        type=_jobs,
        metavar="N",
        help=f"how many indexes and constraints are built at the same time{jobs}; default: {_JOBS}",
    )
    parser.add_argument("--bindir", metavar="DIR", help="directory of pg_dump and pg_restore; default: PATH, then the usual directories")


def _renamed(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise argparse.ArgumentTypeError("give OLD=NEW")
    return old, new


def _jobs(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError("give a number from 1 to 64")
    return int(text)


def schema_options(args: argparse.Namespace, *sections: Section) -> SchemaOptions:
    """The options that :func:`add_copy_options` has added."""
    return SchemaOptions(
        sections=sections or tuple(Section),
        schemas=args.schema,
        exclude_schemas=args.exclude_schema,
        exclude_extensions=args.exclude_extension,
        publications=args.publications,
        event_triggers=args.event_triggers,
        owners=args.owners,
        map_roles=dict(args.map_role),
        jobs=args.jobs or _JOBS,
        bindir=args.bindir,
    )


class SchemaNarrator:
    """Prints a line for each object that took a second or more, and the sum at the end."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._began = time.monotonic()
        self._created = self._existing = 0

    def __call__(self, step: SchemaStep) -> None:
        """Take note of an object."""
        self._created += step.state is StepState.CREATED
        self._existing += step.state is StepState.EXISTS
        if step.state is not StepState.BEGUN and step.seconds >= _SHOWN_SECONDS:
            confirm(self._args, printable(f"{step.what}: {step.state} in {step.seconds:.1f} s ({step.number} of {step.total})"))

    def conclude(self) -> None:
        """Print the sum."""
        seconds = time.monotonic() - self._began
        existing = f", {self._existing:,} existed (`subscriber schema diff` compares them)" if self._existing else ""
        confirm(self._args, f"{counted(self._created, 'object')} created{existing}, in {seconds:.1f} s")


async def _copy(args: argparse.Namespace) -> int:
    narrator = SchemaNarrator(args)
    sections = [each for each in Section if args.section is None or each in args.section]
    left_out = await copy_schema(
        args.name,
        target=args.target,
        connection=args.connection,
        publications=args.publication,
        names=names_of(args),
        options=schema_options(args, *sections),
        progress=narrator,
    )
    for line in left_out:
        complain(printable(line))
    narrator.conclude()
    return 0


async def _diff(args: argparse.Namespace) -> int:
    found = await diff_schema(
        args.name,
        target=args.target,
        connection=args.connection,
        publications=args.publication,
        schemas=args.schema,
        everything=args.all,
        names=names_of(args),
    )
    if args.json:
        say(json.dumps({"differences": [_as_json(each) for each in found]}, indent=2))
    elif args.ddl:
        for each in found:
            say(
                printable(
                    "\n".join(each.ddl or (f"-- {each.message}: subscriber schema copy creates it",)),
                    keep="\n\t",
                )
            )
    else:
        for each in found:
            say(printable(each.message))
        if not found:
            confirm(args, "no differences")
    return 1 if found else 0


def _as_json(each: SchemaDifference) -> dict[str, object]:
    names = {"schema": each.name.namespace, "name": each.name.name}
    return {"kind": each.kind, **names, "message": each.message, "extra": each.extra, "ddl": list(each.ddl)}
