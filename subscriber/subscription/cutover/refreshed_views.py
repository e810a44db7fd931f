"""The materialized views of a cutover."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from subscriber.errors import ConfigurationError, SubscriberError
from subscriber.printable import shortened
from subscriber.schema.views import MaterializedView, measured, populated_views, refresh, views_in_order
from subscriber.walreceiver.session import Session

__all__ = ["refresh_views", "view_problems", "views_step"]

_log = logging.getLogger(__name__)

_APPLICATION: Final = "subscriber cutover"
_MEASURED_SECONDS: Final = 10.0
_SHOWN_SECONDS: Final = 0.1


async def _views(source: str, destination: Session) -> tuple[list[MaterializedView], list[str]]:
    """The destination's views that are populated in the source, in order; and the names of those that it does not have."""
    async with await Session.connect(source, application_name=_APPLICATION) as session:
        names = await populated_views(session)
    views = await views_in_order(destination, names)
    found = {each.name for each in views}
    return views, [str(name) for name in names if name not in found]


async def view_problems(source: str, destination: str, when: str) -> tuple[list[SubscriberError], list[str]]:
    """Errors, and notes for people.

    Raises:
        SubscriberError: one of the two databases cannot be queried.
    """
    async with await Session.connect(destination, application_name=_APPLICATION) as session:
        views, missing = await _views(source, session)
    notes = [f"materialized views do not exist in the new database: {shortened(missing)}"] if missing else []
    if when == "none":
        names = [str(each.name) for each in views]
        return [], notes + ([f"materialized views are not refreshed (--refresh none): {shortened(names)}"] if names else [])
    forbidden = [str(each.name) for each in views if not each.may]
    hint = "connect as their owner or a member of its role, grant MAINTAIN (17), or use --refresh none and refresh them yourself"
    message = f"the role may not refresh materialized views of the new database: {shortened(forbidden)}"
    return [ConfigurationError(message, hint=hint)] if forbidden else [], notes


async def views_step(source: str, destination: str, when: str) -> str:
    """The line of the plan. It measures how long the views take, for some seconds; nothing is changed.

    Raises:
        SubscriberError: one of the two databases cannot be queried.
    """
    async with await Session.connect(destination, application_name=_APPLICATION) as session:
        views, _ = await _views(source, session)
        views = [each for each in views if each.may]
        if when == "none" or not views:
            return "refresh no materialized views"
        try:
            seconds = await measured(session, views, _MEASURED_SECONDS)
        except SubscriberError as error:
            return f"refresh {len(views):,} materialized views; how long it takes is not known: {error.one_line()}"
    time = f"about {sum(seconds):.1f} s" if len(seconds) == len(views) else f"more than {_MEASURED_SECONDS:g} s"
    slow = sorted(zip(seconds, views, strict=False), key=lambda each: -each[0])
    shown = ", ".join(f"{view.name} {took:.1f} s" for took, view in slow[:3] if took >= _SHOWN_SECONDS)
    return f"refresh {len(views):,} materialized views, which takes {time}{f' ({shown})' if shown else ''}"


async def refresh_views(source: str, destination: str, tell: Callable[[str], None], *, writers: bool) -> None:
    """Refresh the destination's views that are populated in the source.

    Args:
        source: connection string of the database that writers leave.
        destination: of the other one.
        tell: is told about each view.
        writers: whether the destination is used meanwhile: then views are refreshed concurrently where that is possible, and an error is
            logged.

    Raises:
        SubscriberError: without writers: a view cannot be refreshed.
    """
    failed: Sequence[str] = ()
    try:
        async with await Session.connect(destination, application_name=_APPLICATION) as session:
            views, _ = await _views(source, session)
            for number, view in enumerate(views):
                failed = [str(each.name) for each in views[number:]]
                seconds = await refresh(session, view, concurrently=writers)
                tell(f"materialized view {view.name} refreshed in {seconds:.1f} s")
    except SubscriberError as error:
        error.add_note("while refreshing materialized views")
        if not writers:
            raise
        _log.warning("%s; refresh them yourself: %s", error.one_line(), shortened(failed) or "all")
    except BaseException:
        _log.warning("materialized views were not refreshed: %s", shortened(failed) or "all")
        raise
