"""The command line, with one module for each verb.

A verb's module has ``add_arguments(parser)``. It adds the arguments and sets ``execute``, a coroutine function that takes the parsed
arguments and returns the exit status.

Exit status: 0 done, 1 an error that :mod:`subscriber.errors` describes (one line on stderr), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

from subscriber.cli.main import main

__all__ = ["main"]
