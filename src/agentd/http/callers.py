"""Authentication: a caller is identified by its unix socket or its bearer token."""

from __future__ import annotations

import hmac
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from aiohttp import web
from msgspec.structs import replace

from agentd.core.access import Caller
from agentd.errors import AgentdError, Forbidden, InvalidRequest, Problem
from agentd.http.connections.connection import connection_of
from agentd.http.connections.unix_sockets import SocketPeer
from agentd.views import (
    CallerView,
)

CALLER_HEADER = "Agentd-Caller"
"""The header in which a gateway names the caller that it acts for: `Caller.to_text`."""
NODE_HEADER = "Agentd-Node"
"""The header with the node id, in a node's responses and in a gateway's requests."""
_CALLER = web.RequestKey("caller", Caller)
_IDS = {kind: web.RequestKey(kind, str) for kind in ("kernel", "claim")}


class Token(msgspec.Struct, frozen=True):
    """A bearer token and its caller; the token of a gateway may act for other callers."""

    secret: str
    caller: Caller
    is_gateway: bool = False
    file: Path | None = None


class Callers:
    """The known tokens and the unix sockets by path; the first socket is the operator's."""

    def __init__(self, tokens: Sequence[Token], sockets: Mapping[str, Caller]) -> None:
        self.tokens = tuple(tokens)
        self._sockets = dict(sockets)
        self._main_socket = next(iter(self._sockets))

    def replace_tokens(self, tokens: Sequence[Token]) -> set[str]:
        """Replace the tokens and return the names of callers whose tokens are revoked."""
        known = [replace(token, file=None) for token in self.tokens]
        unchanged = {token.caller.name for token in tokens if replace(token, file=None) in known}
        revoked = {token.caller.name for token in self.tokens} - unchanged
        self.tokens = tuple(tokens)
        return revoked

    def turn_owner(self, request: web.BaseRequest) -> Hashable:
        """Return the owner of a request's turns: a user on a socket, else a caller or None."""
        if (peer := connection_of(request).peer) is not None:
            return peer.socket, peer.uid
        try:
            caller = self.identify(request)
        except AgentdError:
            return None
        return None if caller is None else (caller.name, caller.via)

    def identify(self, request: web.BaseRequest) -> Caller | None:
        """Return the caller; None for a TCP request without a known token.

        Raises:
            Forbidden: the caller may not act for others.
            InvalidRequest: the caller that it acts for is malformed.
        """
        if (peer := connection_of(request).peer) is not None:
            caller = replace(self._sockets[peer.socket], uid=peer.uid)
            is_gateway = peer.socket == self._main_socket
        else:
            token = self._find_token(request.headers.get("Authorization", ""))
            if token is None:
                return None
            caller, is_gateway = token.caller, token.is_gateway
        on_behalf = request.headers.getall(CALLER_HEADER, [])
        return _named_caller(on_behalf, caller, is_gateway=is_gateway) if on_behalf else caller

    def _find_token(self, header: str) -> Token | None:
        """Find the token of a header, in constant time for each comparison."""
        scheme, _, credential = header.partition(" ")
        secret = credential.strip().encode(errors="surrogateescape")
        matches = [
            token for token in self.tokens if hmac.compare_digest(secret, token.secret.encode())
        ]
        return matches[0] if matches and secret and scheme.lower() == "bearer" else None


def _named_caller(on_behalf: Sequence[str], caller: Caller, *, is_gateway: bool) -> Caller:
    if not is_gateway:
        right = "act for another caller"
        allowed = ["a token with gateway = true", "the main socket"]
        raise Forbidden(caller.name, caller.role.value, right, allowed)
    if len(on_behalf) > 1:
        raise InvalidRequest([Problem(CALLER_HEADER, "given more than once")])
    try:
        return Caller.from_text(on_behalf[0], caller)
    except ValueError as error:
        raise InvalidRequest([Problem(CALLER_HEADER, str(error))]) from None


def attach_caller(request: web.Request, caller: Caller) -> None:
    """Attach the caller to a request."""
    request[_CALLER] = caller


def caller_of(request: web.Request) -> Caller:
    """Return the caller of an authenticated request."""
    return request[_CALLER]


def attach_id(request: web.Request, kind: Literal["kernel", "claim"], item_id: str) -> None:
    """Attach the id of a kernel or a claim to a request whose path has none."""
    request[_IDS[kind]] = item_id


def id_of(request: web.Request, kind: Literal["kernel", "claim"]) -> str:
    """Return the id of the kernel or the claim of a request, empty if it has none."""
    return request.get(_IDS[kind]) or request.match_info.get(kind, "")


def peer_of(request: web.Request) -> SocketPeer | None:
    """Return the calling process; None over TCP, and for a caller that a gateway passes on."""
    return None if caller_of(request).via else connection_of(request).peer


def caller_view(caller: Caller) -> CallerView:
    """Return a caller as its wire type."""
    return {
        "name": caller.name,
        "role": caller.role.value,
        "agents": None if caller.agents is None else sorted(caller.agents),
        "uid": caller.uid,
    }
