"""The blocking client, on the standard library's HTTP, which loads in a few milliseconds.

It is meant for command lines and scripts; concurrent programs use `AsyncClient`.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload
from urllib.parse import urlsplit

from agentd.client import calls
from agentd.client.calls import Call
from agentd.client.defaults import (
    CHUNK,
    CREATE_TIMEOUT_S,
    DEFAULT_SOCKET,
    SILENCE_S,
    TIMEOUT_S,
    patience_s,
)
from agentd.client.errors import content_of, error_in, unreachable
from agentd.client.events import Frames, NodeEvent
from agentd.client.tls import client_tls
from agentd.errors import Unavailable
from agentd.views import (
    AgentView,
    CallerView,
    ClaimView,
    DecisionView,
    DeviceView,
    EditsView,
    EngineView,
    KernelUseView,
    KernelView,
    NodeView,
    PluginView,
    RefusalView,
    ReloadView,
    RuntimeView,
    SlotTypeView,
)

if TYPE_CHECKING:
    from agentd.client.asynchronous import AsyncClient

T = TypeVar("T")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Client:
    """A client of one daemon, over its socket (default: the system's) or TCP with a token.

    Refusals are raised as the classes of `agentd.errors`; a daemon that does not answer is
    `Unreachable`. Answers of 503 are retried after their Retry-After, for at most `retry_s`.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        *,
        url: str | None = None,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retry_s: float = TIMEOUT_S,
    ) -> None:
        self._socket_path = os.fspath(socket) if socket is not None else DEFAULT_SOCKET
        self._url = url
        self._token = token
        self._timeout_s = timeout_s
        self._retry_s = retry_s

    def asynchronous(self) -> AsyncClient:
        """Return the asyncio client of the same daemon."""
        from agentd.client.asynchronous import AsyncClient  # noqa: PLC0415 - aiohttp is slow to load

        return AsyncClient(self._socket_path, url=self._url, token=self._token)

    def open(self, call: Call[Any], timeout_s: float | None = None) -> http.client.HTTPResponse:
        """Make a call and return the open answer.

        Raises:
            AgentdError: the daemon refused, or cannot be reached.
        """
        sent = dict(call.headers)
        if self._token:
            sent["Authorization"] = f"Bearer {self._token}"
        data = None
        if call.body is not None:
            data, sent["Content-Type"] = json.dumps(call.body).encode(), "application/json"
        try:
            connection = self._connection(timeout_s or self._timeout_s)
            base = urlsplit(self._url or "").path.rstrip("/")
            connection.request(call.method, f"{base}{call.path}", data, sent)
            response = connection.getresponse()
            if response.status >= http.client.MULTIPLE_CHOICES:
                retry_after = response.headers.get("Retry-After")
                raise error_in(response.status, response.read(), retry_after)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise unreachable(self._where, error) from None
        return response

    def carry_out(self, call: Call[T], *, timeout_s: float | None = None) -> T:
        """Make a call, with all pages of a list, and repeat it while the daemon is not ready.

        Raises:
            AgentdError: the daemon refused, or cannot be reached.
        """
        content, link = self._answer(call, timeout_s)
        answer = content_of(content)
        page = call.next_page(link)
        while page is not None:
            content, link = self._answer(page, timeout_s)
            answer += content_of(content)
            page = page.next_page(link)
        return cast("T", answer)

    def _answer(self, call: Call[Any], timeout_s: float | None) -> tuple[bytes, str | None]:
        """Return the content and the header `Link` of an answer."""
        end = time.monotonic() + self._retry_s
        while True:
            try:
                response = self.open(call, timeout_s)
                return response.read(), response.headers.get("Link")
            except Unavailable as error:
                if not call.is_worth_another(error, end - time.monotonic()):
                    raise
                time.sleep(error.retry_after_s)
            except (OSError, http.client.HTTPException) as error:
                raise unreachable(self._where, error) from None

    def node(self, *, check: bool = False) -> NodeView:
        return self.carry_out(calls.node(check=check))

    def whoami(self) -> CallerView:
        return self.carry_out(calls.whoami())

    def reload(self) -> ReloadView:
        return self.carry_out(calls.reload())

    def runtimes(self) -> list[RuntimeView]:
        return self.carry_out(calls.runtimes())

    def forget_runtime(self, name: str) -> None:
        self.carry_out(calls.forget_runtime(name))

    def refusals(self) -> list[RefusalView]:
        return self.carry_out(calls.refusals())

    def plugins(self) -> list[PluginView]:
        return self.carry_out(calls.plugins())

    def retry_plugin(self, name: str) -> PluginView:
        return self.carry_out(calls.retry_plugin(name))

    def slot_types(self) -> list[SlotTypeView]:
        return self.carry_out(calls.slot_types())

    def devices(self) -> list[DeviceView]:
        return self.carry_out(calls.devices())

    def drain(self, device_name: str, device_id: str) -> DeviceView:
        return self.carry_out(calls.drain(device_name, device_id))

    def undrain(self, device_name: str, device_id: str) -> DeviceView:
        return self.carry_out(calls.undrain(device_name, device_id))

    def forget_device(self, device_name: str, device_id: str) -> None:
        self.carry_out(calls.forget_device(device_name, device_id))

    def agents(self) -> list[AgentView]:
        return self.carry_out(calls.agents())

    def agent(self, agent_id: str) -> AgentView:
        return self.carry_out(calls.agent(agent_id))

    def create_kernel(
        self,
        agent_id: str,
        request: Mapping[str, Any],
        *,
        wait: bool = True,
        timeout_s: float = CREATE_TIMEOUT_S,
    ) -> KernelView:
        return self.carry_out(
            calls.create_kernel(agent_id, request, wait=wait), timeout_s=timeout_s
        )

    def explain(self, agent_id: str, request: Mapping[str, Any]) -> DecisionView:
        return self.carry_out(calls.explain(agent_id, request))

    def kernels(
        self,
        agent_id: str | None = None,
        *,
        state: str | Sequence[str] | None = None,
        labels: Mapping[str, str] | None = None,
        limit: int | None = None,
        after: str | None = None,
        claim: str | None = None,
    ) -> list[KernelView]:
        call = calls.kernels(
            agent_id, state=state, labels=labels, limit=limit, after=after, claim=claim
        )
        return self.carry_out(call)

    def kernel(self, kernel_id: str) -> KernelView:
        return self.carry_out(calls.kernel(kernel_id))

    def stop_kernel(self, kernel_id: str, timeout: float | None = None) -> KernelView:
        call = calls.stop_kernel(kernel_id, timeout)
        return self.carry_out(call, timeout_s=patience_s(self._timeout_s, timeout))

    def create_claim(self, agent_id: str, request: Mapping[str, Any]) -> ClaimView:
        """Claim devices; a request without `claim_id` gets one, so that it can be repeated."""
        return self.carry_out(calls.create_claim(agent_id, request))

    def claims(
        self,
        agent_id: str | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[ClaimView]:
        call = calls.claims(agent_id, labels=labels, limit=limit, after=after)
        return self.carry_out(call)

    def claim(self, claim_id: str) -> ClaimView:
        return self.carry_out(calls.claim(claim_id))

    def renew_claim(self, claim_id: str, ttl: int | None = None) -> ClaimView:
        return self.carry_out(calls.renew_claim(claim_id, ttl))

    def release_claim(self, claim_id: str) -> None:
        self.carry_out(calls.release_claim(claim_id))

    def edits(self, claim_ids: Sequence[str], edits_for: str = "process") -> EditsView:
        return self.carry_out(calls.edits(claim_ids, edits_for))

    def engines(self) -> list[EngineView]:
        return self.carry_out(calls.engines())

    def set_engine(self, engine: str, *, ready: bool) -> EngineView:
        return self.carry_out(calls.set_engine(engine, ready=ready))

    def delete_kernel(self, kernel_id: str, timeout: float | None = None) -> None:
        call = calls.delete_kernel(kernel_id, timeout)
        self.carry_out(call, timeout_s=patience_s(self._timeout_s, timeout))

    @overload
    def stats(self) -> list[KernelUseView]: ...

    @overload
    def stats(self, kernel_id: str) -> KernelUseView: ...

    def stats(self, kernel_id: str | None = None) -> list[KernelUseView] | KernelUseView:
        if kernel_id is None:
            return self.carry_out(calls.stats())
        return self.carry_out(calls.kernel_stats(kernel_id))

    def logs(self, kernel_id: str, **options: Any) -> Iterator[bytes]:
        """Yield a kernel's output; `follow`, `tail`, `since`, `timestamps`, `stream`."""
        endless_s = CREATE_TIMEOUT_S if options.get("follow") else None
        response = self.open(calls.logs(kernel_id, **options), endless_s)
        try:
            while chunk := response.read1(CHUNK):
                yield chunk
        except (OSError, http.client.HTTPException) as error:
            raise unreachable(self._where, error) from None

    def events(self, *, after: str | None = None) -> Iterator[NodeEvent]:
        """Yield events of the node after the event `after`, until the node stops."""
        frames = Frames()
        try:
            for line in self.open(calls.events(after), SILENCE_S):
                if (event := frames.read(line)) is not None:
                    yield event
        except (OSError, http.client.HTTPException) as error:
            raise unreachable(self._where, error) from None

    def metrics(self) -> str:
        return self.open(calls.metrics()).read().decode()

    def openapi(self) -> dict[str, Any]:
        return self.carry_out(calls.openapi())

    def alive(self) -> None:
        self.carry_out(calls.alive())

    def ready(self) -> None:
        self.carry_out(calls.ready())

    @property
    def _where(self) -> str:
        return self._url or self._socket_path

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._url is None:
            return _UnixConnection(self._socket_path, timeout_s)
        parts = urlsplit(self._url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("invalid address: expected http://HOST:PORT or https://HOST:PORT")
        place = parts.hostname, parts.port
        if parts.scheme == "https":
            return http.client.HTTPSConnection(*place, timeout=timeout_s, context=client_tls())
        return http.client.HTTPConnection(*place, timeout=timeout_s)
