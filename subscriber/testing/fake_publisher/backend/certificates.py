"""A certificate for the fake publisher's TLS. Needs the package ``cryptography``."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from subscriber.errors import ConfigurationError

__all__ = ["server_context"]


def server_context(directory: Path) -> ssl.SSLContext:
    """Make a self-signed certificate for 127.0.0.1 and localhost. Clients verify it with ``sslrootcert=DIRECTORY/server.crt``.

    Args:
        directory: where ``server.crt`` and ``server.key`` are written.

    Raises:
        ConfigurationError: ``cryptography`` is not installed.
    """
    try:
        from cryptography import x509  # noqa: PLC0415 -- an extra
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError("TLS of the fake publisher needs the package cryptography", hint="pip install cryptography") from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = directory / "server.crt", directory / "server.key"
    certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.touch(mode=0o600)
    pem, private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key_file.write_bytes(key.private_bytes(pem, private, serialization.NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate_file, key_file)
    return context
