"""What the rules of conflicts need of the target."""

from __future__ import annotations

from typing import Final

from subscriber.config import ConflictRules
from subscriber.errors import ConfigurationError
from subscriber.sinks.postgres.session.origins import Run, grant, may_use_origins

__all__ = ["rules_refused"]

_TRACKED: Final = """
SELECT pg_catalog.current_setting('track_commit_timestamp')::bool, pg_catalog.current_setting('server_version_num')::int
"""


async def rules_refused(run: Run, rules: ConflictRules, *, without_origin: bool = False) -> ConfigurationError | None:
    """Return why the target cannot resolve conflicts by these rules, or None.

    Args:
        run: queries the target.
        rules: the rules.
        without_origin: the session has no replication origin.

    Raises:
        TargetError: or a subclass.
    """
    kinds = tuple(dict.fromkeys((*rules.kinds("by_origin"), *rules.kinds("by_time"))))
    if not kinds:
        return None
    ((tracked, version),) = await run(_TRACKED)
    given = ", ".join(f"conflict.{kind} = {rule}" for kind in kinds for rule in sorted(rules.uses(kind) - {"apply_remote", "error"}))
    if version < 140000:
        return ConfigurationError(
            f"{given} needs a target of PostgreSQL 14 or later: earlier ones do not tell which origin changed a row last",
            hint="use another rule",
        )
    if not tracked:
        return ConfigurationError(
            f"{given} needs track_commit_timestamp in the target, which is off",
            hint="ALTER SYSTEM SET track_commit_timestamp = on in the target and restart it, or use another rule",
        )
    may, role, version = await may_use_origins(run)
    if not may or without_origin:
        reason = f'role "{role}" may not use them' if not may else "none is free"
        hint = grant(role, version) if not may else "increase the target's limit of replication origins"
        return ConfigurationError(f"{given} needs replication origins in the target, but {reason}", hint=hint)
    return None
