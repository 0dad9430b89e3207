"""Certificates and keys for TLS: read once, and loaded from what was read."""

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
"""From which first byte a length has more, and from which year of two digits it is 19xx."""


class Validity(NamedTuple):
    """When a certificate is valid, in seconds since the epoch."""

    not_before: float
    not_after: float


class Certificate(NamedTuple):
    """A certificate that was read: its context for TLS, its validity, the mode of its key."""

    context: ssl.SSLContext
    validity: Validity | None
    key_mode: int


def read_certificate(cert: Path, key: Path) -> Certificate:
    """Read a certificate chain and its key.

    Raises:
        UnusableFile: one of them cannot be read, or they do not go together.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    chain, secret = load_chain(context, cert, key)
    return Certificate(context, validity_of(chain.content), secret.mode)


def load_chain(context: ssl.SSLContext, cert: Path, key: Path) -> tuple[RegularFile, RegularFile]:
    """Give a context a certificate chain and its key; return both as they were read.

    Raises:
        UnusableFile: one of them cannot be read, or they do not go together.
    """
    chain, secret = read_named(cert), read_named(key)
    try:
        with _in_memory(chain.content) as first, _in_memory(secret.content) as second:
            # An empty password: OpenSSL would ask for one at the terminal.
            context.load_cert_chain(first, second, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        raise UnusableFile(f"{cert} and {key} cannot be used: {error}") from None
    return chain, secret


def read_named(path: Path) -> RegularFile:
    """Read a file; the error names it.

    Raises:
        UnusableFile: it cannot be read.
    """
    try:
        return read_regular(path)
    except UnusableFile as error:
        raise UnusableFile(f"{path} {error}") from None


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """Give content a path: ssl takes nothing else."""
    descriptor = os.memfd_create("agentd-tls", os.MFD_CLOEXEC)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{descriptor}"


def validity_of(pem: bytes) -> Validity | None:
    """Return when the first certificate of a chain is valid (RFC 5280, 4.1); None if unreadable."""
    found = _FIRST.search(pem)
    if found is None:
        return None
    try:
        der = ssl.PEM_cert_to_DER_cert(found[0].decode("ascii"))
        at = _inside(der, _inside(der, 0))  # Certificate, TBSCertificate
        skipped = 4 if der[at] == _VERSION else 3  # version, serial number, signature, issuer
        for _ in range(skipped):
            at = _behind(der, at)
        first = _inside(der, at)
        return Validity(_time(der, first), _time(der, _behind(der, first)))
    except (ValueError, IndexError):
        return None


def _inside(der: bytes, at: int) -> int:
    """Return where the content of a DER value begins."""
    size = der[at + 1]
    return at + 2 + (size - _LONG if size > _LONG else 0)


def _behind(der: bytes, at: int) -> int:
    """Return where a DER value ends."""
    size, content = der[at + 1], _inside(der, at)
    return content + (int.from_bytes(der[at + 2 : content], "big") if size > _LONG else size)


def _time(der: bytes, at: int) -> float:
    text = der[_inside(der, at) : _behind(der, at)].decode("ascii")
    if der[at] == _UTC_TIME:
        text = ("19" if int(text[:2]) >= _CENTURY else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
