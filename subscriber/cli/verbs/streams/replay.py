"""``subscriber replay FILE``: apply a recording of ``subscriber tail --record`` to a target."""

from __future__ import annotations

import argparse
from pathlib import Path

from subscriber.cli.notices import confirm
from subscriber.cli.options import add_settings_argument, add_target_argument
from subscriber.cli.signals import clean_end
from subscriber.config import Settings
from subscriber.printable import counted
from subscriber.subscription.replay import Replay

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = (
        "Apply a recording to a target, without a publisher. The tables must exist there. The target stores the position with the data: an"
        " interrupted replay resumes, and a recording is never applied twice."
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="a recording of subscriber tail --record")
    add_target_argument(parser)
    parser.add_argument("--name", default="replay", metavar="N", help="name of the subscription in the target; default: %(default)s")
    parser.add_argument(
        "--speed", type=_speed, metavar="N", help="as a multiple of the recorded speed; default: as fast as the target allows"
    )
    add_settings_argument(parser)
    parser.set_defaults(execute=_execute)


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise argparse.ArgumentTypeError(f'"{text}" is not a number greater than 0')
    return speed


async def _execute(args: argparse.Namespace) -> int:
    replay = Replay(args.file, args.target, name=args.name, speed=args.speed, settings=Settings.parse(args.settings))
    with clean_end(replay.stop) as ending:
        await replay.run()
    had = f"; the target already had {counted(replay.known, 'transaction')}" if replay.known else ""
    ended = "stopped" if ending.received else "replayed"
    confirm(args, f"{ended}: {counted(replay.transactions, 'transaction')}, up to {replay.position}{had}")
    return ending.status
