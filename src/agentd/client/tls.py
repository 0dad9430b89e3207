"""The TLS context of every client."""

from __future__ import annotations

import ssl


def client_tls(cafile: str | None = None, cadata: str | None = None) -> ssl.SSLContext:
    """Return a context that trusts these CAs, by default the system's, alike on every Python.

    Raises:
        OSError, ValueError: the CAs cannot be read.
    """
    context = ssl.create_default_context(cafile=cafile, cadata=cadata)
    # Python 3.13 sets it, and certificates of private CAs often fail it: plain openssl makes them
    # without key usage and authority key identifier.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
