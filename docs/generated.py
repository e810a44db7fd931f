"""The parts of pages that are made from the code."""

from __future__ import annotations

import argparse
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from prometheus_client.core import Metric

import subscriber
from subscriber.cli.http.applier_metrics import ApplierCollector
from subscriber.cli.http.sampler import Sampler
from subscriber.cli.http.subscription_metrics import SubscriptionCollector
from subscriber.cli.parser import VerbParser, make_parser
from subscriber.config import Option, Settings, SubscriptionOptions, declared, reference
from subscriber.config.file import sections
from tests.benchmark.postgres.report import Report

__all__ = ["PARTS"]

_SHARED_BY: Final = 3
"""An option of so many verbs is described once."""


def _verbs() -> dict[str, argparse.ArgumentParser]:
    found: dict[str, argparse.ArgumentParser] = {}
    for name, parser in _below(make_parser()).items():
        # a verb with actions is described by these: `schema copy`
        actions = _below(parser)
        found |= {f"{name} {action}": each for action, each in actions.items()} if actions else {name: parser}
    return found


def _below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    choices: dict[str, VerbParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            choices |= action.choices
    for each in choices.values():
        each.load()
    return dict(choices)


def _arguments(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Each argument as it is written, and its help."""
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        value = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper())
        takes = action.nargs != 0 and not isinstance(action, argparse._StoreTrueAction | argparse._CountAction)
        names = ", ".join(action.option_strings) or str(value)
        text = f"{names} {value}" if action.option_strings and takes else names
        yield text, (action.help or "") % {"default": action.default, "prog": parser.prog}


def _shared() -> list[tuple[str, str]]:
    found = Counter(argument for parser in _verbs().values() for argument in _arguments(parser) if argument[0].startswith("-"))
    return [argument for argument, verbs in found.items() if verbs >= _SHARED_BY]


def _table(rows: list[tuple[str, str]], first: str, second: str) -> str:
    lines = [f"| `{left}` | {right} |" for left, right in rows]
    return "\n".join([f"| {first} | {second} |", "| --- | --- |", *lines])


def shared_options() -> str:
    """The options of several verbs."""
    return _table(_shared(), "argument", "meaning")


def verb(*words: str) -> str:
    """Usage, description and own options of a verb."""
    name = " ".join(words)
    parser = _verbs()[name]
    usage = re.sub(r"\s+", " ", parser.format_usage().removeprefix("usage: ")).strip()
    shared = _shared()
    own = [argument for argument in _arguments(parser) if argument not in shared]
    return f"## {name}\n\n```text\n{usage}\n```\n\n{parser.description}\n\n{_table(own, 'argument', 'meaning') if own else ''}\n"


def errors() -> str:
    """The classes of errors, as a tree of headings."""

    def lines(error: type[subscriber.SubscriberError], depth: int) -> Iterator[str]:
        yield f"{'    ' * depth}- **{error.__name__}**: {inspect.cleandoc(error.__doc__ or '').splitlines()[0]}"
        for below in error.__subclasses__():
            if below.__name__ in subscriber.__all__:
                yield from lines(below, depth + 1)

    return "\n".join(lines(subscriber.SubscriberError, 0))


def metrics() -> str:
    """The families of metrics of subscriptions."""
    return _families(SubscriptionCollector(Sampler(dict)).collect())


def applier_metrics() -> str:
    """The families of metrics of an applier."""
    return _families(ApplierCollector().collect())


def _families(families: Iterable[Metric]) -> str:
    lines = []
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(f"`{label}`" for label in vars(family)["_labelnames"] if label != "subscription")
        lines.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join(["| metric | type | label | meaning |", "| --- | --- | --- | --- |", *lines])


def parameters() -> str:
    """The parameters of CREATE SUBSCRIPTION."""
    known = declared(SubscriptionOptions)
    lines = []
    for row in reference(SubscriptionOptions):
        since = known[row.name].alter_since
        altered = f"{row.alterable}, publisher {since} or later" if since else row.alterable
        lines.append(f"| `{row.name}` | {row.type} | {row.default} | {row.publisher} | {altered} | {row.help} |")
    head = ["| option | values | default | publisher | can be altered | meaning |", "| --- | --- | --- | --- | --- | --- |"]
    return "\n".join([*head, *lines])


def settings() -> str:
    """The settings."""
    known = declared(Settings)
    lines = []
    for row in reference(Settings):
        own = "own" if known[row.name].ours else ""
        lines.append(f"| `{row.name}` | {row.type} | {row.default} | {row.unit} | {own} | {row.help} |")
    return "\n".join(["| setting | values | default | unit | | meaning |", "| --- | --- | --- | --- | --- | --- |", *lines])


def section(name: str) -> str:
    """The keys of one table of the configuration file."""
    known: dict[str, Option] = getattr(sections, name)
    rows = [
        f"| `{key}` | {', '.join(each.type.words) or each.type.name} | {each.shown_default} | {each.help} |" for key, each in known.items()
    ]
    return "\n".join(["| key | values | default | meaning |", "| --- | --- | --- | --- |", *rows])


def benchmarks() -> str:
    """The figures that `make bench SINK=postgres DOCS=1` wrote."""
    return Report.load(Path(__file__).parent / "reference" / "benchmarks.json").markdown()


def workers() -> str:
    """The figures that `make bench SINK=postgres WORKLOAD=parallel DOCS=1` wrote."""
    return Report.load(Path(__file__).parent / "reference" / "benchmarks-parallel.json").workers_markdown()


PARTS: Final[dict[str, Callable[..., str]]] = {
    "shared_options": shared_options,
    "verb": verb,
    "errors": errors,
    "benchmarks": benchmarks,
    "workers": workers,
    "applier_metrics": applier_metrics,
    "metrics": metrics,
    "parameters": parameters,
    "settings": settings,
    "section": section,
}
