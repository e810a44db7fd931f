"""The settings of Spark that the user made, which take precedence over ours: spark-defaults.conf and the arguments of spark-submit."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

__all__ = ["user_conf"]

_PROPERTY: Final = re.compile(r"\s*(?![#!\s])([^\s=:]+)\s*[\s=:]\s*(.*?)\s*")
"""A line of a properties file of Java."""


def user_conf(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The user's settings for a session that this process starts."""
    found: dict[str, str] = {}
    for line in _defaults(environment):
        if (match := _PROPERTY.fullmatch(line)) is not None and match[1].startswith("spark."):
            found[match[1]] = match[2]
    words = shlex.split(environment.get("PYSPARK_SUBMIT_ARGS", ""))
    for option, value in itertools.pairwise(words):
        name, equals, text = value.partition("=")
        if option in {"--conf", "-c"} and equals:
            found[name] = text
    return found


def _defaults(environment: Mapping[str, str]) -> Iterator[str]:
    directory = environment.get("SPARK_CONF_DIR")
    if directory is None:
        spec = importlib.util.find_spec("pyspark")
        home = environment.get("SPARK_HOME") or (str(Path(spec.origin).parent) if spec is not None and spec.origin is not None else "")
        directory = str(Path(home) / "conf")
    try:
        yield from (Path(directory) / "spark-defaults.conf").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return
