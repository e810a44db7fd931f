"""Confirmations and progress. They go to standard error, so that standard output has data only. ``--quiet`` suppresses them."""

from __future__ import annotations

import argparse
import logging

from subscriber.cli.output import complain
from subscriber.cli.service.logs import NOTICE

__all__ = ["confirm"]


def confirm(args: argparse.Namespace, text: str) -> None:
    """Print that something was done, or how far it is."""
    if not args.quiet and logging.getLogger("subscriber").isEnabledFor(NOTICE):
        complain(text, NOTICE)
