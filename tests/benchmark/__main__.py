"""The benchmarks by name: ``python -m tests.benchmark NAME [KEY=VALUE …]`` (``make bench SINK=NAME KEY=VALUE …``).

Each benchmark says in its own module what it measures; this module passes its arguments on, and installs the servers that it needs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

Given = Mapping[str, str]


def _options(given: Given, *keys: str) -> list[str]:
    return [part for key in keys if key in given for part in (f"--{key.lower()}", given[key])]


def _positional(given: Given, **defaults: str) -> list[str]:
    return [given.get(key, default) for key, default in defaults.items()]


def _postgres(given: Given) -> list[str]:
    figures = {}
    if "DOCS" in given:
        parallel = given.get("WORKLOAD") == "parallel"
        figures = {"JSON": f"docs/reference/benchmarks{'-parallel' if parallel else ''}.json"}
        if not parallel:
            figures["SVG"] = "docs/reference/benchmarks.svg"
    relay = ["--relay"] if "RELAY" in given else []
    return relay + _options(given, "VERSION", "ROWS", "WORKLOAD", "ROUNDS") + _options({**figures, **given}, "JSON", "SVG")


BENCHMARKS: Final[Mapping[str, tuple[str, Sequence[str], Callable[[Given], list[str]]]]] = {
    "sqlite": ("sinks", ("ROWS", "SIZE"), lambda given: ["sqlite", *_positional(given, ROWS="0", SIZE="0")]),
    "mariadb": ("sinks", ("ROWS", "SIZE"), lambda given: ["mariadb", *_positional(given, ROWS="0", SIZE="0")]),
    "postgres": ("postgres", ("VERSION", "ROWS", "WORKLOAD", "ROUNDS", "JSON", "DOCS", "RELAY"), _postgres),
    "landing": ("postgres", ("VERSION", "ROWS", "WORKLOAD", "ROUNDS", "JSON"), lambda given: [*_postgres(given), "--landing"]),
    "path": ("postgres.path", ("ROWS",), lambda given: _positional(given, ROWS="0")),
    "sets": ("postgres.sets", ("ROWS",), lambda given: _positional(given, ROWS="0")),
    "pgcopydb": ("followers", ("ROWS",), lambda given: ["pgcopydb", *_positional(given, ROWS="0")]),
    "debezium": ("followers", ("ROWS",), lambda given: ["debezium", *_positional(given, ROWS="0")]),
    "spark": ("spark", ("ROWS", "WORKLOAD", "ENGINE", "SECONDS"), lambda given: _options(given, "ROWS", "WORKLOAD", "ENGINE", "SECONDS")),
    "migration": ("migration", ("ROWS",), lambda given: _positional(given, ROWS="0")),
    "recover": ("recover", ("ROWS",), lambda given: _positional(given, ROWS="0")),
    "verify": ("verification", ("ROWS",), lambda given: _positional(given, ROWS="0")),
    "copy": ("copies", ("TARGET", "ROWS"), lambda given: _positional(given, TARGET="sqlite", ROWS="0")),
    "tables": ("tables", ("VERSION", "TARGET"), lambda given: _positional(given, VERSION="18", TARGET="postgres")),
    "parallel": ("parallel_apply", ("ROWS",), lambda given: _positional(given, ROWS="300000")),
    "pytest": ("pytest_fixtures", (), lambda given: []),
}
"""By name: the module, the keys that it takes, and its arguments."""


def main(arguments: Sequence[str]) -> int:
    name, *rest = arguments or [""]
    given = dict(part.split("=", 1) for part in rest if "=" in part)
    if name not in BENCHMARKS:
        sys.stderr.write(f"unknown benchmark {name!r}; the benchmarks are {', '.join(BENCHMARKS)}\n")
        return 2
    module, keys, make = BENCHMARKS[name]
    if unknown := [part for part in rest if part.split("=", 1)[0] not in keys]:
        sys.stderr.write(f"{name} does not take {', '.join(unknown)}; it takes {', '.join(keys) or 'nothing'}\n")
        return 2
    if "mariadb" in (name, given.get("TARGET")):
        subprocess.run([sys.executable, "-m", "subscriber.testing.mariadb_binaries"], check=True)
    if "VERSION" in given:
        subprocess.run([sys.executable, "-m", "subscriber.testing.download", given["VERSION"]], check=True)
    return subprocess.run([sys.executable, "-m", f"tests.benchmark.{module}", *make(given)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
