"""What differs between two databases themselves."""

from __future__ import annotations

from collections.abc import Sequence

from subscriber.schema.database_properties import DatabaseProperties, database_changes

NOTHING = DatabaseProperties(name="copy", comment=None, limit=-1, granted=False, closed=False, roles={"app", "new"})


def test_settings_are_quoted_as_the_server_stores_them() -> None:
    publisher = DatabaseProperties(
        name="old",
        comment=None,
        limit=-1,
        granted=False,
        closed=False,
        settings={
            ("", "search_path"): '"$user", "A ""b", public',
            ("", "DateStyle"): "ISO, DMY",
            ("app", 'my.x"y'): "it's",
            ("old", "work_mem"): "1",
            ("gone", "work_mem"): "1",
            ("", "temp_tablespaces"): '""',
        },
        roles={"app", "old", "gone"},
    )
    found = database_changes(publisher, NOTHING, {"old": "new"})
    assert [change.difference.ddl for change in found] == [
        (),
        ("ALTER DATABASE \"copy\" SET \"search_path\" TO '$user', 'A \"b', 'public';",),
        ('ALTER DATABASE "copy" SET "DateStyle" TO \'ISO, DMY\';',),
        ('ALTER ROLE "app" IN DATABASE "copy" SET "my.x""y" TO \'it\'\'s\';',),
        ('ALTER ROLE "new" IN DATABASE "copy" SET "work_mem" TO \'1\';',),
        ('ALTER DATABASE "copy" SET "temp_tablespaces" TO \'\';',),
    ]
    assert [change.moves for change in found] == [False, True, True, True, True, True]
    assert "it's" not in found[3].difference.message
    there = DatabaseProperties(
        name="copy",
        comment=None,
        limit=-1,
        granted=False,
        closed=False,
        settings={("", "search_path"): '"$user",  "A ""b" , public', ("", "DateStyle"): "SQL, DMY", ("", "temp_tablespaces"): ""},
        roles=NOTHING.roles,
    )
    (missing, style, *_) = database_changes(publisher, there, {"old": "new"})
    assert missing.difference.message.startswith('role "gone" does not exist in the target')
    assert (style.moves, style.difference.message) == (
        False,
        'DateStyle is "SQL, DMY" for the target\'s database, and "ISO, DMY" for the publisher\'s',
    )


def test_libraries_are_named_and_not_moved() -> None:
    # the bug was that every session of the new database ended at its start
    settings = {("", "session_preload_libraries"): "auto_explain", ("app", "local_preload_libraries"): "mine"}
    publisher = DatabaseProperties(name="old", comment=None, limit=-1, granted=False, closed=False, settings=settings, roles=NOTHING.roles)
    found = database_changes(publisher, NOTHING)
    assert [change.moves for change in found] == [False, False]
    assert all("it is not moved, because no session can begin if the library is missing" in each.difference.message for each in found)


def test_what_the_target_has_is_left() -> None:
    publisher = DatabaseProperties(name="old", comment="a", limit=0, granted=True, closed=False, grants={("app", "CONNECT"): True})
    target = DatabaseProperties(
        name="copy", comment="b", limit=-1, granted=True, closed=False, grants={("", "CONNECT"): False}, roles=NOTHING.roles
    )
    found = {change.difference.ddl[0]: change.moves for change in database_changes(publisher, target)}
    assert found == {
        'GRANT CONNECT ON DATABASE "copy" TO "app" WITH GRANT OPTION;': True,
        'REVOKE CONNECT ON DATABASE "copy" FROM PUBLIC;': False,
        "COMMENT ON DATABASE \"copy\" IS 'a';": False,
        'ALTER DATABASE "copy" CONNECTION LIMIT 0;': False,
    }
    # a cutover has closed it
    closed = DatabaseProperties(name="copy", comment="a", limit=0, granted=True, closed=True)
    assert database_changes(publisher, closed) == []


def test_owner() -> None:
    def changes(target: str, *roles: str) -> list[tuple[str, Sequence[str], bool, bool]]:
        old = DatabaseProperties(name="old", comment=None, limit=-1, granted=False, closed=False, owner="app", user="mover")
        new = DatabaseProperties(name="new", comment=None, limit=-1, granted=False, closed=False, owner=target, user="mover", roles=roles)
        found = database_changes(old, new, {"app": "shop"} if "shop" in roles else {})
        return [(each.difference.message, each.difference.ddl, each.moves, each.privilege) for each in found]

    assert changes("app", "app", "mover") == changes("shop", "shop", "mover") == []
    assert changes("mover", "mover") == [('role "app" does not exist in the target: it does not own the database there', (), False, False)]
    message = 'the target\'s database belongs to role "{}", and the publisher\'s to "app"'.format
    assert changes("mover", "app", "mover") == [(message("mover"), ('ALTER DATABASE "new" OWNER TO "app";',), True, True)]
    assert changes("mover", "shop", "mover") == [(message("mover"), ('ALTER DATABASE "new" OWNER TO "shop";',), True, True)]
    assert changes("other", "app", "mover") == [(message("other"), ('ALTER DATABASE "new" OWNER TO "app";',), False, True)]
