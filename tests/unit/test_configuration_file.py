"""The configuration file: what it says, and what it refuses, before anything is connected to."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from subscriber.cli import main
from subscriber.cli.service.configuration_file import load
from subscriber.cli.service.effective import effective
from subscriber.config import PARAMETERS, SETTINGS
from subscriber.config.file.configuration import Configuration, differences, parse_configuration
from subscriber.config.file.json_schema import json_schema
from subscriber.config.file.sections import APPLIER, LOG, PROGRAM, SUBSCRIPTION, TARGET
from subscriber.errors import ConfigurationError
from subscriber.redaction import redacted
from subscriber.subscription.configured import connection_of, options_of, settings_of, subscription_of, url_of

SUBSCRIPTION_TEXT = """
[subscriptions.app]
connection = "host=db1 dbname=app user=replicator"
publications = ["app", "Other"]
target = "copy"
"""
WHOLE = f"""
http = "127.0.0.1:9187"
log.format = "json"
[settings]
wal_receiver_timeout = "30s"
batch_rows = 1000
[targets.copy]
url = "postgresql://bob@db2/copy"
password = "env:COPY_PASSWORD"
{SUBSCRIPTION_TEXT}
password = "file:SECRET"
options.streaming = true
options.where.public.orders = "amount > 100"
options.where.'public."Items"' = "id < 3"
settings.batch_rows = 5
[targets.lake]
url = "spark:///lake"
applier.freshness = "10s"
applier.conf.spark.executor.memory = "2g"
"""
SECRETS = {"env:COPY_PASSWORD": "of the target", "file:SECRET": "of the publisher"}


def read(text: str, secrets: Mapping[str, str] = SECRETS) -> Configuration:
    return parse_configuration(text, secrets.__getitem__)


def test_a_file_says_what_the_command_line_would() -> None:
    found = read(WHOLE)
    app = found.subscriptions["app"]
    assert (found.http, found.log.format, found.log.level) == ("127.0.0.1:9187", "json", "notice")
    assert app.publications == ("app", "Other")
    assert options_of(app, {"binary": "on"}).row_filters == {("public", "orders"): "amount > 100", ("public", "Items"): "id < 3"}
    assert (options_of(app, {"binary": "on"}).binary, options_of(app, {}).streaming) == (True, "on")
    settings = settings_of({**app.settings, "batch_size": "1MB"})
    assert (settings.wal_receiver_timeout, settings.batch_rows, settings.batch_size) == (30.0, 5, 1024**2)
    assert "password='of the publisher'" in connection_of(app)
    assert "password='of the target'" in url_of(app.target) or "of%20the%20target" in url_of(app.target)
    assert found.targets["lake"].applier == {"freshness": "10s", "conf": {"spark.executor.memory": "2g"}}
    subscription_of(app, {}, {}, None)
    assert not [text for text in (repr(found), *found.given.values()) if "of the" in text]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[targets.copy\nurl = 1", r"not valid TOML: .*\(at line 1, column 14\)", "https://toml.io describes the format"),
        ("a = 1\na = 2\n", r"not valid TOML: Cannot overwrite a value \(at .*\)", None),
        ("x = " + "[" * 5000, "not valid TOML", None),
        ("htpp = '1'", 'unrecognized key "htpp"', 'did you mean "http"?'),
        ("[subscription.app]", 'unrecognized key "subscription"', 'did you mean "subscriptions"?'),
        ("log = 'json'", "log is not a table", r"write [log] and its keys below"),
        ("[log]\nformat = 'jsno'", 'log: unrecognized format value: "jsno"', "one of text, json"),
        ("[log]\nfile = true", "log.file requires a string", None),
        ("[settings]\nbatch_row = 1", 'settings: unrecognized configuration parameter "batch_row"', 'did you mean "batch_rows"?'),
        ("[settings]\nbatch_rows = 0", 'settings: 0 is outside the valid range for parameter "batch_rows"', None),
        ("[settings]\nbatch_rows = [1]", "settings.batch_rows requires one value", None),
        ("[settings]\nbatch_rows = 2020-01-01", "settings.batch_rows requires a string, a number or true or false", None),
        ('[settings]\nspool_directory = "a\\u0000b"', "settings.spool_directory has a null character", None),
        ("[targets.copy]\nulr = 'x'", 'targets.copy: unrecognized key "ulr"', 'did you mean "url"?'),
        ("[targets.copy]\nlauncher = true", "targets.copy has no url", None),
        ("[targets.copy]\nurl = 'postgresql:///x'\npassword = 'hidden'", "targets.copy.password holds the password itself", None),
        ("[targets.copy]\nurl = 'x:'\nlauncher = 'maybe'", "targets.copy: launcher requires a Boolean value", None),
        ("[targets.a]\nurl = 'x:'\napplier.engine = 'java'", 'targets.a.applier: unrecognized engine value: "java"', "one of local, spark"),
        ("[subscriptions]\napp = 1", "subscriptions.app is not a table", None),
        ("[subscriptions.app]\ntarget = 'x:'", "subscriptions.app has no connection", None),
        (SUBSCRIPTION_TEXT, 'subscriptions.app.target: there is no target "copy"', "add [targets.copy] with its url, or write a URL"),
        ("[targets.cop]\nurl = 'x:'" + SUBSCRIPTION_TEXT, 'subscriptions.app.target: there is no target "copy"', 'did you mean "cop"?'),
        (SUBSCRIPTION_TEXT + "options.colour = 1", 'subscriptions.app.options: unrecognized subscription parameter: "colour"', None),
        (SUBSCRIPTION_TEXT + "options.binry = 1", 'subscriptions.app.options: .*"binry"', 'did you mean "binary"?'),
        (SUBSCRIPTION_TEXT + "options.binary.x = 1", 'subscriptions.app.options: .*"binary.x"', None),
        (SUBSCRIPTION_TEXT + "options.where.orders = 'x'", "subscriptions.app.options: .*is not of the form schema.table", None),
        (SUBSCRIPTION_TEXT.replace('["app", "Other"]', '"app"'), "subscriptions.app.publications requires an array of strings", None),
        (SUBSCRIPTION_TEXT.replace('["app", "Other"]', "[]"), "subscriptions.app has no publications", None),
    ],
)
def test_what_a_file_must_not_say(text: str, message: str, hint: str | None) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read(text)
    assert re.match(message, str(refused.value)), str(refused.value)
    assert refused.value.hint
    assert hint is None or refused.value.hint == hint
    assert "hidden" not in refused.value.one_line()


def test_references_that_lead_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is one line that names file and key."""
    (tmp_path / "empty").touch()
    (tmp_path / "latin1").write_bytes(b"p\xe4ss")
    (tmp_path / "good").write_text(" a b \n")
    file = tmp_path / "subscriber.toml"

    def line_of(reference: str) -> str:
        file.write_text(f"[targets.copy]\nurl = 'postgresql:///copy'\npassword = '{reference}'\n")
        assert main(["config", "check", str(file)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"subscriber: {file}: targets.copy.password: ")
        return str(line)

    assert "the environment variable NO_SUCH_NAME is not set or empty" in line_of("env:NO_SUCH_NAME")
    assert "No such file or directory" in line_of(f"file:{tmp_path}/none")
    assert "Is a directory" in line_of(f"file:{tmp_path}")
    assert "is empty" in line_of(f"file:{tmp_path}/empty")
    assert "not UTF-8" in line_of(f"file:{tmp_path}/latin1")
    file.write_text(f"[targets.copy]\nurl = 'mariadb://bob@db/copy'\npassword = 'file:{tmp_path}/good'\n")
    assert url_of(load(str(file), {}).targets["copy"]) == "mariadb://bob:%20a%20b%20@db/copy"


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUBSCRIBER_CONFIG", raising=False)
    bad = tmp_path / "bad.toml"
    bad.write_text("a = \n")
    for arguments, message in (
        (["config", "check", f"{tmp_path}/none"], "No such file or directory"),
        (["run", f"--config={tmp_path}"], "Is a directory"),
        (["status", f"--config={bad}"], "at line 1, column 5"),
        (["check", f"--config={bad}"], "at line 1, column 5"),
        (["spark-apply", f"--config={bad}"], "at line 1, column 5"),
    ):
        assert main(arguments) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    # the exit status 1 would be WARNING
    assert main(["status", f"--config={bad}", "--check"]) == 3
    monkeypatch.setenv("SUBSCRIBER_CONFIG", str(bad))
    assert main(["run"]) == 1
    assert "at line 1, column 5" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["run", f"--config={bad}", "--target=sqlite:///x"])
    assert "--config and --target exclude each other" in capsys.readouterr().err


