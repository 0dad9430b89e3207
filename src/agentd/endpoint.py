"""Where a daemon answers, and whom: from the settings of its RPC."""

from __future__ import annotations

import ssl
import stat
from collections.abc import Callable
from pathlib import Path

from agentd.config.settings import RpcSettings
from agentd.core.access import Caller, Role
from agentd.errors import ConfigRefused, Problem
from agentd.rpc.callers import Token
from agentd.rpc.server import Door, Endpoint, Server

TOKEN_MODE = 0o640
MAX_TOKEN = 4096


def endpoint(rpc: RpcSettings) -> Endpoint:
    """Return where the daemon answers, and whom.

    Raises:
        ConfigRefused: a token or the certificate cannot be used.
    """
    main = Caller(rpc.socket.stem, Role.ADMIN)
    doors = [Door(rpc.socket.absolute(), rpc.socket_group, main)]
    doors += [
        Door(further.path.absolute(), further.group, further.to_caller(further.caller_name))
        for further in rpc.sockets
    ]
    if rpc.listen is None:
        return Endpoint(tuple(doors))
    host, port = rpc.host_port
    return Endpoint(tuple(doors), str(host), port, tokens(rpc), _tls(rpc), rpc.max_connections)


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


def exposed_tokens(rpc: RpcSettings) -> list[str]:
    """Return which files of tokens others can read by now, and how."""
    files = [token.file for token in rpc.tokens]
    files += [rpc.token_file] if rpc.token_file is not None else []
    return [f"{file} {why}" for file in files if (why := _seen_by_others(file))]


def guarded_secret_in(path: Path) -> str:
    """Read a token that only its owner and group can read; a ValueError says why it is none."""
    if why := _seen_by_others(path):
        raise ValueError(why)
    return secret_in(path)


def _seen_by_others(path: Path) -> str:
    """Return what is wrong with the mode of a token's file; empty if nothing is."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return ""
    if not mode & ~TOKEN_MODE:
        return ""
    return f"has mode {mode:04o}: others can read or write it; allowed: 0600 or 0640"


def secret_in(path: Path) -> str:
    """Read a token; the message of a ValueError says why it cannot be used."""
    try:
        with path.open(encoding="utf-8") as file:
            lines = file.read(MAX_TOKEN + 1).split()
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    if len(lines) != 1 or len(lines[0]) > MAX_TOKEN:
        raise ValueError("is empty; it needs one line" if not lines else "is not one word")
    return lines[0]


def renewed_tls(rpc: RpcSettings, server: Server) -> list[Callable[[], object]]:
    """Return what takes the certificate anew, where one is used; connections that are open stay.

    Raises:
        ConfigRefused: it cannot be used.
    """
    used = server.tls
    if used is None or rpc.tls_cert is None:
        return []
    cert, key = rpc.tls_cert, rpc.tls_key
    _tls(rpc)  # what cannot be used is to leave the old one as it is
    return [lambda: used.load_cert_chain(cert, key)]


def _tls(rpc: RpcSettings) -> ssl.SSLContext | None:
    if rpc.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(rpc.tls_cert, rpc.tls_key)
    except (OSError, ssl.SSLError) as error:
        why = f"{rpc.tls_cert} and {rpc.tls_key} cannot be used: {error}"
        raise ConfigRefused([Problem("rpc.tls-cert", why)]) from None
    return context
