"""The applier as a thread of the landing process, for use on one machine. It never runs in the event loop's thread."""

from __future__ import annotations

import logging
import threading
from typing import Final

from subscriber.errors import SubscriberError, TargetError, TargetUnavailable
from subscriber.sinks.required_packages import requiring
from subscriber.sinks.spark.files.location import Location

__all__ = ["ApplierThread"]

_log = logging.getLogger(__name__)

_REST_SECONDS: Final = 10.0
"""How long a clean end still applies waiting changes."""
_PATIENCE_SECONDS: Final = 60.0
"""How long a clean end waits for a round. A round that takes longer ends with the process, and the next applier starts it again."""


class ApplierThread:
    """The thread, see the module. The first :meth:`start` starts it. It may be started again after :meth:`stop`."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: SubscriberError | None = None

    def start(self) -> None:
        """Start the thread, if the location asks for it and it is not running.

        Raises:
            SubscriberError: the thread ended with an error that a retry does not fix. It is raised only once.
            TargetUnavailable: the thread was stopped, and is still in its last round.
        """
        if self._thread is not None and self._stop.is_set():
            if self._thread.is_alive():
                raise TargetUnavailable(
                    "the stopped applier of this process has not yet ended its round", hint="retry when the round has ended"
                )
            self._thread = None
        if self._failure is not None:
            failure, self._failure, self._thread = self._failure, None, None
            raise failure
        if self._location.apply == "none" or self._thread is not None:
            return
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="applier", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # the interpreter reports an unknown error with its traceback. It is stored too, so that landing stops when the applier ends
        failure: SubscriberError | None = TargetError(
            "the applier ended with an unexpected error", hint="report the traceback that was logged before this"
        )
        try:
            # it needs more packages than landing
            with requiring("the applier", "spark" if self._location.apply == "spark" else "lake"):
                from subscriber.sinks.spark.pipeline.program.start import apply_in_process  # noqa: PLC0415 -- see above
            apply_in_process(self._location, self._stop, _REST_SECONDS)
            failure = None
        except SubscriberError as error:
            if not self._stop.is_set():
                _log.error("the applier has ended: %s", error.one_line())
            failure = error
        finally:
            self._failure = failure

    def stop(self) -> SubscriberError | None:
        """Let the thread finish its round, and apply what is waiting if that is quick. Blocks for a limited time: call it in a thread.

        Returns:
            The error of the end. The next :meth:`start` does not raise it.
        """
        if self._thread is None:
            return None
        runs = self._thread.is_alive()
        self._stop.set()
        self._thread.join(_PATIENCE_SECONDS)
        if self._thread.is_alive():
            _log.warning("the applier did not end its round within %.0f s: not waiting for it", _PATIENCE_SECONDS)
            return None
        self._thread = None
        if not runs:
            return None
        ending, self._failure = self._failure, None
        return ending

    def finish(self) -> None:
        """:meth:`stop`, and raise the error that kept the applier from applying everything."""
        ending = self.stop()
        failure, self._failure = self._failure or ending, None
        if failure is not None:
            raise failure
