"""Objects that are replaced, or go, while they are read: no store does that on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyarrow import fs

from subscriber.errors import TargetUnavailable
from subscriber.sinks.spark.files.file_errors import AccessDenied, StorageFull, store_error
from subscriber.sinks.spark.files.storage import Storage


class Opened:
    """As pyarrow reads an object of S3: its length is requested first, and so much is read then, even if the object has changed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        assert store.content is not None
        self._size = len(store.content)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def size(self) -> int:
        return self._size

    def read_at(self, count: int, offset: int) -> bytes:
        self._store.meanwhile(self._store)
        if not self._store.content:
            raise OSError("AWS Error")
        return self._store.content[offset : offset + count].ljust(count, b"\0")


class Store:
    """One object; ``meanwhile`` is called between the two questions."""

    def __init__(self, content: bytes, meanwhile: Callable[[Store], None]) -> None:
        self.content: bytes | None = content
        self.meanwhile = meanwhile

    def open_input_file(self, _name: str) -> Opened:
        if self.content is None:
            raise FileNotFoundError
        return Opened(self)

    def get_file_info(self, name: str) -> fs.FileInfo:
        if self.content is None:
            return fs.FileInfo(name, fs.FileType.NotFound)
        return fs.FileInfo(name, fs.FileType.File, size=len(self.content))


def read(store: Any) -> bytes | None:
    return Storage(store, None, "s3://bucket/lake").read("position.json")


@pytest.mark.parametrize("new", [b"a longer one", b"short", b"as long", b""])
def test_object_that_is_replaced_while_it_is_read(new: bytes) -> None:
    def replace(store: Store) -> None:
        store.content, store.meanwhile = new or None, lambda _: None

    assert read(Store(b"content", replace)) == (new or None)


def test_one_that_is_empty_for_a_moment() -> None:
    def restore(store: Store) -> None:
        store.content, store.meanwhile = b"there again", lambda _: None

    def empty(store: Store) -> None:
        store.content, store.meanwhile = b"", restore

    assert read(Store(b"content", empty)) == b"there again"


def test_one_that_never_rests_is_tried_again_later() -> None:
    def grow(store: Store) -> None:
        assert store.content is not None
        store.content += b"x"

    with pytest.raises(TargetUnavailable, match=r"cannot read or write s3://bucket/lake/position\.json"):
        read(Store(b"content", grow))


def test_an_error_of_the_store_is_one() -> None:
    def fail(_: Store) -> None:
        raise OSError("AWS Error")

    with pytest.raises(TargetUnavailable):
        read(Store(b"content", fail))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("When completing multiple part upload for key 'a': AWS Error UNKNOWN (HTTP status 507) during X operation: no", "no space left"),
        ("Generic S3 error: Error performing PUT http://h/b/a: 403 Forbidden: <Code>AccessDenied</Code>", "permission denied"),
        ("Generic S3 error: 400 Bad Request: <Code>XMinioStorageFull</Code>", "no space left"),
        ("AWS Error ACCESS_DENIED during HeadObject operation: No response body.", "permission denied"),
        ("google::cloud::Status(PERMISSION_DENIED: Permanent error)", "permission denied"),
        ("Generic LocalFileSystem error: Unable to open file /a: Permission denied (os error 13)", "permission denied"),
        ("Generic LocalFileSystem error: Unable to copy data to file /a: No space left on device (os error 28)", "no space left"),
        ("Generic LocalFileSystem error: Unable to copy data to file /a: File too large (os error 27)", "no space left"),
        ("google::cloud::Status(RESOURCE_EXHAUSTED: too many requests)", None),
        ("Generic S3 error: PUT http://h/b/a: 403 Forbidden: <Code>RequestTimeTooSkewed</Code>", "the clock is wrong"),
        ("When reading key 'a' in bucket 'b': AWS Error REQUEST_TIME_TOO_SKEWED during GetObject operation: no", "the clock is wrong"),
        ("AWS Error UNKNOWN (HTTP status 403) during PutObject operation: ExceptionName: RequestTimeTooSkewed", "the clock is wrong"),
        (
            "Generic MicrosoftAzure error: 403 Forbidden: <Code>AuthenticationFailed</Code>"
            "<AuthenticationErrorDetail>Request date header too old: 'Wed, 25 Nov 2026'</AuthenticationErrorDetail>",
            "the clock is wrong",
        ),
        ("When reading key 'AccessDenied/403' in bucket 'b': AWS Error NO_SUCH_BUCKET during GetObject operation", None),
    ],
)
def test_permissions_space_and_wrong_clocks_are_named(text: str, words: str | None) -> None:
    found = store_error("s3://b/a", text)
    assert isinstance(found, AccessDenied) is (words == "permission denied")
    assert isinstance(found, StorageFull) is (words == "no space left")
    assert not isinstance(found, TargetUnavailable)
    assert (found is None) is (words is None)
    assert words is None or f"s3://b/a: {words} (" in str(found)
