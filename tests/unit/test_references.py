"""Docstrings and comments name modules and objects that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.glob("subscriber/**/*.py"), *ROOT.glob("tests/**/*.py")])
_ROLE = re.compile(r":(?:mod|class|func|meth|attr|data|exc|obj):`(?:[^`<]*<)?[~.]*([\w.]+)>?`")
_FILE = re.compile(r"``([\w/]+\.py)``")
_OUTSIDE = {"BaseException", "asyncio", "collections", "contextlib", "hypothesis", "pyspark", "pytest", "typing"}


@cache
def _names(path: Path) -> frozenset[str]:
    """What a module defines or imports, with the members of its classes."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Name(id=name) | ast.Attribute(attr=name):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {(alias.asname or alias.name).split(".")[0] for alias in names}
            case _:
                pass
    return frozenset(found)


@cache
def _modules() -> dict[str, list[Path]]:
    """The modules by their last name."""
    found: dict[str, list[Path]] = {}
    for path in FILES:
        found.setdefault(path.parent.name if path.name == "__init__.py" else path.stem, []).append(path)
    return found


def _module(parts: list[str]) -> tuple[Path | None, list[str]]:
    """The longest part of a dotted name that is a module, and the rest."""
    for end in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:end])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path, parts[end:]
    return None, parts


def _exists(name: str, file: Path) -> bool:
    """A dotted name is of a module of ours, of this module, or of another module that is named by its last part."""
    first, *rest = name.split(".")
    if first in _OUTSIDE:
        return True
    if first in {"subscriber", "tests"}:
        path, left = _module([first, *rest])
        return path is not None and (not left or left[0] in _names(path)) and all(part in _everywhere() for part in left)
    if first in _modules() and first not in _names(file):
        return not rest or any(rest[0] in _names(path) for path in _modules()[first])
    return first in _everywhere() and all(part in _everywhere() for part in rest)


@cache
def _everywhere() -> frozenset[str]:
    return frozenset().union(*map(_names, FILES))


def _missing(file: Path) -> list[str]:
    text = file.read_text()
    roles = [name for name in _ROLE.findall(text) if not _exists(name, file)]
    return roles + [name for name in _FILE.findall(text) if not any(path.as_posix().endswith(f"/{name}") for path in FILES)]


@pytest.mark.slow
def test_what_docstrings_name_exists() -> None:
    missing = {str(file): names for file in FILES if (names := _missing(file))}
    assert not missing
