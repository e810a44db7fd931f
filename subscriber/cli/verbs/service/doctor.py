"""``subscriber doctor``: collect what someone needs who helps with a subscription, without passwords and rows."""

from __future__ import annotations

import argparse
import os

from subscriber.cli.notices import confirm
from subscriber.cli.options import add_connection_option, add_name_argument, add_target_argument
from subscriber.cli.service.configuration_file import add_config_argument, chosen
from subscriber.cli.service.support_bundle import Bundle, Sides, collect
from subscriber.errors import ConfigurationError
from subscriber.subscription.configured import connection_of, url_of

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = (
        "Collects versions, the status, options and settings, the slot, settings of the publisher, the last lines of the log, and how long"
        " each took, as one .zip file. Passwords are removed, and rows are not read. What cannot be read is noted there."
    )
    add_name_argument(parser)
    add_config_argument(parser)
    add_target_argument(parser, required=False)
    add_connection_option(parser)
    parser.add_argument("--from-log", metavar="FILE", help="the log file to read; default: that of the configuration file")
    parser.add_argument("--output", metavar="FILE", help="the file to write, which must not exist; default: NAME.zip")
    parser.set_defaults(execute=_execute, usage=parser.error)


async def _execute(args: argparse.Namespace) -> int:
    configuration = args.configuration
    secrets = {os.environ.get(name, "") for name in ("SUBSCRIBER_PUBLISHER_PASSWORD", "SUBSCRIBER_TARGET_PASSWORD", "PGPASSWORD")}
    if configuration is not None:
        chosen(configuration, [args.name])
        each = configuration.subscriptions[args.name]
        sides = Sides(args.name, url_of(each.target), connection_of(each))
        secrets |= {value for key, value in configuration.secrets.items() if key.endswith(".password")}
    elif args.target is None:
        args.usage("one of --target and --config is required")
        raise AssertionError  # usage does not return
    else:
        sides = Sides(args.name, args.target, args.connection)
    log = args.from_log or (configuration.log.file if configuration is not None else None)
    output = args.output or f"{args.name}.zip"
    bundle = Bundle(secrets)
    await collect(bundle, sides, configuration, log)
    try:
        bundle.write(output)
    except OSError as error:
        raise ConfigurationError(f"cannot write {output}: {error.strerror}", hint="name another file with --output") from None
    missing = f"; not all could be read: {', '.join(bundle.failed)}" if bundle.failed else ""
    confirm(args, f"wrote {output}; look at it before you pass it on{missing}")
    return 0
