"""Crash points: proof that a sink loses nothing and repeats nothing, wherever the program fails.

A case runs a subscription from a fake publisher into your sink, in a child process. It fails at one named point
(:data:`subscriber.crash_points.POINTS`), once in each phase: set-up, copy, changes, streams, prepared transactions, stop. It is started
again each time, and must end with equal rows and nothing left behind. With pytest::

    @pytest.mark.parametrize("case", crash_cases(), ids=str)
    async def test_crash_points(case: CrashCase, tmp_path: Path) -> None:
        await case.run(MyTarget(tmp_path), tmp_path)  # a new, empty one

The target is that of the compliance suite: it creates sinks and tables, and reads rows without the sink. It must be possible to pickle it.
"""

from subscriber.testing.crash_points.cases import CORE_POINTS, CrashCase, Failure, crash_cases
from subscriber.testing.crash_points.failures import PHASES, SINK_LINE
from subscriber.testing.crash_points.target import CrashTarget

__all__ = ["CORE_POINTS", "PHASES", "SINK_LINE", "CrashCase", "CrashTarget", "Failure", "crash_cases"]
