"""Parameters as CREATE SUBSCRIPTION and postgresql.conf read them."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber.config import (
    NO_SLOT,
    CopyData,
    OnError,
    Settings,
    SubscriptionOptions,
    declared,
    parse_assignments,
    parse_bytes,
    parse_changes,
    parse_seconds,
)
from subscriber.config.conflicts import CONFLICT
from subscriber.config.reading import parse_bool
from subscriber.config.where import WHERE
from subscriber.errors import ConfigurationError

DEFAULT = SubscriptionOptions()
TRUE = ["true", "tru", "t", "TRUE", "yes", "y", "on", "1", " on "]
FALSE = ["false", "f", "FALSE", "no", "n", "off", "of", "0"]


def refused(*items: str) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        SubscriptionOptions.parse(items)
    return caught.value


# --- the parameters of CREATE SUBSCRIPTION


def test_options_and_settings_that_are_mixed_up() -> None:
    with pytest.raises(ConfigurationError, match='parameter "max_copy_rate"') as caught:
        Settings.parse(["max_copy_rate=1MB/s"])
    assert str(caught.value.hint).startswith("it is an option: -o max_copy_rate=…")
    assert str(refused("batch_rows=7").hint).startswith("it is a setting: -c batch_rows=…")
    with pytest.raises(ConfigurationError) as caught:
        parse_changes(["enabled=true"])
    assert str(caught.value.hint).startswith("one of ")


def test_defaults_are_natives() -> None:
    assert SubscriptionOptions.parse([]) == DEFAULT
    # CREATE SUBSCRIPTION of PostgreSQL 18; password_required says in its docstring why it differs
    assert {field.name: getattr(DEFAULT, field.name) for field in fields(DEFAULT)} == {
        "connect": True,
        "create_slot": True,
        "enabled": True,
        "slot_name": None,
        "binary": False,
        "copy_data": True,
        "streaming": "parallel",
        "synchronous_commit": "off",
        "two_phase": False,
        "disable_on_error": False,
        "password_required": False,
        "run_as_owner": False,
        "origin": "any",
        "failover": False,
        # of 19
        "wal_receiver_timeout": -1.0,
        "retain_dead_tuples": False,
        # ours
        "on_error": "retry",
        "park_after": 3,
        "park_retry": 0.0,
        "max_copy_rate": 0.0,
        "max_apply_rate": 0.0,
        "copy_window": "",
        "where": "",
        "conflict": "",
        "conflict_log": "",
        "conflict_log_rows": False,
        "conflict_log_retention": 30 * 86400.0,
        "map": "",
        "columns": "",
        "rename": "",
        "exclude_table": "",
    }


def test_rules_for_conflicts() -> None:
    given = ["CONFLICT.Insert_exists=Apply_Remote", 'conflict.update_missing.Public."T.x"= insert ', "conflict.insert_exists.s.t=error"]
    options = SubscriptionOptions.parse(given)
    rules = options.conflict_rules
    assert SubscriptionOptions.parse([f"conflict={options.conflict}"]) == options
    assert (rules.of("s", "t").changed, rules.of("public", "u").changed) == ((), ("insert_exists",))
    assert rules.of("public", "T.x").changed == ("insert_exists", "update_missing")
    assert (rules.kinds("by_origin"), rules.uses("insert_exists")) == ((), {"apply_remote", "error"})
    fewer = {"insert_exists": "", "insert_exists.s.t": "", "UPDATE_MISSING.public.n": "skip"}
    assert (
        CONFLICT.changed(str(options.conflict), fewer) == '{"update_missing.public.\\"T.x\\"": "insert", "update_missing.public.n": "skip"}'
    )
    assert SubscriptionOptions(conflict={"insert_exists": " "}) == DEFAULT
    # a table has its name on the publisher here, and its name in the target for the sink
    mapped = SubscriptionOptions(conflict={"insert_exists.s.t": "keep_local"}, map={"s.*": "other.*"}).conflict_rules
    assert (mapped.of("other", "t").changed, mapped.of("s", "t").changed) == (("insert_exists",), ())
    for text, message, hint in (
        ("conflict.insert_exist=error", 'unrecognized conflict: "insert_exist"', "did you mean insert_exists? "),
        ("conflict.s.t.insert_exists=error", 'unrecognized conflict: "s"', "the table follows the kind: conflict.insert_exists.s.t=…"),
        ("conflict.update_missing=isnert", 'unrecognized rule for conflict update_missing: "isnert"', "did you mean insert? "),
        (
            "conflict.update_missing=apply_remote",
            'unrecognized rule for conflict update_missing: "apply_remote"',
            "one of skip, insert, error",
        ),
        ("conflict.update_missing.t=skip", '"t" is not of the form schema.table', "as in conflict.update_missing.public.orders=error"),
        ("conflict=apply_remote", "conflict requires the kind of the conflict", "as in conflict.insert_exists=apply_remote"),
    ):
        error = refused(text)
        assert str(error) == message
        assert str(error.hint).startswith(hint)
    with pytest.raises(ConfigurationError, match=r"conflict\.insert_exists is not a text"):
        SubscriptionOptions(conflict={"insert_exists": None})  # type: ignore[dict-item]
    assert "longer than 4000" in str(refused(*(f"conflict.insert_exists.s.{'t' * 40}{n}=error" for n in range(99))))


def test_on_error_and_its_name_in_postgresql() -> None:
    words: dict[str, OnError] = {"true": "disable", "false": "retry"}
    for text, on_error in words.items():
        assert SubscriptionOptions.parse([f"disable_on_error={text}"]) == SubscriptionOptions(on_error=on_error)
        assert parse_changes([f"disable_on_error={text}"]) == {"on_error": on_error}
    disabling = SubscriptionOptions(disable_on_error=True)
    assert disabling == SubscriptionOptions(on_error="disable") == replace(disabling, copy_data=True)
    assert disabling.disable_on_error
    assert not any(each.disable_on_error for each in (DEFAULT, SubscriptionOptions(on_error="park")))
    both = "disable_on_error=true", "on_error=park"
    assert str(refused(*both)) == 'conflicting or redundant options: "disable_on_error" and "on_error" are given'
    with pytest.raises(ConfigurationError, match="mutually exclusive"):
        SubscriptionOptions(disable_on_error=True, on_error="park")
    assert str(refused("on_error=stop")) == 'unrecognized on_error value: "stop"'
    assert "outside the valid range" in str(refused("park_after=0"))
    assert SubscriptionOptions.parse(["park_retry=10min", "park_after=1"]) == SubscriptionOptions(park_retry=600, park_after=1)


def test_parameters_of_19() -> None:
    assert SubscriptionOptions.parse(["wal_receiver_timeout=30s"]).wal_receiver_timeout == 30
    assert SubscriptionOptions.parse(["wal_receiver_timeout=-1", "retain_dead_tuples=off"]) == DEFAULT
    assert str(refused("wal_receiver_timeout=-5")) == 'invalid value for parameter "wal_receiver_timeout": "-5"'
    assert "outside the valid range" in str(refused("wal_receiver_timeout=99999999min"))
    assert "retain_dead_tuples = true is not supported" in str(refused("retain_dead_tuples=on"))


def test_row_filters() -> None:
    given = ["WHERE.Public.orders=amount > 5", 'where."My Schema"."T.x"= name = \'a=b\' ']
    options = SubscriptionOptions.parse(given)
    assert options.row_filters == {("public", "orders"): "amount > 5", ("My Schema", "T.x"): "name = 'a=b'"}
    assert options == SubscriptionOptions(where={'"My Schema"."T.x"': "name = 'a=b'", "PUBLIC.orders": "amount > 5"})
    assert SubscriptionOptions.parse([f"where={options.where}"]) == options
    assert WHERE.changed(str(options.where), {"public.orders": "", "public.n": "n = 1"}) == (
        SubscriptionOptions(where={'"My Schema"."T.x"': "name = 'a=b'", "public.n": "n = 1"}).where
    )
    assert SubscriptionOptions(where={"public.orders": " "}) == DEFAULT
    assert str(refused("where.orders=a > 1")) == '"orders" is not of the form schema.table'
    assert str(refused("where=a > 1")) == "where requires the name of a table"
    assert str(refused(f"where.s.t={'a' * 4000}")) == "the row filters are longer than 4000 characters"
    assert str(refused("where.s.t=a > 1", "where.s.t=a > 2")) == 'conflicting or redundant options: "where.s.t" is given twice'
    assert str(refused("where.s.t=a > 1", "where={}")) == 'conflicting or redundant options: "where" is given twice'


@pytest.mark.parametrize(
    "name",
    ["create_slot", "enabled", "binary", "two_phase", "disable_on_error", "password_required", "run_as_owner", "failover"],
)
def test_boolean_parameters(name: str) -> None:
    assert getattr(SubscriptionOptions.parse([f"{name}=on"]), name) is True
    assert getattr(SubscriptionOptions.parse([f" {name.upper()} = off "]), name) is False
    assert str(refused(f"{name}=maybe")) == f"{name} requires a Boolean value"


@pytest.mark.parametrize(("text", "value"), [("on", True), ("false", False), ("reconcile", "reconcile"), (" Reconcile ", "reconcile")])
def test_copy_data(text: str, value: CopyData) -> None:
    assert SubscriptionOptions.parse([f"copy_data={text}"]).copy_data == value
    assert str(refused("copy_data=maybe")) == 'copy_data requires a Boolean value or "reconcile"'
    assert str(refused("connect=false", "copy_data=reconcile")).startswith("connect = false and copy_data = reconcile are mutually")


@pytest.mark.parametrize("text", TRUE)
def test_texts_for_true(text: str) -> None:
    assert parse_bool("binary", text) is True


@pytest.mark.parametrize("text", FALSE)
def test_texts_for_false(text: str) -> None:
    assert parse_bool("binary", text) is False


@pytest.mark.parametrize("text", ["", " ", "o", "2", "truer", "offf", "none", "null", "01"])
def test_no_boolean(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^binary requires a Boolean value$"):
        parse_bool("binary", text)


@pytest.mark.parametrize(
    ("text", "expected"), [("on", "on"), ("off", "off"), ("parallel", "parallel"), ("Parallel", "parallel"), ("0", "off")]
)
def test_streaming(text: str, expected: str) -> None:
    assert SubscriptionOptions.parse([f"streaming={text}"]).streaming == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("on", "on"), ("off", "off"), ("local", "local"), ("REMOTE_WRITE", "remote_write"), ("remote_apply", "remote_apply"), ("yes", "on")],
)
def test_synchronous_commit(text: str, expected: str) -> None:
    assert SubscriptionOptions.parse([f"synchronous_commit={text}"]).synchronous_commit == expected


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("streaming=serial", 'streaming requires a Boolean value or "parallel"'),
        ("synchronous_commit=later", 'invalid value for parameter "synchronous_commit": "later"'),
        ("origin=local", 'unrecognized origin value: "local"'),
        ("colour=red", 'unrecognized subscription parameter: "colour"'),
        ("binary", '"binary" is not of the form parameter=value'),
        ("=on", '"=on" is not of the form parameter=value'),
    ],
)
def test_native_words(item: str, message: str) -> None:
    assert str(refused(item)) == message


def test_twice_is_an_error() -> None:
    assert str(refused("binary=on", "Binary=on")).startswith("conflicting or redundant options")


@pytest.mark.parametrize("text", ["a", "slot_1", "x" * 63, "0"])
def test_slot_names(text: str) -> None:
    assert SubscriptionOptions.parse([f"slot_name={text}"]).slot_name == text


@pytest.mark.parametrize("text", ["", "Slot", "my-slot", "x" * 64, "slöt", "a b"])
def test_no_slot_names(text: str) -> None:
    error = refused(f"slot_name={text}")
    assert f'replication slot name "{text}"' in str(error)
    assert str(error.hint).startswith("Replication slot names may only contain lower case letters, numbers, and the underscore character.")


@pytest.mark.parametrize("conflicting", ["enabled", "create_slot", "copy_data"])
def test_connect_false(conflicting: str) -> None:
    assert (
        str(refused("connect=false", f"{conflicting}=true")) == f"connect = false and {conflicting} = true are mutually exclusive options"
    )
    options = SubscriptionOptions.parse(["connect=false", f"{conflicting}=false"])
    assert (options.enabled, options.create_slot, options.copy_data) == (False, False, False)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["slot_name=NONE"], "subscription with slot_name = NONE must also set enabled = false"),
        (["slot_name=none", "enabled=true"], "slot_name = NONE and enabled = true are mutually exclusive options"),
        (["slot_name=none", "enabled=false"], "subscription with slot_name = NONE must also set create_slot = false"),
        (["slot_name=none", "enabled=off", "create_slot=on"], "slot_name = NONE and create_slot = true are mutually exclusive options"),
    ],
)
def test_slot_name_none(items: list[str], message: str) -> None:
    assert str(refused(*items)) == message


def test_slot_name_none_where_it_is_allowed() -> None:
    for items in (["slot_name=NONE", "enabled=false", "create_slot=false"], ["slot_name=NONE", "connect=false"]):
        options = SubscriptionOptions.parse(items)
        assert options.slot_name == NO_SLOT
        assert not options.enabled
        assert not options.create_slot


def test_case_matters_where_names_are_not_postgresqls() -> None:
    items = ["spark.executorEnv.PGPASSFILE = /etc/passfile", "spark.driver.extraJavaOptions=-Da=b"]
    expected = {"spark.executorEnv.PGPASSFILE": "/etc/passfile", "spark.driver.extraJavaOptions": "-Da=b"}
    assert parse_assignments(items, case_matters=True) == expected
    assert set(parse_assignments(["Copy_Data=false"])) == {"copy_data"}


@given(st.lists(st.text(max_size=20), max_size=4))
def test_any_text_is_understood_or_refused(items: list[str]) -> None:
    for parse in (SubscriptionOptions.parse, Settings.parse, parse_assignments):
        try:
            parse(items)
        except ConfigurationError as error:
            lines = error.one_line().splitlines()
        else:
            lines = ["understood"]
        assert len(lines) == 1


# --- settings


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10", 0.01), ("10s", 10), (" 500 ms ", 0.5), ("1min", 60), ("2h", 7200), ("1d", 86400), ("1.5s", 1.5), ("250us", 0.00025)],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds("wal_receiver_timeout", text) == pytest.approx(seconds)


def test_a_time_with_another_base_unit() -> None:
    assert parse_seconds("wal_receiver_status_interval", "10", "s") == 10
    assert Settings.parse(["wal_receiver_status_interval=10"]).wal_receiver_status_interval == 10
    assert Settings.parse(["wal_receiver_timeout=10"]).wal_receiver_timeout == pytest.approx(0.01)


@pytest.mark.parametrize(("text", "size"), [("64", 65536), ("64kB", 65536), ("1MB", 1048576), ("8192B", 8192), ("1.5 GB", 1610612736)])
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes("batch_size", text) == size


@pytest.mark.parametrize("text", ["", "s", "-1s", "10 parsecs", "1e3", "10MB", "0x10", "10 s s", "١٠"])
def test_no_times(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r'^invalid value for parameter "wal_receiver_timeout": '):
        Settings.parse([f"wal_receiver_timeout={text}"])


@pytest.mark.parametrize("text", ["64mb", "64 KB", "10s", "many", "-5kB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r'^invalid value for parameter "batch_size": '):
        Settings.parse([f"batch_size={text}"])


@pytest.mark.parametrize("text", ["", "1.5", "-1", "two", "1k"])
def test_no_numbers(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r'^invalid value for parameter "batch_rows": '):
        Settings.parse([f"batch_rows={text}"])


@pytest.mark.parametrize(
    ("item", "value", "valid"),
    [
        ("wal_retrieve_retry_interval=0", "0", "1ms to 2147483647ms"),
        ("wal_retrieve_retry_interval=0.5ms", "0.5ms", "1ms to 2147483647ms"),
        ("wal_receiver_status_interval=4000000000", "4000000000s", "0 to 2147483s"),
        ("wal_receiver_timeout=4000000000", "4000000s", "0 to 2147483647ms"),
        ("max_sync_workers_per_subscription=0", "0", "1 to 262143"),
        ("max_parallel_apply_workers_per_subscription=1025", "1025", "0 to 1024"),
        ("apply_workers=0", "0", "1 to 64"),
        ("max_copy_workers_per_table=4000000000", "4000000000", "1 to 262143"),
        ("copy_range_size=1kB", "1kB", "64kB to 2147483647kB"),
        ("logical_decoding_work_mem=4000000000", "3906250MB", "64kB to 2147483647kB"),
        ("batch_rows=4000000000", "4000000000", "1 to 2147483647"),
        ("batch_size=1B", "1B", "1kB to 2147483647kB"),
    ],
)
def test_out_of_range(item: str, value: str, valid: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Settings.parse([item])
    assert str(caught.value) == f'{value} is outside the valid range for parameter "{item.partition("=")[0]}"'
    assert caught.value.hint == f"a value from {valid}"


@pytest.mark.parametrize("settings", [Settings, SubscriptionOptions])
def test_every_number_has_a_range(settings: type) -> None:
    numbers = [each for each in declared(settings).values() if type(each.default) in {int, float}]
    assert all(each.least is not None and each.type.most is not None for each in numbers)


@pytest.mark.parametrize("name", ["wal_receiver_timeout", "batch_size"])
def test_a_number_that_no_machine_has(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f'^invalid value for parameter "{name}": '):
        Settings.parse([f"{name}={'9' * 400}"])


def test_the_range_holds_for_the_library_too() -> None:
    with pytest.raises(ConfigurationError, match='for parameter "batch_delay"'):
        Settings(batch_delay=-1)
    assert Settings(wal_receiver_timeout=0, wal_receiver_status_interval=0).wal_receiver_timeout == 0


def test_settings_by_name() -> None:
    assert Settings.parse(["spool_directory=/var/tmp/Spool", "batch_delay=20ms", "batch_rows=5"]) == Settings(
        spool_directory="/var/tmp/Spool", batch_delay=0.02, batch_rows=5
    )
    with pytest.raises(ConfigurationError, match=r'^unrecognized configuration parameter "work_mem"$'):
        Settings.parse(["work_mem=1MB"])
    with pytest.raises(ConfigurationError, match=r'^unrecognized schema_change value: "drop"$') as caught:
        Settings.parse(["schema_change=drop"])
    assert caught.value.hint == "one of error, add, follow, ignore"


@pytest.mark.parametrize("field", [field.name for field in fields(Settings)])
def test_every_setting_can_be_given_as_text(field: str) -> None:
    value = getattr(Settings(), field)
    words = {
        "spool_directory": "/tmp/x",
        "relay_log": "/tmp/y",
        "create_tables": "on",
        "schema_change": "ignore",
        "new_tables": "copy",
        "dropped_columns": "drop",
    }
    text = words.get(field) or (f"{value}B" if "size" in field or "mem" in field else None)
    if text is None:
        text = str(value) if isinstance(value, int) else f"{value}s"
    expected = True if text == "on" else words.get(field, value)
    assert getattr(Settings.parse([f"{field}={text}"]), field) == expected
