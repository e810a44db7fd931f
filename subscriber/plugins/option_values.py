"""Read the options of a plugin in ``startup``."""

from __future__ import annotations

from subscriber.config.reading import parse_bool
from subscriber.errors import ConfigurationError
from subscriber.plugins.context import LogicalDecodingContext

__all__ = ["boolean"]


def boolean(ctx: LogicalDecodingContext, name: str, *, default: bool, bare: bool = True) -> bool:
    """Read a boolean option.

    Args:
        ctx: has the options.
        name: of the option.
        default: if it is not given.
        bare: if it is given without a value.

    Raises:
        ConfigurationError: it has another value.
    """
    if name not in ctx.output_plugin_options:
        return default
    text = ctx.output_plugin_options[name]
    if text is None:
        return bare
    try:
        return parse_bool(name, text)
    except ConfigurationError as error:
        raise ConfigurationError(f'could not parse value "{text}" for parameter "{name}"', hint=error.hint) from None
