"""Authentication: trust, or SCRAM-SHA-256 with a password.

Source: RFC 5802, RFC 7677; PostgreSQL manual, SASL Authentication.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from typing import TYPE_CHECKING, Final

from subscriber.testing.fake_publisher.backend import wire
from subscriber.testing.fake_publisher.server_errors import ServerError

if TYPE_CHECKING:
    from subscriber.testing.fake_publisher.backend.session import Session

__all__ = ["authenticate"]

_MECHANISM: Final = "SCRAM-SHA-256"
_ITERATIONS: Final = 4096


async def authenticate(session: Session, password: str | None) -> None:
    """Let the client prove that it knows the password. Without one everybody is trusted.

    Raises:
        ServerError: it does not.
    """
    if password is None:
        return
    session.write(wire.authentication(10, _MECHANISM.encode() + b"\0\0"))
    await session.drain()
    first = wire.Reader(await _password_message(session))
    mechanism = first.string()
    if mechanism != _MECHANISM:
        raise ServerError("08P01", "client selected an invalid SASL authentication mechanism", fatal=True)
    client_first = first.taken(first.int32()).decode()
    flag, _, bare = client_first.split(",", 2)
    if flag not in {"n", "y"}:
        raise ServerError("08P01", "malformed SCRAM message", detail="Channel binding is not offered.", fatal=True)
    client_nonce = _attribute(bare, "r")
    nonce = client_nonce + base64.b64encode(os.urandom(18)).decode()
    salt = os.urandom(16)
    server_first = f"r={nonce},s={base64.b64encode(salt).decode()},i={_ITERATIONS}"
    session.write(wire.authentication(11, server_first.encode()))
    await session.drain()
    client_final = (await _password_message(session)).decode()
    without_proof, _, proof = client_final.rpartition(",p=")
    signed = f"{bare},{server_first},{without_proof}".encode()
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, _ITERATIONS)
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    signature = hmac.digest(hashlib.sha256(client_key).digest(), signed, "sha256")
    expected = bytes(one ^ other for one, other in zip(client_key, signature, strict=True))
    if _attribute(without_proof, "r") != nonce or not hmac.compare_digest(base64.b64decode(proof), expected):
        raise ServerError("28P01", f'password authentication failed for user "{session.user}"', fatal=True)
    server_signature = hmac.digest(hmac.digest(salted, b"Server Key", "sha256"), signed, "sha256")
    session.write(wire.authentication(12, b"v=" + base64.b64encode(server_signature)))


async def _password_message(session: Session) -> bytes:
    tag, body = await session.read_message()
    if tag != b"p":
        raise ServerError("08P01", f"expected SASL response, got message type {tag[0]}", fatal=True)
    return body


def _attribute(text: str, name: str) -> str:
    for part in text.split(","):
        if part.startswith(f"{name}="):
            return part[2:]
    raise ServerError("08P01", "malformed SCRAM message", detail=f'Expected attribute "{name}".', fatal=True)
