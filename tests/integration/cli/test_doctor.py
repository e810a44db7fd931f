"""The support bundle has what helps, and neither a password nor a value of a row."""

from __future__ import annotations

import json
import stat
import zipfile
from pathlib import Path

from tests.support.database import Database
from tests.support.program import running, subscriber

PASSWORD = "pass-that-nobody-sees"
VALUE = "value-that-nobody-sees"


def test_support_bundle(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    """With a row that the target refuses, so that errors are in the status and the log."""
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY, name text); CREATE PUBLICATION p FOR ALL TABLES")
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, name text CHECK (length(name) < 3))")
    (tmp_path / "secret").write_text(f"{PASSWORD}\n")
    file, log = tmp_path / "subscriber.toml", tmp_path / "subscriber.log"
    file.write_text(f"""
log.file = "{log}"
log.level = "debug"
[targets.copy]
url = "env:TARGET"
[targets.other]
url = "postgresql://bob@nowhere/other"
password = "file:{tmp_path}/secret"
[subscriptions.app]
connection = {json.dumps(publisher18_db.conninfo(sslpassword=PASSWORD + "2"))}
publications = ["p"]
target = "copy"
""")
    env = {"TARGET": target_db.conninfo(sslpassword=f"{PASSWORD}3"), "PGPASSWORD": f"{PASSWORD}4"}
    bundle = tmp_path / "bundle.zip"
    with running("run", f"--config={file}", env=env):
        publisher18_db.wait("SELECT count(*) FROM pg_replication_slots WHERE active AND slot_name = 'app'", 1)
        target_db.wait("SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate = 'r'", 1)
        publisher18_db.execute(f"INSERT INTO t VALUES (1, '{VALUE}')")
        target_db.wait("SELECT count(*) > 0 FROM subscriber.pg_stat_subscription_stats WHERE apply_error_count > 0", True)
        done = subscriber("doctor", "app", f"--config={file}", f"--output={bundle}", env=env, loud=True)
    assert (done.status, "wrote" in done.errors) == (0, True), done.errors
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o600
    with zipfile.ZipFile(bundle) as archive:
        found = {name: archive.read(name).decode() for name in archive.namelist()}
    for name, text in found.items():
        assert PASSWORD not in text, name
        assert VALUE not in text, name
    expected = {
        "README.txt",
        "versions.json",
        "status.json",
        "definition.json",
        "publisher.json",
        "settings.json",
        "log.txt",
        "timings.json",
    }
    assert found.keys() == expected
    assert "violates check constraint" in found["status.json"] + found["log.txt"]
    publisher = json.loads(found["publisher.json"])
    assert publisher["slot"][0]["slot_name"] == "app"
    assert publisher["publications"][0]["tables"] == 1
    assert json.loads(found["settings.json"])["targets.other.password"] == {"value": "********", "source": f"secret {tmp_path}/secret"}
    assert all(each["error"] is None for each in json.loads(found["timings.json"]).values())
    # it is not overwritten; what cannot be read is noted
    again = subscriber("doctor", "app", f"--config={file}", f"--output={bundle}", env=env)
    assert (again.status, "File exists" in again.errors) == (1, True)
    nowhere = tmp_path / "nowhere.zip"
    away = subscriber("doctor", "app", "--target=host=127.0.0.1 port=1 password=hidden", f"--output={nowhere}", loud=True)
    assert (away.status, "not all could be read: status.json" in away.errors) == (0, True)
    assert "hidden" not in str(zipfile.ZipFile(nowhere).read("timings.json"))
