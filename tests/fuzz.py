"""``python -m tests.fuzz PAYLOADS`` (``make fuzz``): both forms of the compiled core read so many mutated payloads alike.

A tenth of them runs again in a copy of the source in ``build/fuzz``, whose core is compiled with AddressSanitizer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

FILES = "tests/unit/test_implementation.py"


def _run(arguments: list[str], directory: Path, **variables: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, cwd=directory, env={**os.environ, **variables})


def main(payloads: int) -> None:
    here = Path.cwd()
    _run(["tools/compile_core.py"], here)
    _run(["-m", "pytest", "--timeout", "0", FILES, "tests/unit/protocol/test_fuzz.py"], here, SUBSCRIBER_FUZZ=str(payloads))

    copy = here / "build" / "fuzz"
    shutil.rmtree(copy, ignore_errors=True)
    for name in ("subscriber", "tests", "tools"):
        shutil.copytree(here / name, copy / name, ignore=shutil.ignore_patterns("_compiled", "__pycache__"))
    shutil.copy(here / "pyproject.toml", copy)
    _run(["tools/compile_core.py"], copy, CFLAGS="-fsanitize=address -fno-omit-frame-pointer", LDFLAGS="-fsanitize=address")
    library = subprocess.run(["gcc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True).stdout.strip()
    _run(
        ["-m", "pytest", "-s", "-p", "no:cacheprovider", "--timeout", "0", FILES],
        copy,
        SUBSCRIBER_FUZZ=str(max(payloads // 10, 1)),
        LD_PRELOAD=library,
        ASAN_OPTIONS="detect_leaks=0",
        # AddressSanitizer does not know the borders of objects in Python's own pools
        PYTHONMALLOC="malloc",
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
