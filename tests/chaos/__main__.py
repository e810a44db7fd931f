"""``python -m tests.chaos [TARGET] [--seconds N] [--seed N]``: see ``make chaos``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import signal
import sys
import time

from tests.chaos.environments import KINDS, Servers
from tests.chaos.rounds import Result, play

_ROUND_SECONDS = 150.0
_MOST_FAILURES = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description="Does harm to a subscription at random, and compares all rows.")
    parser.add_argument("target", nargs="?", default="all", choices=(*KINDS, "all"))
    parser.add_argument("--seconds", type=float, default=600, help="for all targets together")
    parser.add_argument("--seed", default=None, help="of the first round: NUMBER; of one round: NUMBER/ROUND")
    parser.add_argument("--rate", type=float, default=20, help="transactions a second of the load")
    parser.add_argument("--without", action="append", default=[], metavar="FAULT", help="leave this one out, by the name in the summary")
    args = parser.parse_args()
    seed = args.seed or str(secrets.randbelow(10**6))
    kinds = KINDS if args.target == "all" else (args.target,)
    print(f"seed {seed}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # children inherit that: one that is asked where it is before it listens does not die of it
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    results: dict[str, Result] = {}
    try:
        for kind in kinds:
            results[kind] = Result()
            _play_rounds(kind, seed, args.seconds / len(kinds), args, results[kind])
    except KeyboardInterrupt:
        print("interrupted")
    return _summary(seed, results)


def _play_rounds(kind: str, seed: str, seconds: float, args: argparse.Namespace, total: Result) -> None:
    until = time.monotonic() + seconds
    single = "/" in seed
    number = 0
    with contextlib.ExitStack() as stack:
        servers = Servers.start(kind, stack)
        while number == 0 or (time.monotonic() < until - _ROUND_SECONDS / 4 and not single and len(total.failures) < _MOST_FAILURES):
            number += 1
            this = seed if single else f"{seed}/{number}"
            length = min(_ROUND_SECONDS, max(until - time.monotonic(), 10))
            found = asyncio.run(play(kind, servers, this, length, args.rate, frozenset(args.without)))
            total.add(found)
            said = "FAILED" if found.failures else "ok"
            print(f"{kind} {this}: {found.seconds:.0f} s, {found.faults.total()} faults, {found.ends.total()} ends, {said}", flush=True)
            for failure in found.failures:
                print(f"\nFAILED {failure}", flush=True)


def _summary(seed: str, results: dict[str, Result]) -> int:
    print(f"\n{'target':12}{'seconds':>8}{'faults':>8}{'kinds':>7}{'SIGKILL':>9}{'SIGTERM':>9}{'errors':>8}{'calms':>7}{'rows':>9}  result")
    total = Result()
    for kind, found in results.items():
        errors = sum(number for end, number in found.ends.items() if end.startswith("error"))
        print(
            f"{kind:12}{found.seconds:8.0f}{found.faults.total():8}{len(found.faults):7}{found.ends['SIGKILL']:9}{found.ends['SIGTERM']:9}"
            f"{errors:8}{found.checks['caught up in a calm']:7}{found.rows:9}  {'FAILED' if found.failures else 'all rows equal'}"
        )
        total.add(found)
    print("\nfaults:", ", ".join(f"{number} {name}" for name, number in sorted(total.faults.items())))
    print("errors that ended the program:")
    for end, number in total.ends.most_common(12):
        if end.startswith("error"):
            print(f"  {number:4} {end.removeprefix('error: ')}")
    if total.failures:
        print(f"\nagain: make chaos TARGET=… SEED={seed}/ROUND (times differ, so what comes when differs, too)")
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
