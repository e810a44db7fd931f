"""The command line: ``main``, the verbs in :mod:`subscriber.cli.verbs`, and what they share.

Exit status: 0 done, 1 an error that :mod:`subscriber.errors` describes (one line on stderr), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

from subscriber.cli.main import main

__all__ = ["main"]
