"""TLS certificates and keys: their contexts, validity and weaknesses."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec

from agentd.concurrency import call_in_time
from agentd.os_errors import can_pass
from agentd.program.weaknesses import Weakness
from agentd.tomlfile.regular_files import RegularFile, SilentFile, UnusableFile, read_configured

EXPIRY_WARNING_S = 14 * 24 * 3600.0
"""Seconds before the end of a certificate from which on it is a warning."""


class Validity(msgspec.Struct, frozen=True):
    """The validity period of a certificate, in seconds since the epoch."""

    not_before: float
    not_after: float


class Certificate(msgspec.Struct, frozen=True):
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
    return Certificate(context, parse_validity(chain.content), secret.mode)


def load_chain(context: ssl.SSLContext, cert: Path, key: Path) -> tuple[RegularFile, RegularFile]:
    """Load a certificate chain and its key into a context, and return both files.

    Raises:
        SilentFile: a file cannot be read for now.
        UnusableFile: a file cannot be read, or the key does not fit the certificate.
    """
    chain, secret = read_chain_file(cert), read_chain_file(key)
    try:
        # Without a password OpenSSL would ask for one at the terminal.
        call_in_time(str(key), partial(context.load_cert_chain, cert, key, password=lambda: ""))
    except OSError as error:  # OpenSSL's have numbers of their own
        is_silent = can_pass(error) and not isinstance(error, ssl.SSLError)
        error_class = SilentFile if is_silent else UnusableFile
        raise error_class(f"{cert} and {key} cannot be used: {error}") from None
    return chain, secret


def read_chain_file(path: Path) -> RegularFile:
    """Read a file; errors contain its path.

    Raises:
        MissingFile: the file does not exist.
        UnusableFile: the file cannot be read.
    """
    try:
        return read_configured(path)
    except UnusableFile as error:
        raise type(error)(f"{path} {error}") from None


def parse_validity(pem: bytes) -> Validity | None:
    """Return the validity of a chain's first certificate, None if it cannot be parsed."""
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(pem)
    except (ValueError, x509.InvalidVersion):
        return None
    return Validity(
        certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    )


def validity_weaknesses(cert: Path, validity: Validity) -> list[Weakness]:
    """Return the warnings about a certificate before, near the end of and after its validity."""
    return [
        Weakness(
            f"{cert} is not valid before {_date(validity.not_before)}", until=validity.not_before
        ),
        Weakness(
            f"{cert} expires at {_date(validity.not_after)}",
            validity.not_after - EXPIRY_WARNING_S,
            validity.not_after,
        ),
        Weakness(expired_text(cert, validity), validity.not_after),
    ]


def expired_text(cert: Path, validity: Validity) -> str:
    """Return the problem of an expired certificate."""
    return f"{cert} expired at {_date(validity.not_after)}"


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
