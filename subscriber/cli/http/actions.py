"""Actions of the page: some forms of ``subscriber alter``, for those who have the token.

An action runs beside the server, because ``alter`` waits until the subscription's worker has stopped. Its outcome is part of the overview.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from subscriber.cli.http.overview import error_of
from subscriber.cli.http.serving import TOKEN_VARIABLE
from subscriber.config import Settings
from subscriber.errors import ConfigurationError, SubscriberError, SubscriptionInUse
from subscriber.interfaces import TableName
from subscriber.printable import printable
from subscriber.protocol.lsn import Lsn
from subscriber.subscription.management.alter import alter_subscription

if TYPE_CHECKING:
    from aiohttp import web

__all__ = ["Actions", "read_token"]

_SHORTEST: Final = 16
_REMEMBERED: Final = 20
_POLL: Final = 0.05
_STOP_SECONDS: Final = 20.0
_WRONG_SECONDS: Final = 1.0
"""The answer to a wrong token is late, so that guessing takes long."""


def read_token(file: str | None) -> str | None:
    """The token from a file or the environment. None: there is none, and no actions.

    Raises:
        ConfigurationError: the file cannot be read, or the token is too short.
    """
    if file is not None:
        try:
            token, where = Path(file).read_text(encoding="ascii").strip(), file
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it has characters that are not ASCII"
            raise ConfigurationError(f"cannot read the token in {file}: {reason}", hint="write it with: openssl rand -hex 32") from error
    else:
        token, where = os.environ.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE
        if not token:
            return None
    if len(token) < _SHORTEST or not token.isascii():
        raise ConfigurationError(
            f"the token in {where} is too short", hint=f"use at least {_SHORTEST} ASCII characters, for example of: openssl rand -hex 32"
        )
    return token


class ConfiguredSubscriptions(Protocol):
    """Subscriptions that a configuration file defines. Any thread may use it."""

    def target_of(self, name: str) -> str | None:
        """The URL of a subscription's target. None: the file does not define it."""
        ...

    def held(self, name: str) -> AbstractContextManager[None]:
        """Stop a subscription, and start it again at the end of the block."""
        ...

    def runs(self, name: str) -> bool:
        """Whether a subscription of the file runs, or has not stopped yet."""
        ...


