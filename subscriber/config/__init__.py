"""The options: the parameters of CREATE SUBSCRIPTION and the settings, each declared once.

:class:`SubscriptionOptions` holds the parameters of ``CREATE SUBSCRIPTION … WITH (…)`` with PostgreSQL's names and meanings.
:class:`Settings` holds settings that PostgreSQL keeps in ``postgresql.conf``, with the same names, and settings of our own. A field of
these classes declares one option with all its properties (:class:`Option`). The parser, ``--help``, the reference documentation, the
columns of the target's catalog and the error messages are derived from it. A new option is one field, plus the code that uses it.
"""

from subscriber.config.conflicts import RULES, ConflictRules, TableRules
from subscriber.config.option import Option, declared, reference
from subscriber.config.parameter_types import COPY_DATA_WORDS, NO_SLOT, CopyData, OnError, Streaming, SynchronousCommit, check_slot_name
from subscriber.config.parameters import ALTERABLE, KEYED, LIVE, PARAMETERS, STORED, SubscriptionOptions, parse_changes
from subscriber.config.reading import BOOLEAN, parse_assignments, parse_bytes, parse_seconds
from subscriber.config.settings import SETTINGS, SchemaChange, SchemaChangeCallback, Settings
from subscriber.config.suggestion import suggestion

__all__ = [
    "ALTERABLE",
    "BOOLEAN",
    "COPY_DATA_WORDS",
    "KEYED",
    "LIVE",
    "NO_SLOT",
    "PARAMETERS",
    "RULES",
    "SETTINGS",
    "STORED",
    "ConflictRules",
    "CopyData",
    "OnError",
    "Option",
    "SchemaChange",
    "SchemaChangeCallback",
    "Settings",
    "Streaming",
    "SubscriptionOptions",
    "SynchronousCommit",
    "TableRules",
    "check_slot_name",
    "declared",
    "parse_assignments",
    "parse_bytes",
    "parse_changes",
    "parse_seconds",
    "reference",
    "suggestion",
]
