"""A publisher for tests: a walsender inside the test process, on a socket, without PostgreSQL.

::

    async with FakePublisher() as publisher:
        publisher.create_table("accounts", {"id": "int", "balance": "numeric"}, key=["id"])
        publisher.create_publication("app", "accounts")
        async with publisher.transaction() as t:
            t.insert("accounts", id=1, balance="12.50")

Clients connect with ``publisher.dsn()``.
"""

from subscriber.testing.fake_publisher.faults import Fault, FaultKind
from subscriber.testing.fake_publisher.publisher import FakePublisher
from subscriber.testing.fake_publisher.server_errors import FeedbackViolation
from subscriber.testing.fake_publisher.transactions import FakeTransaction

__all__ = ["FakePublisher", "FakeTransaction", "Fault", "FaultKind", "FeedbackViolation"]
