"""Tokens and certificates from the files that the settings name, and what is weak about them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import structlog

from agentd.core.access import Caller, Role
from agentd.errors import ConfigRefused, Problem
from agentd.http.callers import Token
from agentd.http.certificates import Certificate, read_certificate
from agentd.http.server import Endpoint, UnixSocket
from agentd.http.settings import RpcSettings
from agentd.tomlfile.regular_files import RegularFile, read_regular

log = structlog.get_logger()

SECRET_MODE = 0o640
MAX_TOKEN = 4096
GOOD_TOKEN = 16
"""Characters of a token that cannot be guessed over the network."""


def endpoint(rpc: RpcSettings) -> Endpoint:
    """Return where the daemon answers, and whom.

    Raises:
        ConfigRefused: a token or the certificate cannot be used.
    """
    main = Caller(rpc.socket.stem, Role.ADMIN)
    sockets = [UnixSocket(rpc.socket.absolute(), rpc.socket_group, main)]
    sockets += [
        UnixSocket(further.path.absolute(), further.group, further.to_caller(further.caller_name))
        for further in rpc.sockets
    ]
    if rpc.listen is None:
        return Endpoint(tuple(sockets))
    host, port = rpc.host_port
    certificate = certificate_of(rpc)
    tls = certificate.context if certificate is not None else None
    return Endpoint(tuple(sockets), str(host), port, tokens(rpc), tls, rpc.max_connections)


def tokens(rpc: RpcSettings) -> tuple[Token, ...]:
    """Read every bearer token.

    Raises:
        ConfigRefused: files that cannot be used are named, all of them.
    """
    named = [
        (f"rpc.tokens.{index}.file", token.file, token.to_caller(token.name), token.gateway)
        for index, token in enumerate(rpc.tokens)
    ]
    if rpc.token_file is not None:
        admin = Caller(rpc.token_file.stem, Role.ADMIN)
        named.insert(0, ("rpc.token-file", rpc.token_file, admin, False))
    found: list[Token] = []
    problems: list[Problem] = []
    for where, path, caller, is_gateway in named:
        try:
            found.append(Token(guarded_secret_in(path), caller, is_gateway))
        except ValueError as error:
            problems.append(Problem(where, f"{path} {error}"))
    secrets = [token.secret for token in found]
    if len(set(secrets)) < len(secrets):
        problems.append(Problem("rpc.tokens", "two callers have the same token"))
    if problems:
        raise ConfigRefused(problems)
    return tuple(found)


class Weakness(NamedTuple):
    """A warning about a token or the certificate, and from when on it holds (epoch seconds)."""

    text: str
    since: float = 0.0


class Weaknesses:
    """The weaknesses of the credentials in use."""

    def __init__(self) -> None:
        self._found: tuple[Weakness, ...] = ()

    def replace(self, found: Sequence[Weakness]) -> None:
        """Take those of other credentials."""
        self._found = tuple(found)
        for text in self.warnings():
            log.warning("rpc.weak_credential", reason=text)

    def warnings(self) -> list[str]:
        """Return those that hold by now."""
        now = time.time()
        return [weakness.text for weakness in self._found if weakness.since <= now]


def weaknesses(rpc: RpcSettings) -> list[Weakness]:
    """Return what is weak about the tokens and the certificate; unreadable ones are left out."""
    files = [token.file for token in rpc.tokens]
    files += [rpc.token_file] if rpc.token_file is not None else []
    found: list[Weakness] = []
    for file in files:
        with suppress(ValueError):
            read = read_regular(file, MAX_TOKEN)
            found += [Weakness(f"{file} {why}")] if (why := _exposed(read.mode)) else []
            if (size := len(_secret(read))) < GOOD_TOKEN:
                why = f"holds a token of {size} characters, expected {GOOD_TOKEN} or more"
                found.append(Weakness(f"{file} {why}; agentctl token create writes one"))
    if rpc.tls_cert is not None and rpc.tls_key is not None:
        with suppress(ValueError):
            certificate = read_certificate(rpc.tls_cert, rpc.tls_key)
            found += _certificate_weaknesses(rpc.tls_cert, rpc.tls_key, certificate)
    return found


def _certificate_weaknesses(cert: Path, key: Path, read: Certificate) -> Iterator[Weakness]:
    if why := _exposed(read.key_mode):
        yield Weakness(f"{key} {why}")
    if read.validity is not None:
        begins, ends = map(_date, read.validity)
        yield Weakness(f"{cert} expired at {ends}", read.validity.not_after)
        if read.validity.not_before > time.time():
            yield Weakness(f"{cert} is not valid before {begins}")


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def guarded_secret_in(path: Path) -> str:
    """Read a token that only its owner and group can read.

    Raises:
        ValueError: it cannot be used; the message says why, without the path.
    """
    read = read_regular(path, MAX_TOKEN)
    if why := _exposed(read.mode):
        raise ValueError(why)
    return _secret(read)


def _exposed(mode: int) -> str:
    """Return what is wrong with the mode of a secret's file; empty if nothing is."""
    if not mode & ~SECRET_MODE:
        return ""
    return f"has mode {mode:04o}: others can read or write it; allowed: 0600 or 0640"


def _secret(read: RegularFile) -> str:
    """Return the token in a file.

    Raises:
        ValueError: it is not one word.
    """
    words = read.text.split()
    if len(words) != 1:
        raise ValueError("is empty; it needs one line" if not words else "is not one word")
    return words[0]


def certificate_of(rpc: RpcSettings) -> Certificate | None:
    """Read the certificate; None where none is configured.

    Raises:
        ConfigRefused: it cannot be used.
    """
    if rpc.tls_cert is None or rpc.tls_key is None:
        return None
    try:
        return read_certificate(rpc.tls_cert, rpc.tls_key)
    except ValueError as error:
        raise ConfigRefused([Problem("rpc.tls-cert", str(error))]) from None
