"""``subscriber sequences sync``: set the target's sequences to those of the publisher."""

from __future__ import annotations

import argparse
import json
from collections import Counter

from subscriber.cli.notices import confirm
from subscriber.cli.options import add_sequences_argument, add_sides_arguments
from subscriber.cli.output import emit, say
from subscriber.interfaces.sequences import SequenceState
from subscriber.printable import counted, printable
from subscriber.subscription.management.sequences import sync_sequences

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = (
        "Sets the target's sequences to those of the publisher: value, increment, bounds, start, cache and cycle. In MariaDB, MySQL and"
        " SQLite it sets the counters of AUTO_INCREMENT columns. Stop the writers of the publisher first."
        " Exit status 1 if a sequence was left."
    )
    parser.add_argument("action", choices=["sync"], metavar="sync", help="the only action")
    add_sides_arguments(parser)
    parser.add_argument(
        "--publication",
        action="append",
        default=[],
        metavar="P",
        help="the sequences of the tables of this publication; may be repeated; default: those of the subscription",
    )
    add_sequences_argument(parser, "set")
    parser.add_argument("--force", action="store_true", help="also set a sequence back that is ahead of the publisher")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be done")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(execute=_execute)


async def _execute(args: argparse.Namespace) -> int:
    results = await sync_sequences(
        args.name,
        target=args.target,
        connection=args.connection,
        publications=args.publication,
        sequences=args.sequences,
        force=args.force,
        dry_run=args.dry_run,
    )
    counts = Counter(result.state for result in results)
    left = counts[SequenceState.LEFT] + counts[SequenceState.MISSING]
    if args.json:
        emit(json.dumps({"dry_run": args.dry_run, "sequences": [result.to_json() for result in results]}) + "\n")
        return 1 if left else 0
    for result in results:
        place = result.place or f"sequence {result.sequence}"
        if result.state in {SequenceState.LEFT, SequenceState.MISSING}:
            say(printable(f"{place}: not set: {result.reason}"))
        elif result.state is SequenceState.SET and args.dry_run:
            say(printable(f"{place}: would be set, next value {result.next_value}"))
    done = "would be set" if args.dry_run else "set"
    omitted = f", {counts[SequenceState.OMITTED]:,} omitted" if counts[SequenceState.OMITTED] else ""
    confirm(args, f"{counted(counts[SequenceState.SET], 'sequence')} {done}, {counts[SequenceState.EQUAL]:,} equal, {left:,} left{omitted}")
    return 1 if left else 0
