"""A small disk that can be filled."""

from __future__ import annotations

import os
from pathlib import Path


class Disk:
    """A file system in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, left: int) -> None:
        """Leave so many bytes."""
        place = os.statvfs(self.path)
        with (self.path / "filler").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, place.f_bavail * place.f_bsize - left)

    def make_room(self) -> None:
        """Remove what filled it."""
        (self.path / "filler").unlink()
