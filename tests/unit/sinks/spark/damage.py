"""Damage of files of a lake."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest


def rot(directory: Path, pattern: str = "*.parquet", column: int = 0) -> list[tuple[Path, bytes]]:
    """Change a bit in a page of a column of each file. Return what the files were."""
    whole = [(file, file.read_bytes()) for file in directory.glob(pattern)]
    for file, content in whole:
        chunk = pq.ParquetFile(file).metadata.row_group(0).column(column)
        last = chunk.data_page_offset + chunk.total_compressed_size - 1
        if chunk.has_dictionary_page:
            last = chunk.dictionary_page_offset + chunk.total_compressed_size - 1
        file.write_bytes(content[:last] + bytes([content[last] ^ 1]) + content[last + 1 :])
    return whole


@contextlib.contextmanager
def unwritable(directory: Path) -> Iterator[None]:
    """A directory in which no file can be created. It is made immutable, because permissions do not restrict root."""
    if os.geteuid():
        directory.chmod(0o555)
    else:
        try:
            subprocess.run(["chattr", "+i", directory], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"root may write everywhere: {error}")
    try:
        yield
    finally:
        if os.geteuid():
            directory.chmod(0o755)
        else:
            subprocess.run(["chattr", "-i", directory], check=True)
