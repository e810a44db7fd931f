"""The software bill of materials of an image, by Syft: ``python -m tests.docker.sbom IMAGE FILE`` (``make sbom``).

Syft of the PATH is used, otherwise the Go toolchain builds a pinned version.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Final

from tests.docker.engine import go_program, run

SYFT_VERSION: Final = "v1.38.0"


def write_sbom(image: str, file: Path) -> None:
    """Write it as CycloneDX JSON: the packages of Python and of Debian."""
    syft = shutil.which("syft") or go_program("syft", "github.com/anchore/syft", SYFT_VERSION, "cmd/syft")
    file.parent.mkdir(parents=True, exist_ok=True)
    # packages, not each file
    run(syft, "scan", f"docker:{image}", "--quiet", "--select-catalogers", "-file", "--output", f"cyclonedx-json={file}", timeout=600)


if __name__ == "__main__":
    write_sbom(sys.argv[1], Path(sys.argv[2]))
