"""Packages that only some kinds of targets need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from subscriber.errors import ConfigurationError

__all__ = ["requiring"]


@contextlib.contextmanager
def requiring(what: str, extra: str) -> Iterator[None]:
    """Say which extra installs a package that the block cannot import.

    Raises:
        ConfigurationError: see above.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{what} needs {error.name}, which is not installed", hint=f"pip install 'pg-subscriber[{extra}]'"
        ) from error
