"""The transport to etcd's HTTP/JSON gateway: endpoints, deadlines, logins and errors.

Endpoints are tried in the caller's order, each with its share of one deadline, and the one that
answers is preferred from then on. A program that starts thousands of clients should give each a
different order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import ssl
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

import aiohttp
import msgspec

from agentd.errors import AgentdError, Unavailable

# A member without a leader refuses at once and ends its watches, instead of waiting.
_HEADERS = {"Content-Type": "application/json", "Grpc-Metadata-hasleader": "true"}
_REFUSED_TOKENS = (
    "invalid auth token",
    "revision of auth store is old",
    "revision in header is old",
    "user name is empty",
    "code = Unauthenticated",
)
"""Texts with which etcd refuses a token, in answers and as reasons of cancelled watches."""
_NO_LOGINS = "authentication is not enabled"
_HTTP_STATUS = {2: 500, 4: 504, 7: 403, 8: 429, 13: 500, 14: 503, 15: 500, 16: 401}
"""The HTTP status by the gRPC code, for streams of etcd 3.6, which lack it; else 400."""
LOGIN_PAUSE_S = 5.0
"""Seconds for which a refusal counts for every call: each login costs etcd a bcrypt."""
MAX_LOGINS = 3
"""Logins of one call."""
T = TypeVar("T")


class EtcdUnavailable(Unavailable):
    """No endpoint answers in time, has a leader and has space; the message has the cause."""

    code = "FleetStoreUnavailable"


class EtcdRefused(AgentdError):
    """etcd answered with a permanent error."""

    code = "FleetStoreRefused"


class LeaseGone(EtcdRefused):
    """The requested lease has expired, or never existed."""


class RevisionsCompacted(AgentdError):
    """The store does not have these revisions any more, or not yet; the reader starts over."""

    code = "FleetStoreCompacted"


class _NeverSent(EtcdUnavailable):
    """There was no connection, so nothing was done."""


class _TokenRefused(_NeverSent):
    """The token has expired, or is older than the last change of users or roles.

    Nothing was done. A login helps, or a later one, if users change again at this moment.
    """


class EtcdCredentials(msgspec.Struct, frozen=True):
    """Endpoints of etcd as `https://host:port`, and credentials; without a user no login."""

    endpoints: tuple[str, ...]
    user: str = ""
    password: str = ""
    tls: ssl.SSLContext | None = None

    @property
    def login(self) -> dict[str, str]:
        """The body of a login."""
        return {"name": self.user, "password": self.password}


class WatchStream:
    """The messages of one watch, from one endpoint."""

    def __init__(self, endpoint: str, response: aiohttp.ClientResponse) -> None:
        self.endpoint = endpoint
        self._response = response
        self._parts: list[bytes] = []

    async def next(self) -> dict[str, Any]:
        """Return the next message; cancelling it loses nothing.

        Raises:
            AgentdError: the connection ended, or etcd ended the watch.
        """
        while True:
            line, newline, remaining = (self._parts.pop() if self._parts else b"").partition(b"\n")
            self._parts.append(line)
            if newline:
                message, self._parts = b"".join(self._parts), [remaining]
                return _parse_watch_message(self.endpoint, message)
            try:
                part = await self._response.content.readany()
            except (aiohttp.ClientError, OSError) as error:
                raise EtcdUnavailable(f"{self.endpoint}: {error!r}") from None
            if not part:
                # When etcd ends a stream, the last line has the reason and no newline.
                if last := b"".join(self._parts):
                    _parse_answer(self.endpoint, self._response.status, last)
                raise EtcdUnavailable(f"{self.endpoint}: the watch ended")
            self._parts.append(part)

    def close(self) -> None:
        """Close the connection, which ends the watch in etcd."""
        self._response.close()


class EtcdTransport:
    """Sends calls to the endpoint that answers, with the user's token."""

    def __init__(self, credentials: EtcdCredentials, timeout_s: float) -> None:
        self.credentials = credentials
        self._timeout_s = timeout_s
        self._preferred = ""
        self._token: str | None = None
        """The token of the last login; empty while etcd needs none."""
        self._login = asyncio.Lock()
        self._refusal = (-math.inf, "")
        """Time and text of the last refused login."""
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Open the session; it must be closed."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def close(self) -> None:
        """Close all connections, including streams."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def replace_credentials(self, credentials: EtcdCredentials) -> None:
        """Use these for each new connection and login; open connections stay as they are."""
        if credentials.login != self.credentials.login:
            self._token, self._refusal = None, (-math.inf, "")
        self.credentials = credentials

    async def call(self, path: str, body: Mapping[str, object]) -> tuple[dict[str, Any], bool]:
        """Return the answer, and whether an earlier attempt may have taken effect."""
        return await self._call_endpoints(partial(self._post, path, body))

    async def call_at(self, endpoint: str, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """Call exactly this endpoint and return its answer; a silent one is not preferred."""
        return (await self._call_endpoints(partial(self._post, path, body), endpoint))[0]

    async def stream(self, path: str, body: Mapping[str, object]) -> WatchStream:
        """Open a stream whose first message has arrived."""
        return (await self._call_endpoints(partial(self._open_stream, path, body)))[0]

    async def _call_endpoints(
        self, attempt: Callable[[str, str], Awaitable[T]], *only: str
    ) -> tuple[T, bool]:
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        endpoints = [endpoint.rstrip("/") for endpoint in only or self.credentials.endpoints]
        endpoints.sort(key=lambda endpoint: endpoint != self._preferred)
        faults = []
        is_repeat = False
        for attempts, endpoint in enumerate(endpoints):
            share_s = (deadline - asyncio.get_running_loop().time()) / (len(endpoints) - attempts)
            try:
                async with asyncio.timeout(share_s):
                    answer = await self._as_user(endpoint, attempt)
            except TimeoutError:
                faults.append(f"{endpoint}: no answer in {share_s:.2g} s")
                is_repeat = True
                others = (other.rstrip("/") for other in self.credentials.endpoints)
                self._preferred = next((other for other in others if other != endpoint), endpoint)
            except EtcdUnavailable as error:
                faults.append(str(error))
                is_repeat = is_repeat or not isinstance(error, _NeverSent)
            else:
                self._preferred = endpoint
                return answer, is_repeat
        raise EtcdUnavailable("; ".join(faults))

    async def _as_user(self, endpoint: str, attempt: Callable[[str, str], Awaitable[T]]) -> T:
        """Make a call with the current token, and again after a login if that is refused.

        Users may change once more during a login, which ends the new token, too.
        """
        if not self.credentials.user:
            try:
                return await attempt(endpoint, "")
            except _TokenRefused as error:
                raise EtcdRefused(str(error)) from None
        token = self._token
        if token is not None:
            with contextlib.suppress(_TokenRefused):
                return await attempt(endpoint, token)
        for _ in range(MAX_LOGINS - 1):
            token = await self._renew_token(endpoint, token)
            with contextlib.suppress(_TokenRefused):
                return await attempt(endpoint, token)
        return await attempt(endpoint, await self._renew_token(endpoint, token))

    async def _renew_token(self, endpoint: str, refused: str | None) -> str:
        """Log in, unless a concurrent call already has: a login costs etcd a bcrypt."""
        async with self._login:
            if self._token is None or self._token == refused:
                refused_at, reason = self._refusal
                if asyncio.get_running_loop().time() < refused_at + LOGIN_PAUSE_S:
                    raise EtcdRefused(reason)
                self._token = await self._log_in(endpoint)
            return self._token

    async def _log_in(self, endpoint: str) -> str:
        """Log in, and again if the credentials are replaced meanwhile."""
        answer: dict[str, Any] = {}
        login: dict[str, str] = {}
        while login != self.credentials.login:
            login = self.credentials.login
            try:
                answer = await self._post("/v3/auth/authenticate", login, endpoint, "")
            except EtcdRefused as error:
                if _NO_LOGINS in str(error):
                    return ""
                if login == self.credentials.login:
                    self._refusal = (asyncio.get_running_loop().time(), str(error))
                    raise
        return str(answer.get("token", ""))

    async def _post(
        self, path: str, body: Mapping[str, object], endpoint: str, token: str
    ) -> dict[str, Any]:
        response = await self._send(endpoint, token, path, body)
        try:
            async with response:
                return _parse_answer(endpoint, response.status, await response.read())
        except (aiohttp.ClientError, OSError) as error:
            raise EtcdUnavailable(f"{endpoint}: {error!r}") from None

    async def _open_stream(
        self, path: str, body: Mapping[str, object], endpoint: str, token: str
    ) -> WatchStream:
        stream = WatchStream(endpoint, await self._send(endpoint, token, path, body))
        try:
            await stream.next()
        except BaseException:
            stream.close()
            raise
        return stream

    async def _send(
        self, endpoint: str, token: str, path: str, body: Mapping[str, object]
    ) -> aiohttp.ClientResponse:
        if self._session is None:
            raise RuntimeError("use it as `async with EtcdClient(access) as etcd`")
        headers = {**_HEADERS, "Authorization": token} if token else _HEADERS
        data = json.dumps(body, separators=(",", ":"))
        try:
            tls = self.credentials.tls or True
            return await self._session.post(endpoint + path, data=data, headers=headers, ssl=tls)
        except aiohttp.ClientConnectorError as error:
            raise _NeverSent(f"{endpoint}: Cannot connect: {error.__cause__}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EtcdUnavailable(f"{endpoint}: {error!r}") from None


def _parse_answer(endpoint: str, status: int, raw: bytes) -> dict[str, Any]:
    """Parse an answer.

    Raises:
        AgentdError: it is an error, or not from etcd.
    """
    try:
        content = json.loads(raw)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise _error_of_answer(endpoint, status, f"HTTP {status}: {raw[:200]!r}")
    error = content.get("error")
    if isinstance(error, dict):  # the form of streams, also after a good beginning
        if status == HTTPStatus.OK:
            status = error.get("http_code") or _HTTP_STATUS.get(error.get("code", 0), 400)
        raise _error_of_answer(endpoint, status, str(error.get("message")))
    if error is not None or status != HTTPStatus.OK:
        raise _error_of_answer(endpoint, status, str(error or content.get("message")))
    if not ("header" in content or isinstance(content.get("result"), dict)):
        raise _error_of_answer(endpoint, status, f"this is not an answer of etcd: {raw[:200]!r}")
    return content


def _parse_watch_message(endpoint: str, raw: bytes) -> dict[str, Any]:
    """Parse a message of a watch.

    Raises:
        AgentdError: etcd ends the watch with it.
    """
    message: dict[str, Any] = _parse_answer(endpoint, HTTPStatus.OK, raw).get("result", {})
    if not message.get("canceled", False):
        return message
    if "compact_revision" in message:
        raise RevisionsCompacted(
            f"{endpoint}: revisions before {message['compact_revision']} are compacted"
        )
    reason = message.get("cancel_reason", "the watch was cancelled")
    if "permission denied" in reason:
        raise EtcdRefused(f"{endpoint}: {reason}")
    raise _error_of_answer(endpoint, HTTPStatus.SERVICE_UNAVAILABLE, reason)


def _error_of_answer(endpoint: str, status: int, reason: str) -> AgentdError:
    """Return the error for an answer; its text tells apart several with one status."""
    message = f"{endpoint}: {reason}"
    if status == HTTPStatus.UNAUTHORIZED or any(text in reason for text in _REFUSED_TOKENS):
        return _TokenRefused(message)
    if "has been compacted" in reason:
        return RevisionsCompacted(message)
    if "requested lease not found" in reason:
        return LeaseGone(message)
    # 429 is a full disk or too many requests; "too large" is `grpc: …` and permanent.
    is_full = status == HTTPStatus.TOO_MANY_REQUESTS and reason.startswith("etcdserver:")
    if is_full or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return EtcdUnavailable(message)
    return EtcdRefused(message)
