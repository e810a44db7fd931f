"""``subscriber run``: run one subscription from its arguments, or all subscriptions in a target's catalog."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from subscriber.apply.progress import CopyProgress
from subscriber.cli.http.serving import TOKEN_VARIABLE, served
from subscriber.cli.narrator import Narrator, caught_up, stopped
from subscriber.cli.notices import confirm
from subscriber.cli.options import add_definition_arguments, add_name_option, lsn, parameters_of
from subscriber.cli.progress import Bars, copy_progress
from subscriber.cli.service.configuration_file import add_config_argument
from subscriber.cli.signals import clean_end
from subscriber.config import Settings, SubscriptionOptions
from subscriber.config.reading import parse_assignments
from subscriber.subscription.run_status import Until
from subscriber.subscription.subscription import Subscription
from subscriber.subscription.targets import is_plugin

if TYPE_CHECKING:
    from subscriber.cli.http.subscription_site import SubscriptionSite
    from subscriber.subscription.launcher import Launcher

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = (
        "With --connection and --publication: copies the published tables into the target and applies the changes. The"
        " first run creates the slot, the catalog and the position; later runs resume from the position. Without them: runs the"
        ' subscriptions that "subscriber create" defined in the target, and follows changes by "subscriber alter" and "subscriber drop".'
        " With --config: runs the subscriptions of a configuration file, which SIGHUP reads again."
        " With --target plugin:package.module:Class, an output plugin gets the changes."
        " SIGTERM and SIGINT end it cleanly: applied changes are durable and acknowledged, and the slots stay."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="run only these subscriptions of the target or the configuration file")
    add_config_argument(parser)
    add_definition_arguments(parser, required=False)
    add_name_option(parser)
    until = parser.add_mutually_exclusive_group()
    until.add_argument(
        "--until-caught-up", action="store_true", help="end when the target has everything that is committed on the publisher at the start"
    )
    until.add_argument("--until-lsn", type=lsn, metavar="LSN", help="end when the target has everything that is committed up to this LSN")
    parser.add_argument(
        "--allow-missing-tables", action="store_true", help="with --until-...: exit with 0 even if published tables are not replicated"
    )
    parser.add_argument("--http", "--metrics", metavar="HOST:PORT", help="serve a page, metrics for Prometheus and probes at this address")
    parser.add_argument(
        "--http-token-file",
        metavar="FILE",
        help=f"a file with the token that actions of the page need, or the token in {TOKEN_VARIABLE} (default: no actions)",
    )
    parser.set_defaults(execute=_execute, usage=parser.error, is_service=True)


async def _execute(args: argparse.Namespace) -> int:
    if args.configuration is None and args.target is None:
        args.usage("one of --target and --config is required")
    if (args.connection is None) != (args.publication is None):
        args.usage(
            "--connection and --publication belong together: give both to run one subscription, or neither to run those in the"
            " target's catalog"
        )
    if args.http_token_file is not None and args.http is None and (args.configuration is None or args.configuration.http is None):
        args.usage("--http-token-file needs --http")
    if args.connection is not None and is_plugin(args.target):
        return await _feed_plugin(args)
    progress = copy_progress()
    try:
        if args.configuration is not None:
            from subscriber.cli.service.configured_run import run_configured  # noqa: PLC0415 -- only one of the three is needed

            return await run_configured(args, args.configuration, progress)
        return await (_launch(args, progress) if args.connection is None else _follow(args, progress))
    finally:
        if isinstance(progress, Bars):
            progress.close()


async def _launch(args: argparse.Namespace, progress: CopyProgress) -> int:
    if parameters_of(args) or args.allow_missing_tables or args.until_caught_up or args.until_lsn is not None:
        args.usage(
            "-o, --map, --exclude-table, --until-... and --allow-missing-tables need --connection and --publication;"
            " use subscriber alter to change a created subscription"
        )
    from subscriber.subscription.launcher import Launcher  # noqa: PLC0415 -- as above

    launcher = Launcher(args.target, args.names, settings=Settings.parse(args.settings), progress=progress)
    narrator = Narrator(lambda: launcher.subscriptions, partial(confirm, args), named=True, copies=not isinstance(progress, Bars))
    with served(args.http, partial(_site_with_actions, args, launcher)), clean_end(launcher.stop) as ending:
        await narrator.during(launcher.run())
    confirm(args, "stopped")
    return ending.status


async def _follow(args: argparse.Namespace, progress: CopyProgress) -> int:
    if args.names:
        args.usage("a NAME selects subscriptions that were created; use --name with --connection")
    if args.http_token_file is not None:
        args.usage("--http-token-file is for subscriptions that were created; without --connection")
    subscription = Subscription(
        args.name,
        connection=args.connection,
        publications=args.publication,
        target=args.target,
        options=SubscriptionOptions.parse(parameters_of(args)),
        settings=Settings.parse(args.settings),
        progress=progress,
    )
    until = Until(args.until_lsn, args.allow_missing_tables) if args.until_caught_up or args.until_lsn is not None else None
    narrator = Narrator(
        lambda: {args.name: subscription},
        partial(confirm, args),
        named=False,
        ends=until is not None,
        copies=not isinstance(progress, Bars),
    )
    began = time.monotonic()
    with served(args.http, partial(_site, lambda: {args.name: subscription})), clean_end(subscription.stop) as ending:
        await narrator.during(subscription.run(until))
    confirm(args, stopped(subscription.status) if ending.received else caught_up(subscription.status, time.monotonic() - began))
    return ending.status


def _site_with_actions(args: argparse.Namespace, launcher: Launcher) -> SubscriptionSite:
    from subscriber.cli.http.actions import Actions, read_token  # noqa: PLC0415 -- as above
    from subscriber.cli.http.subscription_site import SubscriptionSite  # noqa: PLC0415 -- as above

    token = None if args.http is None else read_token(args.http_token_file)
    actions = Actions(Settings.parse(args.settings), token, lambda: [args.target], launcher.paused)
    return SubscriptionSite(lambda: launcher.subscriptions, actions)


def _site(subscriptions: Callable[[], Mapping[str, Subscription]]) -> SubscriptionSite:
    from subscriber.cli.http.subscription_site import SubscriptionSite  # noqa: PLC0415 -- as above

    return SubscriptionSite(subscriptions)


async def _feed_plugin(args: argparse.Namespace) -> int:
    """Give the changes to an output plugin. There is no copy and no catalog: the position is that of the slot, or the plugin's own."""
    if args.names or args.http:
        args.usage("a NAME and --http are not available for a target plugin:…")
    if parse_assignments(args.options).get("copy_data", "false").lower() not in {"false", "off", "no", "0"}:
        args.usage("a target plugin:… gets changes only: omit copy_data")
    from subscriber.consumer.plugin_stream import PluginStream  # noqa: PLC0415 -- as above
    from subscriber.consumer.transactions import transactions  # noqa: PLC0415 -- as above

    name, _, query = args.target.removeprefix("plugin:").partition("?")
    plugin_options = dict(parse_qsl(query, keep_blank_values=True))
    options = SubscriptionOptions.parse(parameters_of(args))
    async with await PluginStream.open(args.connection, name, plugin_options, options, target=True) as plugin:
        stream = transactions(
            args.connection,
            publications=args.publication,
            slot_name=options.slot_name or args.name,
            options=plugin.options,
            settings=Settings.parse(args.settings),
            start_lsn=await plugin.position(),
            advance=plugin.advance,
            until_lsn=args.until_lsn,
            until_caught_up=args.until_caught_up,
            messages=plugin.messages,
            blocks=plugin.streaming,
        )
        with clean_end(stream.stop) as ending:
            async with stream:
                async for received in stream:
                    await plugin.deliver(received)
        confirm(args, f"{'stopped' if ending.received else 'caught up'} at {stream.acknowledged}")
    return ending.status
