"""Hatch's build hook: compiles the core, if this is possible."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompileHook(BuildHookInterface):  # type: ignore[type-arg, misc]
    """Adds ``subscriber/_compiled`` to a wheel. Without a C compiler the wheel has the Python form only, and fits every platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the build."""
        script = Path(self.root, "tools", "compile_core.py")
        done = subprocess.run([sys.executable, str(script)], check=False, capture_output=True, text=True)
        if done.returncode == 0:
            build_data["artifacts"].append("subscriber/_compiled/*")
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
        else:
            self.app.display_debug(done.stderr)
