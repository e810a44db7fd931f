"""``subscriber cutover``: move the application from the publisher to the target, and back."""

from __future__ import annotations

import argparse
from typing import Any

from subscriber.cli.notices import confirm
from subscriber.cli.options import add_name_argument, add_sequences_argument, add_target_argument
from subscriber.cli.output import say
from subscriber.errors import ConfigurationError
from subscriber.printable import printable
from subscriber.subscription.cutover.cutover import (
    abort_cutover,
    complete_cutover,
    cutover,
    open_target,
    plan_cutover,
    rehearse_cutover,
    roll_back,
)
from subscriber.subscription.cutover.options import CutoverOptions

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = (
        "Moves the writers from the publisher (the old database) to the target (the new database) of a running subscription: keeps"
        " writers out of both, waits until the target has everything, compares rows, makes a way back, sets the sequences, runs your"
        " switch command, and lets writers into the target. After an error everything is undone. An interrupted cutover continues when"
        " it is started again. --switch and --pool are not stored: give them again then, and to roll back; the command may run twice."
    )
    add_name_argument(parser)
    add_target_argument(parser)
    act = parser.add_mutually_exclusive_group()
    act.add_argument("--dry-run", action="store_true", help="print the plan and what would make it fail; change nothing")
    act.add_argument("--rehearse", action="store_true", help="do everything before writers are stopped, and report the expected seconds")
    act.add_argument("--abort", action="store_true", help="undo an interrupted cutover or rollback")
    act.add_argument("--open-target", action="store_true", help="let writers into a target that --abort or --rollback has left closed")
    act.add_argument("--rollback", action="store_true", help="move the writers back to the publisher, with everything written since")
    act.add_argument("--complete", action="store_true", help="remove the way back, the slots and the catalogs; the publisher stays closed")
    parser.add_argument(
        "--fence",
        choices=["read-only", "revoke"],
        help="how writers are kept out: default_transaction_read_only, or CONNECT is revoked; default: read-only",
    )
    parser.add_argument(
        "--verify",
        choices=["full", "changed", "none"],
        help="which rows are compared without writers; default: changed, for a rollback none",
    )
    add_sequences_argument(parser, "set")
    parser.add_argument(
        "--unlogged",
        action=argparse.BooleanOptionalAction,
        help="move rows of unlogged tables while writers are stopped; default: no, for a rollback as the cutover",
    )
    parser.add_argument("--large-objects", action=argparse.BooleanOptionalAction, help="the same for large objects")
    parser.add_argument(
        "--refresh",
        choices=["before", "after", "none"],
        help="when materialized views are refreshed: before writers are let in, after that (default), or not at all",
    )
    parser.add_argument(
        "--switch",
        metavar="COMMAND",
        help="leads the application to the other database (SUBSCRIBER_DIRECTION=forward or back); give it again to continue",
    )
    parser.add_argument(
        "--pool",
        metavar="pgbouncer:CONNINFO",
        help="admin console of PgBouncer, whose clients wait instead of failing; give it again to continue or abort",
    )
    parser.add_argument("--switch-timeout", type=float, metavar="S", help="seconds that it may take; default: 60")
    parser.add_argument(
        "--max-downtime",
        type=float,
        metavar="S",
        help="seconds without writers after which everything is undone; default: 300; 0: no limit",
    )
    parser.add_argument("--max-lag", type=float, metavar="S", help="seconds that the target may be behind at the start; default: 10")
    parser.add_argument(
        "--exclude-table",
        action="append",
        default=[],
        metavar="PATTERN",
        help="a rollback leaves tables that match this pattern in the new database, and does not move their rows; may be repeated",
    )
    parser.add_argument("--no-way-back", action="store_true", help="make no subscription in the opposite direction")
    parser.add_argument("--publisher-admin", metavar="CONNINFO", help="role that may close the publisher's database and end its sessions")
    parser.add_argument("--target-admin", metavar="CONNINFO", help="the same for the target")
    parser.set_defaults(execute=_execute)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("fence", "verify", "sequences", "unlogged", "large_objects", "refresh", "switch", "pool", "switch_timeout", "max_lag")
    given = {name: getattr(args, name) for name in names}
    given = {name: value for name, value in given.items() if value not in (None, [])}
    if args.max_downtime is not None:
        given["max_downtime"] = args.max_downtime or None
    if args.exclude_table:
        given["exclude_tables"] = args.exclude_table
    if args.no_way_back:
        given["way_back"] = False
    return given


async def _execute(args: argparse.Namespace) -> int:
    given = _options(args)
    # also an error without a database
    options = CutoverOptions(**given) if given else None
    admins = {"publisher_admin": args.publisher_admin, "target_admin": args.target_admin}

    def tell(text: str) -> None:
        confirm(args, text)

    if (args.abort or args.complete or args.open_target) and set(given) - ({"pool"} if args.abort else set()):
        raise ConfigurationError("--abort, --open-target and --complete take no options of a cutover", hint="omit them")
    if args.dry_run:
        lines = await plan_cutover(args.name, target=args.target, options=options, **admins)
        say("\n".join(map(printable, lines)))
        return int(any(line.startswith("error: ") for line in lines))
    if args.rehearse:
        steps = await rehearse_cutover(args.name, target=args.target, options=options, tell=tell, **admins)
        say("\n".join(f"{step}: {took:.2f} s" for step, took in steps.items()))
        switch = ", and your switch command" if options is not None and options.switch else ""
        say(f"expected without writes: {sum(steps.values()):.2f} s{switch}")
    elif args.abort:
        await abort_cutover(args.name, target=args.target, pool=args.pool, tell=tell, **admins)
        confirm(args, "undone")
    elif args.open_target:
        await open_target(args.name, target=args.target, tell=tell, **admins)
    elif args.complete:
        await complete_cutover(args.name, target=args.target, tell=tell, **admins)
        confirm(args, "completed")
    elif args.rollback:
        seconds = await roll_back(args.name, target=args.target, options=given, tell=tell, **admins)
        confirm(args, f"rolled back{_time(seconds)}; the new database stays closed to writers")
    else:
        seconds = await cutover(args.name, target=args.target, options=options, tell=tell, **admins)
        confirm(args, f"cut over{_time(seconds)}")
    return 0


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"; no writer could write for {seconds:.2f} s"
