"""TLS certificates and keys, loaded from one read of each file."""

from __future__ import annotations

import contextlib
import os
import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from agentd.tomlfile.regular_files import RegularFile, UnusableFile, read_regular

_FIRST = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_UTC_TIME, _VERSION = 0x17, 0xA0
_LONG, _CENTURY = 0x80, 50
"""DER: the flag of a long length; UTCTime: the first two-digit year of the 20th century."""


class Validity(NamedTuple):
    """The validity period of a certificate, in seconds since the epoch."""

    not_before: float
    not_after: float


class Certificate(NamedTuple):
    """A certificate: its TLS context, its validity and the mode of its key file."""

    context: ssl.SSLContext
    validity: Validity | None
    key_mode: int


def read_certificate(cert: Path, key: Path) -> Certificate:
    """Read a certificate chain and its key.

    Raises:
        UnusableFile: a file cannot be read, or the key does not fit the certificate.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    chain, secret = load_chain(context, cert, key)
    return Certificate(context, validity_of(chain.content), secret.mode)


def load_chain(context: ssl.SSLContext, cert: Path, key: Path) -> tuple[RegularFile, RegularFile]:
    """Load a certificate chain and its key into a context, and return both files.

    Raises:
        UnusableFile: a file cannot be read, or the key does not fit the certificate.
    """
    chain, secret = read_named(cert), read_named(key)
    try:
        with _in_memory(chain.content) as first, _in_memory(secret.content) as second:
            # Without a password OpenSSL would ask for one at the terminal.
            context.load_cert_chain(first, second, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        raise UnusableFile(f"{cert} and {key} cannot be used: {error}") from None
    return chain, secret


def read_named(path: Path) -> RegularFile:
    """Read a file; errors contain its path.

    Raises:
        UnusableFile: the file cannot be read.
    """
    try:
        return read_regular(path)
    except UnusableFile as error:
        raise UnusableFile(f"{path} {error}") from None


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """Yield a path of the content, since ssl loads certificates from paths only."""
    descriptor = os.memfd_create("agentd-tls", os.MFD_CLOEXEC)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{descriptor}"


def validity_of(pem: bytes) -> Validity | None:
    """Return the validity of a chain's first certificate (RFC 5280, 4.1), None if unreadable."""
    found = _FIRST.search(pem)
    if found is None:
        return None
    try:
        der = ssl.PEM_cert_to_DER_cert(found[0].decode("ascii"))
        at = _content_at(der, _content_at(der, 0))  # Certificate, TBSCertificate
        skipped = 4 if der[at] == _VERSION else 3  # version, serial number, signature, issuer
        for _ in range(skipped):
            at = _end_at(der, at)
        first = _content_at(der, at)
        return Validity(_time(der, first), _time(der, _end_at(der, first)))
    except (ValueError, IndexError):
        return None


def _content_at(der: bytes, at: int) -> int:
    """Return the offset of a DER value's content."""
    size = der[at + 1]
    return at + 2 + (size - _LONG if size > _LONG else 0)


def _end_at(der: bytes, at: int) -> int:
    """Return the offset after a DER value."""
    size, content = der[at + 1], _content_at(der, at)
    return content + (int.from_bytes(der[at + 2 : content], "big") if size > _LONG else size)


def _time(der: bytes, at: int) -> float:
    text = der[_content_at(der, at) : _end_at(der, at)].decode("ascii")
    if der[at] == _UTC_TIME:
        text = ("19" if int(text[:2]) >= _CENTURY else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