class Actions:
    """The actions on the subscriptions that this process runs.

    Args:
        settings: of the process.
        token: what a client must send. None: no actions.
        launched: the targets whose catalogs define subscriptions.
        paused: the names of the subscriptions that do not run until they are resumed, or this program is started again.
        configured: runs subscriptions that a configuration file defines.

    Attributes:
        log: the latest actions, newest first.
        defined: the targets of the subscriptions that catalogs define, by name.
    """

    def __init__(
        self,
        settings: Settings,
        token: str | None,
        launched: Callable[[], Sequence[str]],
        paused: set[str],
        configured: ConfiguredSubscriptions | None = None,
    ) -> None:
        self._settings = settings
        self._token = token
        self.launched = launched
        self.paused = paused
        self._configured = configured
        self._tasks = set[asyncio.Task[None]]()
        self.log: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED)
        self.defined: Mapping[str, str] = {}

    @property
    def allowed(self) -> bool:
        """Whether there are actions."""
        return self._token is not None

    def of(self, name: str) -> Sequence[str]:
        """The actions that a subscription has. The configuration file says whether one of its own is enabled."""
        if self._token is None:
            return ()
        pause = "resume" if name in self.paused else "pause"
        if self._file_target(name) is not None:
            return ("resync", "skip", pause)
        return ("enable", "disable", "resync", "skip", pause) if name in self.defined else ()

    def idle(self, running: Collection[str]) -> list[str]:
        """The paused subscriptions that still exist, and that have stopped."""
        return [name for name in self.paused if name not in running and self.of(name)]

    def _file_target(self, name: str) -> str | None:
        return None if self._configured is None else self._configured.target_of(name)

    async def answer(self, request: web.Request) -> web.Response:
        """``POST /api/action``."""
        from aiohttp import web  # noqa: PLC0415 -- an optional dependency

        if self._token is None:
            return web.json_response({"error": "actions need a token: start with --http-token-file"}, status=403)
        if not _from_this_page(request.headers):
            return web.json_response({"error": "the request came from another site"}, status=403)
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), self._token.encode()):
            await asyncio.sleep(_WRONG_SECONDS)
            return web.json_response({"error": "the token is wrong"}, status=401)
        try:
            wanted = await request.json()
            name, act, what = _action(wanted)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return web.json_response({"error": f"not an action: {type(error).__name__}"}, status=400)
        target = self._file_target(name) or self.defined.get(name)
        if target is None or wanted["action"] not in self.of(name):
            known = "there is no such subscription" if target is None else f"its actions are {', '.join(self.of(name))}"
            return web.json_response({"error": f"not possible: {known}"}, status=404 if target is None else 403)
        entry = {"time": time.time(), "subscription": printable(name), "action": what, "state": "running", "error": None}
        self.log.appendleft(entry)
        if act is None:
            (self.paused.add if what == "pause" else self.paused.discard)(name)
            entry["state"] = "done"
            return web.json_response({"accepted": what}, status=202)
        task = asyncio.create_task(self._act(name, target, act, entry))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return web.json_response({"accepted": what}, status=202)

    async def _act(self, name: str, target: str, act: Callable[[Any], Any], entry: dict[str, Any]) -> None:
        configured = self._configured if self._file_target(name) is not None else None
        try:
            # a launcher sees that a subscription is being altered; that of a file is stopped for it
            with contextlib.nullcontext() if configured is None else configured.held(name):
                if configured is not None:
                    await _stopped(configured, name)
                async with alter_subscription(name, target=target, settings=self._settings) as subscription:
                    await act(subscription)
        except SubscriberError as error:
            entry |= {"state": "failed", "error": error_of(error)}
        except BaseException as error:
            entry |= {"state": "failed", "error": {"text": type(error).__name__, "remedy": "see the log"}}
            raise
        else:
            entry["state"] = "done"


async def _stopped(configured: ConfiguredSubscriptions, name: str) -> None:
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            while configured.runs(name):  # noqa: ASYNC110 (another thread)
                await asyncio.sleep(_POLL)
    except TimeoutError:
        message = f'subscription "{name}" has not stopped within {_STOP_SECONDS:g} s, so it was not altered'
        raise SubscriptionInUse(message, hint="see the log for what it waits for, then repeat the action") from None


def _from_this_page(headers: Mapping[str, str]) -> bool:
    """Whether a browser sent the request for this page, or another program sent it. Only JSON, which no form of another site can send."""
    origin, site = headers.get("Origin"), headers.get("Sec-Fetch-Site", "none")
    return headers.get("Content-Type", "").partition(";")[0].strip().lower() == "application/json" and (
        # behind a proxy, Host may differ from what the browser knows
        site == "same-origin" or (site == "none" and (origin is None or origin.partition("://")[2] == headers.get("Host")))
    )


def _action(wanted: Any) -> tuple[str, Callable[[Any], Any] | None, str]:
    """The name, what is done to the subscription, and how it is called. None: it is paused or resumed, which the catalog does not know."""
    name = str(wanted["subscription"])
    match wanted["action"]:
        case "pause" | "resume" as what:
            return name, None, what
        case "enable":
            return name, lambda found: found.enable(), "enable"
        case "disable":
            return name, lambda found: found.disable(), "disable"
        case "resync":
            namespace, _, table = str(wanted["table"]).partition(".")
            return name, lambda found: found.resync([TableName(namespace, table)]), f"resync {printable(namespace)}.{printable(table)}"
        case "skip":
            lsn = Lsn.parse(str(wanted["lsn"]))
            return name, lambda found: found.skip(lsn), f"skip {lsn}"
        case other:
            raise ValueError(other)
