"""Databases whose defaults are not those that a program would want: ALTER DATABASE SET of every setting that a session can make.

Sessions that were open before keep their settings. So a test looks at a hostile database through its own session.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import psycopg
from psycopg import sql

from tests.support.database import Database

LEFT_OUT: Mapping[str, str] = {
    "transaction_deferrable": "cannot be set for a database",
    "transaction_isolation": "cannot be set for a database",
    "transaction_read_only": "cannot be set for a database",
    "debug_discard_caches": "only debug builds have other values",
    "default_table_access_method": "there is only one",
    "default_tablespace": "says where tables are stored, which is for the administrator to decide",
    "temp_tablespaces": "says where files are stored",
    "dynamic_library_path": "without $libdir no session finds pgoutput",
    "output_plugin_libraries": "without pgoutput nothing can be decoded; 18.6 has it",
    "local_preload_libraries": "a library that is missing ends every session",
    "session_preload_libraries": "a library that is missing ends every session",
    "log_statement_stats": "excludes log_parser_stats, log_planner_stats and log_executor_stats",
}
"""Settings without another value that a server can work with, and why."""

CHOSEN: Mapping[str, tuple[str, str]] = {
    "DateStyle": ("SQL, DMY", "German"),
    "TimeZone": ("America/St_Johns", "Asia/Kathmandu"),
    "application_name": ("hostile", "x" * 63),
    "backtrace_functions": ("nothing", "errfinish"),
    "client_encoding": ("LATIN1", "SQL_ASCII"),
    "commit_delay": ("100", "10"),
    "createrole_self_grant": ("set, inherit", "set"),
    "default_text_search_config": ("pg_catalog.german", "pg_catalog.simple"),
    "extension_control_path": ("/nowhere", "/nowhere"),
    "extra_float_digits": ("-15", "0"),
    "gin_fuzzy_search_limit": ("1", "2"),
    "idle_in_transaction_session_timeout": ("2s", "3s"),
    "idle_session_timeout": ("2s", "3s"),
    "lock_timeout": ("2s", "3s"),
    "log_min_error_statement": ("panic", "fatal"),
    "log_min_messages": ("panic", "fatal"),
    "log_statement": ("ddl", "mod"),
    "max_stack_depth": ("1MB", "1500kB"),
    "restrict_nonsystem_relation_kind": ("view, foreign-table", "view"),
    "search_path": ("evil, pg_catalog", "evil, pg_catalog, public"),
    "statement_timeout": ("2s", "3s"),
    "timezone_abbreviations": ("India", "Australia"),
    "transaction_timeout": ("2s", "3s"),
    "vacuum_cost_delay": ("0.1", "0.2"),
    "wal_consistency_checking": ("heap", "btree"),
    "wal_sender_timeout": ("10s", "20s"),
}
"""Values of settings that are texts, or whose extreme values would only make a test slow. The second one is for the second variant."""

LOCALES = ("es_CL.UTF-8", "ar_KW.UTF-8", "is_IS.UTF-8")
"""Their currencies have two decimals after a comma, three decimals, and none."""
# the planner's settings decide how long a query takes, and not what it returns: without any join that is quick, those on the catalogs take
# minutes. Without sequential scans, a row filter uses an index of type gin
_SETTINGS = """
SELECT name, setting, vartype, enumvals, min_val, max_val FROM pg_settings
WHERE context IN ('user', 'superuser') AND (category NOT LIKE 'Query Tuning%' OR name = 'enable_seqscan') ORDER BY name
"""
_OF_LOCALE = ("lc_messages", "lc_monetary", "lc_numeric", "lc_time")

EVIL = """
CREATE SCHEMA evil;
CREATE FUNCTION evil.fail(anyelement, anyelement) RETURNS bool LANGUAGE plpgsql AS $$BEGIN RAISE 'evil'; END$$;
CREATE FUNCTION evil.lower(text) RETURNS text LANGUAGE plpgsql AS $$BEGIN RAISE 'evil'; END$$;
CREATE FUNCTION evil.fail4(int4, int4) RETURNS bool LANGUAGE sql AS 'SELECT evil.fail($1, $2)';
CREATE OPERATOR evil.= (LEFTARG = int4, RIGHTARG = int4, FUNCTION = evil.fail4);
CREATE FUNCTION evil.fail_text(text, text) RETURNS bool LANGUAGE sql AS 'SELECT evil.fail($1, $2)';
CREATE OPERATOR evil.= (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.fail_text)
"""
"""What a search_path can put before PostgreSQL's own functions and operators."""


def compile_locales(directory: Path) -> bool:
    """Make :data:`LOCALES` for servers that start with LOCPATH = this directory; False: the system has no sources of locales."""
    if shutil.which("localedef") is None or not Path("/usr/share/i18n/locales/es_CL").exists():
        return False
    directory.chmod(0o755)
    for name in LOCALES:
        language, _, _ = name.partition(".")
        # to compile the order of all letters would take seconds
        parts = {"CTYPE": "POSIX", "COLLATE": "POSIX", **dict.fromkeys(("MONETARY", "NUMERIC", "TIME", "MESSAGES"), language)}
        source = directory / f"source_{language}"
        source.write_text("".join(f'LC_{part}\ncopy "{origin}"\nEND LC_{part}\n' for part, origin in parts.items()))
        command = ["localedef", "-c", "--no-archive", "-i", str(source), "-f", "UTF-8", str(directory / name)]
        subprocess.run(command, check=False, capture_output=True)  # warnings give status 1
        assert (directory / name / "LC_MONETARY").exists()
    return True


def other_values(database: Database, variant: int = 0, locale: str | None = None) -> dict[str, str]:
    """Another value for every setting that a session can make.

    Args:
        database: of the server.
        variant: 0 or 1: which other value, if there are several.
        locale: for the settings that name one; None: ``C.UTF-8``.
    """
    rows = database.fetch(_SETTINGS)
    found = {}
    for name, now, kind, labels, least, most in rows:
        if name in LEFT_OUT:
            continue
        if name in CHOSEN:
            found[name] = CHOSEN[name][variant]
        elif name in _OF_LOCALE:
            found[name] = locale or "C.UTF-8"
        elif kind == "bool":
            found[name] = "off" if now == "on" else "on"
        elif kind == "enum":
            others = [label for label in labels if label != now]
            if others:
                found[name] = others[variant % len(others)]
        elif kind == "string":
            raise AssertionError(f"choose another value for {name}, which is {now!r}")
        else:
            others = [each for each in (least, most) if float(each) != float(now)]
            found[name] = others[variant % len(others)]
    return found


@contextlib.contextmanager
def hostile_defaults(database: Database, values: Mapping[str, str], only: Collection[str] | None = None) -> Iterator[None]:
    """While the block lasts, new sessions with the database get these defaults; ``only``: of these settings."""
    name = sql.Identifier(database.name)
    with psycopg.connect(database.server.dsn(), autocommit=True) as session:
        database.execute(EVIL)
        for setting, value in values.items():
            if only is None or setting in only:
                given = sql.SQL(value) if setting in {"search_path", "DateStyle"} else sql.Literal(value)
                session.execute(sql.SQL("ALTER DATABASE {} SET {} = {}").format(name, sql.Identifier(setting), given))
        try:
            yield
        finally:
            session.execute(sql.SQL("ALTER DATABASE {} RESET ALL").format(name))
