"""The run-time parameters of the fake publisher."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subscriber.testing.fake_publisher.backend.session import Session
    from subscriber.testing.fake_publisher.database import FakeDatabase

__all__ = ["parameters", "reported_parameters"]


def parameters(database: FakeDatabase, session: Session) -> dict[str, str]:
    """All parameters of a session, by their names in lower case."""
    defaults = {
        "wal_level": "logical",
        "server_version": database.version_text,
        "server_version_num": str(database.caps.server_version),
        "max_replication_slots": "1000",
        "max_wal_senders": "1000",
        "block_size": "8192",
        "wal_block_size": "8192",
        "wal_segment_size": "16MB",
        "data_directory_mode": "0700",
        "search_path": '"$user", public',
        "transaction_isolation": "read committed",
        "statement_timeout": "0",
        "lock_timeout": "0",
        "idle_in_transaction_session_timeout": "0",
        "wal_sender_timeout": "1min",
        "jit": "on",
        "row_security": "on",
        "bytea_output": "hex",
        "extra_float_digits": "1",
        "logical_decoding_work_mem": f"{database.logical_decoding_work_mem // 1024}kB",
        "debug_logical_replication_streaming": "buffered",
    }
    if database.caps.at_least(19):
        defaults["wal_level"] = "replica"
        defaults["effective_wal_level"] = "logical" if database.slots else "replica"
        defaults["output_plugin_libraries"] = "pgoutput, test_decoding"
    if database.caps.at_least(14):
        defaults["idle_session_timeout"] = "0"
    if database.caps.at_least(17):
        defaults["transaction_timeout"] = "0"
    reported = {name.lower(): value for name, value in reported_parameters(database, session).items()}
    return defaults | reported | database.settings | session.parameters


def reported_parameters(database: FakeDatabase, session: Session) -> dict[str, str]:
    """The parameters that a server reports at the start of a session."""
    return {
        "server_version": database.version_text,
        "server_encoding": "UTF8",
        "client_encoding": "UTF8",
        "application_name": session.application_name,
        "is_superuser": "on",
        "session_authorization": session.user,
        "DateStyle": "ISO, MDY",
        "IntervalStyle": "postgres",
        "TimeZone": "UTC",
        "integer_datetimes": "on",
        "standard_conforming_strings": "on",
        **({"in_hot_standby": "off", "default_transaction_read_only": "off"} if database.caps.at_least(14) else {}),
    }