def test_each_declaration_is_a_key_and_part_of_the_schema() -> None:
    schema = json_schema()
    one = schema["properties"]["subscriptions"]["additionalProperties"]["properties"]
    target = schema["properties"]["targets"]["additionalProperties"]["properties"]
    for found, declared in (
        (schema["properties"], PROGRAM),
        (schema["properties"]["log"]["properties"], LOG),
        (schema["properties"]["settings"]["properties"], SETTINGS),
        (target, TARGET),
        (target["applier"]["properties"], APPLIER),
        (one, SUBSCRIPTION),
        (one["options"]["properties"], PARAMETERS),
        (one["settings"]["properties"], SETTINGS),
    ):
        assert declared.keys() <= found.keys()
        assert all(found[name]["description"] for name in declared)


def test_the_schema_accepts_what_the_reader_accepts() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    import tomllib

    jsonschema.validate(tomllib.loads(WHOLE), json_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tomllib.loads("htpp = 'x'"), json_schema())


def test_effective_values_have_their_sources() -> None:
    found = {row.key: (row.value, row.source) for row in effective(read(WHOLE), {"binary": "on"}, {"batch_size": "1MB"}, {"level": "info"})}
    app = "subscriptions.app"
    assert found["http"] == ("127.0.0.1:9187", "file")
    assert found["log.level"] == ("info", "command line")
    assert found["targets.copy.password"] == ("********", "environment COPY_PASSWORD")
    assert found[f"{app}.password"] == ("********", "secret SECRET")
    assert found[f"{app}.options.binary"] == ("on", "command line")
    assert found[f"{app}.options.where.public.orders"] == ("amount > 100", "file")
    assert found[f"{app}.options.origin"] == ("any", "default")
    assert found[f"{app}.settings.batch_rows"] == ("5", "file")
    assert found[f"{app}.settings.wal_receiver_timeout"] == ("30s", "file, settings")
    assert found[f"{app}.settings.batch_size"] == ("1MB", "command line")
    assert {key.rpartition(".")[2] for key in found if key.startswith(f"{app}.settings.")} == SETTINGS.keys()
    assert "of the" not in json.dumps(found)


