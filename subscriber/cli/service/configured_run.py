"""``run --config``: run what a configuration file says, and read it again at SIGHUP."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from subscriber.apply.progress import CopyProgress
from subscriber.cli.http.actions import Actions, read_token
from subscriber.cli.http.serving import served
from subscriber.cli.http.subscription_site import SubscriptionSite
from subscriber.cli.narrator import Narrator
from subscriber.cli.notices import confirm
from subscriber.cli.options import parameters_of
from subscriber.cli.output import complain
from subscriber.cli.progress import Bars
from subscriber.cli.service.configuration_file import chosen, reload
from subscriber.cli.service.logs import set_up
from subscriber.cli.signals import clean_end, on_hangup
from subscriber.config import LIVE, parse_assignments
from subscriber.errors import ConfigurationError, SubscriberError
from subscriber.subscription.configured import settings_of, subscription_of
from subscriber.subscription.run_status import Until
from subscriber.subscription.service import Service
from subscriber.subscription.subscription import Subscription

if TYPE_CHECKING:
    from subscriber.config.file.configuration import Configuration

__all__ = ["Reloader", "run_configured"]


class Reloader:
    """Reads the configuration file again at SIGHUP, and reports what changed.

    Args:
        args: of the verb.
        apply: uses what was read; it may refuse it by a ConfigurationError.
        effect: says what happens because of a key that changed.
    """

    def __init__(self, args: argparse.Namespace, apply: Callable[[Configuration], None], effect: Callable[[str], str]) -> None:
        self._args = args
        self._apply = apply
        self._effect = effect

    def __call__(self) -> None:
        """At a SIGHUP."""
        before: Configuration | None = self._args.configuration
        changed: list[str] | None = []
        try:
            if before is not None:
                self._args.configuration, changed = reload(self._args, before, self._apply)
        except ConfigurationError as error:
            changed = None
            complain(f"the configuration was not reloaded, and the previous one stays in effect: {error.one_line()}")
        try:
            set_up(self._args)
        except ConfigurationError as error:
            complain(f"the log stays where it is: {error.one_line()}")
        if before is None or changed is None:
            return
        if not changed:
            confirm(self._args, f"read {self._args.config} again: nothing changed")
        for key in changed:
            confirm(self._args, f"read {self._args.config} again: {key} changed: {self._effect(key)}")


async def run_configured(args: argparse.Namespace, configuration: Configuration, progress: CopyProgress) -> int:
    """Run the subscriptions of the file, or those that the arguments name."""
    names = chosen(configuration, args.names)
    options, settings = parse_assignments(parameters_of(args)), parse_assignments(args.settings)
    if args.until_caught_up or args.until_lsn is not None:
        if args.until_lsn is not None and len(names or configuration.subscriptions) > 1:
            args.usage("--until-lsn is an LSN of one publisher: name one subscription")
        subscriptions = {
            name: subscription_of(each, options, settings, progress)
            for name, each in configuration.subscriptions.items()
            if not names or name in names
        }
        return await _run_once(args, configuration, subscriptions, progress)
    service = Service(options, settings, progress)
    service.configure(configuration, names)
    narrator = Narrator(lambda: service.subscriptions, partial(confirm, args), named=True, copies=not isinstance(progress, Bars))
    reloader = Reloader(args, partial(_configure, service, names), _effect)
    address = args.http or configuration.http
    token = None if address is None else read_token(args.http_token_file)
    actions = Actions(settings_of(settings), token, lambda: service.launched, service.paused, service)
    with (
        served(address, lambda: SubscriptionSite(lambda: service.subscriptions, actions)),
        clean_end(service.stop) as ending,
        on_hangup(reloader),
    ):
        await narrator.during(service.run())
    confirm(args, "stopped")
    return ending.status


def _configure(service: Service, names: frozenset[str], configuration: Configuration) -> None:
    service.configure(configuration, chosen(configuration, sorted(names)))


def _effect(key: str) -> str:
    section, _, rest = key.partition(".")
    match section:
        case "subscriptions" if "." not in rest:
            return "it is started, or stopped if it was removed; its slot and rows stay"
        case "subscriptions" if ".options." in rest and rest.rpartition(".options.")[2] in LIVE:
            return "it takes effect at once"
        case "subscriptions":
            return "the subscription is started again"
        case "settings" | "targets":
            return "the subscriptions that use it are started again"
        case "log":
            return "it takes effect at once"
    return "restart this program to use it"


async def _run_once(
    args: argparse.Namespace, configuration: Configuration, subscriptions: dict[str, Subscription], progress: CopyProgress
) -> int:
    """Run each until it has caught up. An error of one does not end the others."""
    until = Until(args.until_lsn, args.allow_missing_tables)
    narrator = Narrator(lambda: subscriptions, partial(confirm, args), named=True, ends=True, copies=not isinstance(progress, Bars))

    def stop() -> None:
        for each in subscriptions.values():
            each.stop()

    failed: list[BaseException] = []

    async def work() -> None:
        results = await asyncio.gather(*(each.run(until) for each in subscriptions.values()), return_exceptions=True)
        failed.extend(result for result in results if result is not None)

    with served(args.http or configuration.http, lambda: SubscriptionSite(lambda: subscriptions)), clean_end(stop) as ending:
        await narrator.during(work())
    for error in failed:
        if not isinstance(error, SubscriberError):
            raise error
        complain(error.one_line())
    if not failed:
        confirm(args, "stopped" if ending.received else f"caught up: {', '.join(subscriptions)}")
    return 1 if failed else ending.status
