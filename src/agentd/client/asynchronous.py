"""The asyncio client of one daemon, for schedulers, the fleet and other programs.

`docs/generate.py` makes the blocking client from this module, without `async` and `await`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeVar, overload

from agentd.client.calls import Call, label_parameters
from agentd.client.creates import CreateAttempts, claim_request, kernel_request
from agentd.client.defaults import CREATE_TIMEOUT_S, stop_timeout_s
from agentd.client.events import NodeEvent
from agentd.client.following import EventFollower, LogFollower, OnDropped, OnOutage
from agentd.client.paths import api_path
from agentd.client.stream_calls import StreamCalls
from agentd.errors import Unavailable, Unreachable
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

T = TypeVar("T")


class AsyncClient(StreamCalls):
    """A client of one daemon, over its socket (default: the system's) or TCP with a token.

        async with AsyncClient() as node:
            kernel = await node.create_kernel("agent-1", {"command": ["true"]})

    Refusals are raised as the classes of `agentd.errors`; a daemon that does not answer in
    `timeout_s` is `Unreachable`. Answers of 503 are retried after their Retry-After, for at most
    `timeout_s`.
    """

    async def node(self, *, check: bool = False) -> NodeView:
        return await self.execute(Call("GET", api_path("node", check=check)))

    async def whoami(self) -> CallerView:
        return await self.execute(Call("GET", api_path("whoami")))

    async def reload(self) -> ReloadView:
        return await self.execute(Call("POST", api_path("reload")))

    async def runtimes(self) -> list[RuntimeView]:
        return await self.execute(Call("GET", api_path("runtimes")))

    async def forget_runtime(self, name: str) -> None:
        await self.execute(Call("DELETE", api_path("runtimes", name)))

    async def refusals(self) -> list[RefusalView]:
        return await self.execute(Call("GET", api_path("refusals")))

    async def plugins(self) -> list[PluginView]:
        return await self.execute(Call("GET", api_path("plugins")))

    async def retry_plugin(self, name: str) -> PluginView:
        return await self.execute(Call("POST", api_path("plugins", name, "retry")))

    async def stop_plugin(self, name: str) -> PluginView:
        return await self.execute(Call("POST", api_path("plugins", name, "stop")))

    async def start_plugin(self, name: str) -> PluginView:
        return await self.execute(Call("POST", api_path("plugins", name, "start")))

    async def slot_types(self) -> list[SlotTypeView]:
        return await self.execute(Call("GET", api_path("slot-types")))

    async def devices(self) -> list[DeviceView]:
        return await self.execute(Call("GET", api_path("devices")))

    async def drain(self, device_name: str, device_id: str) -> DeviceView:
        path = api_path("devices", device_name, device_id, "drain")
        return await self.execute(Call("POST", path))

    async def undrain(self, device_name: str, device_id: str) -> DeviceView:
        path = api_path("devices", device_name, device_id, "undrain")
        return await self.execute(Call("POST", path))

    async def clear_device(self, device_name: str, device_id: str) -> DeviceView:
        path = api_path("devices", device_name, device_id, "clear")
        return await self.execute(Call("POST", path))

    async def forget_device(self, device_name: str, device_id: str) -> None:
        await self.execute(Call("DELETE", api_path("devices", device_name, device_id)))

    async def agents(self) -> list[AgentView]:
        return await self.execute(Call("GET", api_path("agents")))

    async def agent(self, agent_id: str) -> AgentView:
        return await self.execute(Call("GET", api_path("agents", agent_id)))

    async def create_kernel(
        self,
        agent_id: str,
        request: Mapping[str, Any],
        *,
        wait: bool = True,
        timeout_s: float = CREATE_TIMEOUT_S,
    ) -> KernelView:
        """Create a kernel, and repeat a create whose answer is lost.

        A request without `kernel_id` or `attempt` gets one: the repeats create one kernel. A lost
        answer is asked for again for at most the timeout of the client, and the call takes at most
        `timeout_s`. Every error has the `kernel_id`.

        Raises:
            AgentdError: it was refused, was never sent, or its outcome stayed unknown.
        """
        body = kernel_request(request)
        path, headers = api_path("agents", agent_id, "kernels"), {"Prefer": "respond-async"}
        call: Call[KernelView] = Call(
            "POST", path, body, {} if wait else headers, is_repeatable=False
        )
        return await self.execute_create(call, timeout_s)

    async def execute_create(
        self, call: Call[T], timeout_s: float = CREATE_TIMEOUT_S, member: str = "kernel_id"
    ) -> T:
        """Make a create, and repeat it; `member` names the id in its body."""
        created_id, retry_s, lost_s = (call.body or {})[member], self._retry_s, self._timeout_s
        attempts = CreateAttempts(
            created_id, timeout_s=timeout_s, retry_s=retry_s, lost_s=lost_s, member=member
        )
        with attempts.named_errors():
            while True:
                try:
                    return await self.execute(call, timeout_s=attempts.next_timeout_s())
                except Unavailable as error:
                    pause_s = attempts.pause_s(error)
                await self._sleep(pause_s)

    async def explain(self, agent_id: str, request: Mapping[str, Any]) -> DecisionView:
        """Return the decision that a create would get now, with its explanation."""
        path = api_path("agents", agent_id, "kernels", dry_run=True)
        return await self.execute(Call("POST", path, request))

    async def kernels(
        self,
        agent_id: str | None = None,
        *,
        state: str | Sequence[str] | None = None,
        labels: Mapping[str, str] | None = None,
        limit: int | None = None,
        after: str | None = None,
        claim: str | None = None,
    ) -> list[KernelView]:
        """Return the kernels that have all of this; without a limit those of all pages."""
        parts = ("kernels",) if agent_id is None else ("agents", agent_id, "kernels")
        label = label_parameters(labels)
        path = api_path(*parts, state=state, label=label, limit=limit, after=after, claim=claim)
        return await self.execute(Call("GET", path, is_paged=limit is None))

    async def kernel(self, kernel_id: str) -> KernelView:
        return await self.execute(Call("GET", api_path("kernels", kernel_id)))

    async def stop_kernel(self, kernel_id: str, timeout: float | None = None) -> KernelView:
        body = {} if timeout is None else {"timeout": timeout}
        call: Call[KernelView] = Call("POST", api_path("kernels", kernel_id, "stop"), body)
        return await self.execute(call, timeout_s=stop_timeout_s(self._timeout_s, timeout))

    async def signal_kernel(self, kernel_id: str, signal: str) -> None:
        """Send a signal such as "INT" to the kernel's first process; never twice."""
        path = api_path("kernels", kernel_id, "signal")
        await self.execute(Call("POST", path, {"signal": signal}, is_repeatable=False))

    async def delete_kernel(
        self, kernel_id: str, timeout: float | None = None, node: str | None = None
    ) -> None:
        """Stop and delete a kernel; `node` is for a gateway, if the fleet did not place it."""
        call: Call[None] = Call(
            "DELETE", api_path("kernels", kernel_id, timeout=timeout, node=node)
        )
        await self.execute(call, timeout_s=stop_timeout_s(self._timeout_s, timeout))

    async def logs(
        self,
        kernel_id: str,
        *,
        follow: bool = False,
        tail: int | None = None,
        since: str | float | None = None,
        timestamps: bool = False,
        stream: str | None = None,
        node: str | None = None,
        from_position: int | None = None,
        on_outage: OnOutage = None,
        on_dropped: OnDropped = None,
    ) -> AsyncIterator[bytes]:
        """Yield a kernel's output as it arrives; with `follow` until the kernel ends.

        A log that breaks is resumed by its position: followed for as long as it takes, and else
        while there is progress within the timeout of the client. `on_outage` is called with the
        error at the begin of each outage, `on_dropped` with the positions of bytes that are lost.
        At a gateway `node` names the kernel's node, if the fleet did not place it.

        Raises:
            AgentdError: the log cannot be read, or was cut off before its end.
            OutputDropped: bytes are lost, and there is no `on_dropped`.
        """
        log = LogFollower(
            kernel_id,
            {"follow": follow, "timestamps": timestamps, "stream": stream, "node": node},
            {"tail": tail, "since": since, "from": from_position},
            timeout_s=self._timeout_s,
            on_outage=on_outage,
            on_dropped=on_dropped,
        )
        while True:
            try:
                async with self._stream(log.next_call()) as answer:
                    log.on_answer(answer.headers.get)
                    while chunk := await answer.read():
                        log.on_chunk(chunk)
                        yield chunk
                    return
            except Unavailable as error:
                pause_s = log.pause_s(error)
            await self._sleep(pause_s)

    async def events(
        self, *, after: str | None = None, on_outage: OnOutage = None
    ) -> AsyncIterator[NodeEvent]:
        """Yield events of the node, after the event `after`; only an error ends them.

        After a lost connection they continue after the last one; `on_outage` is called with the
        error at the begin of each outage. If events were missed, one of kind `reset` asks the
        reader to list everything again.

        Raises:
            AgentdError: the events are not available.
        """
        log = EventFollower(after, on_outage, self._max_bytes)
        while True:
            try:
                async with self._stream(log.next_call()) as answer:
                    for event in log.on_answer():
                        yield event
                    while chunk := await answer.read():
                        for event in log.parse(chunk):
                            yield event
                raise Unreachable(f"{self._address}: agentd closed it")
            except Unavailable as error:
                pause_s = log.pause_s(error)
            await self._sleep(pause_s)

    async def create_claim(self, agent_id: str, request: Mapping[str, Any]) -> ClaimView:
        """Claim devices; a request without `claim_id` gets one, as in `create_kernel`."""
        path = api_path("agents", agent_id, "claims")
        call: Call[ClaimView] = Call("POST", path, claim_request(request), is_repeatable=False)
        return await self.execute_create(call, self._timeout_s, "claim_id")

    async def claims(
        self,
        agent_id: str | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[ClaimView]:
        label = label_parameters(labels)
        path = api_path("claims", agent=agent_id, label=label, limit=limit, after=after)
        return await self.execute(Call("GET", path, is_paged=limit is None))

    async def claim(self, claim_id: str) -> ClaimView:
        return await self.execute(Call("GET", api_path("claims", claim_id)))

    async def renew_claim(self, claim_id: str, ttl: int | None = None) -> ClaimView:
        body = {} if ttl is None else {"ttl": ttl}
        return await self.execute(Call("POST", api_path("claims", claim_id, "renew"), body))

    async def release_claim(self, claim_id: str) -> None:
        await self.execute(Call("DELETE", api_path("claims", claim_id)))

    async def edits(self, claim_ids: Sequence[str], edits_for: str = "process") -> EditsView:
        body = {"claims": list(claim_ids), "for": edits_for}
        return await self.execute(Call("POST", api_path("edits"), body))

    async def engines(self) -> list[EngineView]:
        return await self.execute(Call("GET", api_path("engines")))

    async def set_engine(
        self, engine: str, *, ready: bool, conditions: Sequence[Mapping[str, str]] | None = None
    ) -> EngineView:
        body = {"ready": ready} | ({} if conditions is None else {"conditions": [*conditions]})
        return await self.execute(Call("PUT", api_path("engines", engine), body))

    @overload
    async def stats(self) -> list[KernelUseView]: ...

    @overload
    async def stats(self, kernel_id: str) -> KernelUseView: ...

    async def stats(self, kernel_id: str | None = None) -> list[KernelUseView] | KernelUseView:
        path = api_path("stats") if kernel_id is None else api_path("kernels", kernel_id, "stats")
        call: Call[list[KernelUseView] | KernelUseView] = Call("GET", path)
        return await self.execute(call)

    async def metrics(self) -> str:
        content, _ = await self._fetch(Call("GET", "/metrics"), self._timeout_s)
        return content.decode()

    async def openapi(self) -> dict[str, Any]:
        return await self.execute(Call("GET", api_path("openapi.json")))

    async def alive(self) -> None:
        await self.execute(Call("GET", "/livez"))

    async def ready(self) -> None:
        await self.execute(Call("GET", "/readyz"))
