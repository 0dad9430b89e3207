"""Tokens and certificates named by the settings, and warnings about weak ones.

`callers` identifies the caller of a request by them. A file that does not exist or does not answer
may come later: a caller that can wait for it passes a list of missing ones, and is given the other
files.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from agentd.concurrency import Walk
from agentd.core.access import Caller, Role
from agentd.errors import ConfigRefused, Problem, StartRefused
from agentd.http.callers import Token
from agentd.http.certificates import (
    Certificate,
    expired_text,
    read_certificate,
    validity_weaknesses,
)
from agentd.http.server import Endpoint, UnixSocket
from agentd.http.settings import RpcSettings
from agentd.program.weaknesses import Weakness
from agentd.tomlfile.regular_files import MissingFile, RegularFile, SilentFile, read_configured

SECRET_MODE = 0o640
MAX_TOKEN = 4096
GOOD_TOKEN = 16
"""Minimum characters of a token that cannot be guessed over the network."""


def build_endpoint(
    rpc: RpcSettings, section: str = "rpc", missing: list[Problem] | None = None
) -> Endpoint:
    """Return the endpoint that the settings describe; the certificate is of a section.

    Without its certificate every TLS handshake fails.

    Raises:
        ConfigRefused: a token or the certificate is unusable.
        StartRefused: one cannot be read for now, and there is no `missing`.
    """
    main = Caller(rpc.socket.stem, Role.ADMIN)
    sockets = [UnixSocket(rpc.socket.absolute(), rpc.socket_group, main)]
    sockets += [
        UnixSocket(
            settings.path.absolute(), settings.group, settings.to_caller(settings.caller_name)
        )
        for settings in rpc.sockets
    ]
    if rpc.listen is None:
        return Endpoint(tuple(sockets))
    host, port = rpc.host_port
    certificate = read_configured_certificate(rpc, section, missing)
    tls = certificate.context if certificate is not None else None
    if certificate is None and rpc.tls_cert is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    return Endpoint(
        tuple(sockets),
        host=str(host),
        port=port,
        tokens=read_tokens(rpc, missing),
        tls=tls,
        max_connections=rpc.max_connections,
    )


def read_tokens(
    rpc: RpcSettings, missing: list[Problem] | None = None, last: Sequence[Token] = ()
) -> tuple[Token, ...]:
    """Read every bearer token; those of `missing` files are left out.

    While a file does not answer, its token stays as it was in `last`.

    Raises:
        ConfigRefused: files are unusable; lists all of them.
        StartRefused: one cannot be read for now, and there is no `missing`.
    """
    sources = [
        (f"rpc.tokens.{index}.file", token.file, token.to_caller(token.name), token.gateway)
        for index, token in enumerate(rpc.tokens)
    ]
    if rpc.token_file is not None:
        admin = Caller(rpc.token_file.stem, Role.ADMIN)
        sources.insert(0, ("rpc.token-file", rpc.token_file, admin, False))
    loaded: list[Token] = []
    problems: list[Problem] = []
    passing = [] if missing is None else missing
    walk = Walk()
    for key, path, caller, is_gateway in sources:
        try:
            loaded.append(Token(read_guarded_token(path, walk), caller, is_gateway, path))
        except ValueError as error:
            is_silent = isinstance(error, SilentFile)
            may_come = is_silent or (missing is not None and isinstance(error, MissingFile))
            (passing if may_come else problems).append(Problem(key, f"{path} {error}"))
            known = [token.secret for token in last if token.file == path]
            if is_silent:  # what was last read of it stays in force
                loaded += [Token(secret, caller, is_gateway, path) for secret in known]
    secrets = [token.secret for token in loaded]
    if len(set(secrets)) < len(secrets):
        problems.append(Problem("rpc.tokens", "two callers have the same token"))
    if problems:
        raise ConfigRefused(problems)
    if missing is None and passing:
        raise StartRefused(", ".join(map(str, passing)))
    return tuple(loaded)


def credential_weaknesses(rpc: RpcSettings) -> list[str]:
    """Return the present weaknesses of tokens and certificate; unreadable files are skipped."""
    now = time.time()
    weaknesses = [*token_weaknesses(rpc), *key_pair_weaknesses(rpc.tls_cert, rpc.tls_key)]
    return [weakness.text for weakness in weaknesses if weakness.holds_at(now)]


def token_weaknesses(rpc: RpcSettings) -> list[Weakness]:
    """Return the weaknesses of the tokens; unreadable files are skipped."""
    files = [token.file for token in rpc.tokens]
    files += [rpc.token_file] if rpc.token_file is not None else []
    warnings: list[Weakness] = []
    walk = Walk()
    for path in files:
        with suppress(ValueError):
            file = read_configured(path, MAX_TOKEN, walk)
            if problem := _mode_problem(file.mode):
                warnings.append(Weakness(f"{path} {problem}"))
            if (size := len(_parse_token(file))) < GOOD_TOKEN:
                problem = f"holds a token of {size} characters, expected {GOOD_TOKEN} or more"
                warnings.append(Weakness(f"{path} {problem}; agentctl token create writes one"))
    return warnings


def key_pair_weaknesses(cert: Path | None, key: Path | None) -> list[Weakness]:
    """Return the weaknesses of a certificate and its key; unusable files are skipped."""
    if cert is None or key is None:
        return []
    try:
        certificate = read_certificate(cert, key)
    except ValueError:
        return []
    problem = _mode_problem(certificate.key_mode)
    warnings = [Weakness(f"{key} {problem}")] if problem else []
    if certificate.validity is not None:
        warnings += validity_weaknesses(cert, certificate.validity)
    return warnings


def expiry_problems(setting: str, cert: Path | None, key: Path | None) -> list[Problem]:
    """Return the problem of a certificate that has expired; unusable files are skipped."""
    if cert is None or key is None:
        return []
    with suppress(ValueError):
        validity = read_certificate(cert, key).validity
        if validity is not None and validity.not_after <= time.time():
            return [Problem(setting, expired_text(cert, validity))]
    return []


def read_guarded_token(path: Path, walk: Walk | None = None) -> str:
    """Read a token that only its owner and group can read.

    Raises:
        ValueError: the file is unusable; the message has the reason without the path.
    """
    file = read_configured(path, MAX_TOKEN, walk)
    if problem := _mode_problem(file.mode):
        raise ValueError(problem)
    return _parse_token(file)


def _mode_problem(mode: int) -> str:
    """Return the problem of a secret file's mode, empty if it has none."""
    if not mode & ~SECRET_MODE:
        return ""
    return f"has mode {mode:04o}: accessible by others; expected 0600 or 0640"


def _parse_token(file: RegularFile) -> str:
    """Return the token in a file.

    Raises:
        ValueError: the content is not a single word.
    """
    words = file.text.split()
    if len(words) != 1:
        raise ValueError("is empty, expected one line" if not words else "is not a single word")
    return words[0]


def read_configured_certificate(
    rpc: RpcSettings, section: str = "rpc", missing: list[Problem] | None = None
) -> Certificate | None:
    """Read the certificate; None if none is configured, or one of its files is `missing`.

    Raises:
        ConfigRefused: the certificate is unusable.
        StartRefused: it cannot be read for now, and there is no `missing`.
    """
    if rpc.tls_cert is None or rpc.tls_key is None:
        return None
    try:
        return read_certificate(rpc.tls_cert, rpc.tls_key)
    except ValueError as error:
        problem = Problem(f"{section}.tls-cert", str(error))
        if missing is None and isinstance(error, SilentFile):
            raise StartRefused(str(problem)) from None
        if missing is None or not isinstance(error, (MissingFile, SilentFile)):
            raise ConfigRefused([problem]) from None
        missing.append(problem)
        return None
