"""``subscriber spark-apply``: apply the landed batches of a lake, with or without Spark."""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from subscriber.cli.http.applier_metrics import ApplierSite
from subscriber.cli.http.serving import served
from subscriber.cli.notices import confirm
from subscriber.cli.service.configuration_file import add_config_argument
from subscriber.cli.service.configured_run import Reloader
from subscriber.cli.service.systemd import notifying
from subscriber.cli.signals import clean_end, on_hangup
from subscriber.config import parse_assignments, suggestion
from subscriber.config.file.configuration import ConfiguredTarget
from subscriber.config.file.sections import APPLIER
from subscriber.errors import ConfigurationError
from subscriber.sinks.required_packages import requiring
from subscriber.sinks.spark.kind import LAKE_NEEDS

__all__ = ["add_arguments"]

_METAVARS: Final = {
    "py_files": "WHEEL",
    "freshness": "TIME",
    "max_write_rate": "SIZE/s",
    "retain_hours": "N",
    "target_rows": "N",
    "progress": "FILE",
    "http": "HOST:PORT",
    "register": "CATALOG.SCHEMA",
}
_PARAMETERS: Final = ("freshness", "max_write_rate", "retain_hours", "target_rows")
_EFFECTS: Final = {"log": "it takes effect at once", "subscriptions": "this program does not use it"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = (
        "Applies the batches that `subscriber run --target spark:///path` lands to the lake's Delta tables. Run one per lake."
    )
    parser.add_argument(
        "lake", metavar="LAKE", nargs="?", help="the target of the subscription, spark:///path, or its directory; its name in --config"
    )
    add_config_argument(parser)
    for name, each in APPLIER.items():
        flag, known = "--" + name.replace("_", "-"), f"{each.help} (default: {each.shown_default})"
        if each.keyed:
            parser.add_argument(flag, action="append", default=[], metavar="NAME=VALUE", help=f"{known}; may be repeated")
        else:
            parser.add_argument(*_names(flag), choices=each.type.words or None, metavar=_METAVARS.get(name), help=known)
    parser.add_argument("--once", action="store_true", help="end when all landed batches are applied; exit status 1 if a table is stopped")
    parser.set_defaults(execute=_execute, usage=parser.error, is_service=True)


async def _execute(args: argparse.Namespace) -> int:
    lake, given = _lake(args)
    with requiring(*LAKE_NEEDS):
        from subscriber.sinks.spark.pipeline.program.start import apply_lake  # noqa: PLC0415 -- pyarrow and deltalake come with an extra
    site = ApplierSite()
    stop = threading.Event()
    apply = partial(
        apply_lake,
        lake,
        stop,
        engine=given.get("engine"),
        master=given.get("master"),
        conf=given.get("conf", {}),
        packages=given.get("py_files"),
        parameters={name: given[name] for name in _PARAMETERS if name in given},
        progress=given.get("progress"),
        watch=site.collector.watch,
        register=given.get("register"),
        once=args.once,
    )
    reloader = Reloader(args, lambda configuration: None, lambda key: _EFFECTS.get(key.partition(".")[0], "restart this program to use it"))
    with served(given.get("http"), lambda: site), clean_end(stop.set) as ending, on_hangup(reloader):
        async with notifying(lambda: (True, "applying landed batches")):
            await asyncio.to_thread(apply)
    confirm(args, "stopped" if stop.is_set() else "applied everything that was landed")
    return ending.status


def _names(flag: str) -> tuple[str, ...]:
    return (flag, "--metrics") if flag == "--http" else (flag,)


def _lake(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The lake, and the options of its applier by name: those of the command line come before those of the file."""
    given = {name: value for name in APPLIER if name != "conf" and (value := getattr(args, name)) is not None}
    conf = parse_assignments(args.conf, case_matters=True)
    if args.configuration is None or (args.lake is not None and "/" in args.lake):
        if args.lake is None:
            args.usage("one of LAKE and --config is required")
        return args.lake, {**given, "conf": conf}
    targets: Mapping[str, ConfiguredTarget] = args.configuration.targets
    lakes = {name: each for name, each in targets.items() if each.url.startswith("spark:")}
    name = args.lake or (next(iter(lakes)) if len(lakes) == 1 else None)
    if name is None:
        raise ConfigurationError(
            f"the configuration file has {len(lakes)} lakes, and one is applied",
            hint="name one of [targets]: spark-apply NAME",
        )
    if name not in lakes:
        raise ConfigurationError(f'the configuration file has no lake "{name}" in [targets]', hint=suggestion(name, lakes))
    applier = lakes[name].applier
    return lakes[name].url, {**applier, **given, "conf": {**applier.get("conf", {}), **conf}}
