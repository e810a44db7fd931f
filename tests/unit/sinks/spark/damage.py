"""Damage of files of a lake."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq


def rot(directory: Path, pattern: str = "*.parquet") -> list[tuple[Path, bytes]]:
    """Change a bit in a data page of each file. Return what the files were."""
    whole = [(file, file.read_bytes()) for file in directory.glob(pattern)]
    for file, content in whole:
        chunk = pq.ParquetFile(file).metadata.row_group(0).column(0)
        last = chunk.data_page_offset + chunk.total_compressed_size - 1
        if chunk.has_dictionary_page:
            last = chunk.dictionary_page_offset + chunk.total_compressed_size - 1
        file.write_bytes(content[:last] + bytes([content[last] ^ 1]) + content[last + 1 :])
    return whole
