"""The settings of every session that reads from the publisher."""

from __future__ import annotations

from typing import Final

__all__ = ["READING_SETUP"]

READING_SETUP: Final = (
    "SELECT pg_catalog.set_config('search_path', '', false)",
    """SELECT pg_catalog.set_config(s.name, v.setting, false)
  FROM (VALUES ('DateStyle', 'ISO'), ('IntervalStyle', 'postgres'), ('extra_float_digits', '3'), ('TimeZone', 'UTC'),
               ('bytea_output', 'hex'), ('statement_timeout', '0'), ('lock_timeout', '0'), ('idle_in_transaction_session_timeout', '0'),
               ('idle_session_timeout', '0'), ('transaction_timeout', '0'), ('jit', 'off')) AS v (name, setting)
  JOIN pg_catalog.pg_settings AS s ON s.name = v.name""",
)