def test_differences_name_keys_and_see_a_changed_secret() -> None:
    before = read(WHOLE)
    assert differences(before, read(WHOLE)) == []
    assert differences(before, read(WHOLE, {**SECRETS, "file:SECRET": "another"})) == ["subscriptions.app.password"]
    another = SUBSCRIPTION_TEXT.replace("subscriptions.app", "subscriptions.other")
    assert differences(before, read(WHOLE + another)) == ["subscriptions.other"]
    changed = WHOLE.replace("batch_rows = 5", "batch_rows = 6").replace('freshness = "10s"', "retain_hours = 3")
    expected = ["subscriptions.app.settings.batch_rows", "targets.lake.applier.freshness", "targets.lake.applier.retain_hours"]
    assert sorted(differences(before, read(changed))) == expected


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://bob:PW@db/x?sslmode=require",
        "postgresql://bob@db/x?password=PW&sslpassword=PW",
        "host=db password=PW user=bob",
        "host=db password = 'PW PW\\'PW'",
        "PGPASSWORD=PW",
        '{"password": "PW", "aws_secret_access_key": "PW"}',
        "mariadb+asyncmy://bob:P%40PW@[::1]:3306/x",
        "spark:///lake?AWS_SECRET_ACCESS_KEY=PW&account_key=PW",
    ],
)
def test_redaction(text: str) -> None:
    assert "PW" not in redacted(text).replace("PGPASSWORD", "")
    assert "PW" not in redacted("said PW", "PW")
    for kept in ("db", "bob", "require", "lake"):
        assert (kept in redacted(text)) == (kept in text)


def test_a_value_of_another_type_is_refused_as_such() -> None:
    values: list[Any] = ["{x = 1}", "[1]", "1979-05-27"]
    for value in values:
        with pytest.raises(ConfigurationError):
            read(f"http = {value}")
