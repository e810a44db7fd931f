"""The callbacks of an output plugin, and the check at its registration.

A plugin is an object whose methods have the names of PostgreSQL's callbacks without ``_cb``. Their arguments are PostgreSQL's, without the
lengths of arrays (``nrelations``, ``message_size``), which Python knows.

| callback | arguments |
| --- | --- |
| ``startup`` | ``(ctx, options, is_init)`` |
| ``begin`` | ``(ctx, txn)`` (required) |
| ``change`` | ``(ctx, txn, relation, change)`` (required) |
| ``truncate`` | ``(ctx, txn, relations, change)`` |
| ``commit`` | ``(ctx, txn, commit_lsn)`` (required) |
| ``message`` | ``(ctx, txn, message_lsn, transactional, prefix, message)`` |
| ``filter_by_origin`` | ``(ctx, origin)``: true drops the transaction |
| ``shutdown`` | ``(ctx)`` |
| ``filter_prepare`` | ``(ctx, xid, gid)``: true gives the transaction as an ordinary one at its COMMIT PREPARED |
| ``begin_prepare`` | ``(ctx, txn)`` (two-phase) |
| ``prepare`` | ``(ctx, txn, prepare_lsn)`` (two-phase) |
| ``commit_prepared`` | ``(ctx, txn, commit_lsn)`` (two-phase) |
| ``rollback_prepared`` | ``(ctx, txn, prepare_end_lsn, prepare_time)`` (two-phase) |
| ``stream_start`` | ``(ctx, txn)`` (streaming) |
| ``stream_stop`` | ``(ctx, txn)`` (streaming) |
| ``stream_abort`` | ``(ctx, txn, abort_lsn)`` (streaming) |
| ``stream_prepare`` | ``(ctx, txn, prepare_lsn)`` (streaming together with two-phase) |
| ``stream_commit`` | ``(ctx, txn, commit_lsn)`` (streaming) |
| ``stream_change`` | as ``change`` (streaming) |
| ``stream_message`` | as ``message`` |
| ``stream_truncate`` | as ``truncate`` |

Source: PostgreSQL manual, Logical Decoding Output Plugins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from subscriber.errors import ConfigurationError

__all__ = ["CALLBACKS", "TARGET_METHODS", "OutputPluginCallbacks"]

_REQUIRED: Final = ("begin", "change", "commit")
_STREAMING: Final = ("stream_start", "stream_stop", "stream_abort", "stream_commit", "stream_change")
_TWO_PHASE: Final = ("begin_prepare", "prepare", "commit_prepared", "rollback_prepared")
_OPTIONAL: Final = ("startup", "truncate", "message", "filter_by_origin", "shutdown")
_WITH_STREAMING: Final = ("stream_message", "stream_truncate")

CALLBACKS: Final = frozenset({*_REQUIRED, *_STREAMING, *_TWO_PHASE, *_OPTIONAL, *_WITH_STREAMING, "filter_prepare", "stream_prepare"})
"""The names of all callbacks."""
TARGET_METHODS: Final = ("send", "flush", "position", "advance")
"""Further methods of a plugin that is a target (:mod:`subscriber.consumer.plugin_stream`). All are optional."""

Callback = Callable[..., Any]


class OutputPluginCallbacks:
    """The callbacks that a plugin registers.

    Args:
        plugin: an object with callbacks as methods.
        name: of the plugin, for messages.

    Attributes:
        streaming: whether the plugin can be given transactions that are still in progress.
        two_phase: whether the plugin can be given prepared transactions.

    Raises:
        ConfigurationError: a required callback is missing, or an attribute with the name of a callback cannot be called.
    """

    def __init__(self, plugin: object, name: str) -> None:
        self._found: dict[str, Callback] = {}
        for callback in (*sorted(CALLBACKS), *TARGET_METHODS):
            method = getattr(plugin, callback, None)
            if method is None:
                continue
            if not callable(method):
                raise ConfigurationError(f'output plugin "{name}": {callback} is not a method', hint="rename the attribute")
            self._found[callback] = method
        if "position" in self._found:
            self._require(name, ("advance",), "an output plugin with a position requires a {} method")
        self.streaming = any(callback in self._found for callback in (*_STREAMING, *_WITH_STREAMING))
        self.two_phase = any(callback in self._found for callback in (*_TWO_PHASE, "filter_prepare", "stream_prepare"))
        self._require(name, _REQUIRED, "output plugins have to register a {} callback")
        if self.streaming:
            self._require(name, _STREAMING, "logical streaming requires a {} callback")
        if self.two_phase:
            self._require(name, _TWO_PHASE, "logical replication at prepare time requires a {} callback")
        if self.streaming and self.two_phase:
            self._require(name, ("stream_prepare",), "logical streaming at prepare time requires a {} callback")

    def _require(self, name: str, wanted: tuple[str, ...], words: str) -> None:
        missing = [callback for callback in wanted if callback not in self._found]
        if missing:
            hint = f"define {', '.join(missing)}"
            raise ConfigurationError(f'output plugin "{name}": {words.format(missing[0])}', hint=hint)

    def get(self, callback: str) -> Callback | None:
        """The callback of this name, or None if the plugin does not have it."""
        return self._found.get(callback)
