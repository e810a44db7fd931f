"""Confirmations and progress. They go to standard error, so that standard output has data only. ``--quiet`` suppresses them."""

from __future__ import annotations

import argparse

from subscriber.cli.output import complain

__all__ = ["confirm"]


def confirm(args: argparse.Namespace, text: str) -> None:
    """Print that something was done, or how far it is."""
    if not args.quiet:
        complain(text)
