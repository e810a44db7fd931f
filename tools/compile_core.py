"""Compile the core: ``python tools/compile_core.py``. It needs Cython, setuptools and a C compiler.

Each module of :data:`subscriber._implementation.MODULES` becomes an extension module in ``subscriber/_compiled``. A module whose compiled
form exists is not compiled again. Files of older sources are deleted.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

from Cython.Build import cythonize
from setuptools import Distribution, Extension

ROOT = Path(__file__).resolve().parent.parent
DIRECTIVES = {"language_level": 3, "annotation_typing": True, "infer_types": True, "wraparound": False}


def _implementation() -> ModuleType:
    # by its path: the package itself may not be importable while it is being installed
    spec = importlib.util.spec_from_file_location("implementation", ROOT / "subscriber" / "_implementation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Compile what is missing."""
    core = _implementation()
    files = {module: core.compiled_file(module) for module in core.MODULES}
    missing = [module for module, file in files.items() if not Path(file).exists()]
    if missing:
        with tempfile.TemporaryDirectory() as name:
            _compile(missing, files, core, Path(name))
    for file in Path(core.FOLDER).iterdir():
        # not those of another version of Python
        if file.name.endswith(EXTENSION_SUFFIXES[0]) and str(file) not in files.values():
            file.unlink()


def _compile(modules: list[str], files: dict[str, str], core: ModuleType, folder: Path) -> None:
    extensions = []
    for module in modules:
        copy = folder / "source" / f"{module}.py"
        copy.parent.mkdir(exist_ok=True)
        source = Path(core.source_file(module)).read_text(encoding="utf-8")
        copy.write_text(source.replace("from subscriber import _cython as cython\n", "import cython\n"), encoding="utf-8")
        if (declarations := Path(core.declarations_file(module))).exists():
            shutil.copy(declarations, copy.with_suffix(".pxd"))
        extensions.append(Extension(module, [str(copy)], extra_compile_args=["-O2", "-g0"]))
    compiled = cythonize(extensions, build_dir=str(folder / "c"), compiler_directives=DIRECTIVES, quiet=True)
    command = Distribution({"name": "core", "ext_modules": compiled}).get_command_obj("build_ext")
    command.build_lib, command.build_temp, command.parallel = str(folder / "lib"), str(folder / "temp"), len(modules)
    command.ensure_finalized()
    command.run()
    Path(core.FOLDER).mkdir(exist_ok=True)
    for module in modules:
        shutil.move(command.get_ext_fullpath(module), files[module])


if __name__ == "__main__":
    sys.exit(main())
