"""The asyncio client of one daemon, for schedulers, the fleet and other programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, overload

import aiohttp

from agentd.client import calls
from agentd.client.calls import Call
from agentd.client.defaults import (
    CHUNK,
    CREATE_TIMEOUT_S,
    SILENCE_S,
    patience_s,
)
from agentd.client.errors import unreachable
from agentd.client.events import Frames, NodeEvent
from agentd.client.exec import Execution
from agentd.client.transport import Transport
from agentd.errors import Refused, Unavailable, Unreachable
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

RECONNECT_S = 1.0


class AsyncClient(Transport):
    """A client of one daemon, over its socket (default: the system's) or TCP with a token.

        async with AsyncClient() as node:
            kernel = await node.create_kernel("agent-1", {"command": ["true"]})

    Refusals are raised as the classes of `agentd.errors`; a daemon that does not answer in
    `timeout_s` is `Unreachable`. Answers of 503 are retried after their Retry-After, for at most
    `timeout_s`.
    """

    async def node(self, *, check: bool = False) -> NodeView:
        return await self.carry_out(calls.node(check=check))

    async def whoami(self) -> CallerView:
        return await self.carry_out(calls.whoami())

    async def reload(self) -> ReloadView:
        return await self.carry_out(calls.reload())

    async def runtimes(self) -> list[RuntimeView]:
        return await self.carry_out(calls.runtimes())

    async def forget_runtime(self, name: str) -> None:
        await self.carry_out(calls.forget_runtime(name))

    async def refusals(self) -> list[RefusalView]:
        return await self.carry_out(calls.refusals())

    async def plugins(self) -> list[PluginView]:
        return await self.carry_out(calls.plugins())

    async def retry_plugin(self, name: str) -> PluginView:
        return await self.carry_out(calls.retry_plugin(name))

    async def slot_types(self) -> list[SlotTypeView]:
        return await self.carry_out(calls.slot_types())

    async def devices(self) -> list[DeviceView]:
        return await self.carry_out(calls.devices())

    async def drain(self, device_name: str, device_id: str) -> DeviceView:
        return await self.carry_out(calls.drain(device_name, device_id))

    async def undrain(self, device_name: str, device_id: str) -> DeviceView:
        return await self.carry_out(calls.undrain(device_name, device_id))

    async def forget_device(self, device_name: str, device_id: str) -> None:
        await self.carry_out(calls.forget_device(device_name, device_id))

    async def agents(self) -> list[AgentView]:
        return await self.carry_out(calls.agents())

    async def agent(self, agent_id: str) -> AgentView:
        return await self.carry_out(calls.agent(agent_id))

    async def create_kernel(
        self,
        agent_id: str,
        request: Mapping[str, Any],
        *,
        wait: bool = True,
        timeout_s: float = CREATE_TIMEOUT_S,
    ) -> KernelView:
        """Create a kernel; a request without `kernel_id` gets one, so that it can be repeated."""
        return await self.carry_out(
            calls.create_kernel(agent_id, request, wait=wait), timeout_s=timeout_s
        )

    async def explain(self, agent_id: str, request: Mapping[str, Any]) -> DecisionView:
        """Return the decision that a create would get now, with its explanation."""
        return await self.carry_out(calls.explain(agent_id, request))

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
        call = calls.kernels(
            agent_id, state=state, labels=labels, limit=limit, after=after, claim=claim
        )
        return await self.carry_out(call)

    async def kernel(self, kernel_id: str) -> KernelView:
        return await self.carry_out(calls.kernel(kernel_id))

    async def stop_kernel(self, kernel_id: str, timeout: float | None = None) -> KernelView:
        call = calls.stop_kernel(kernel_id, timeout)
        return await self.carry_out(call, timeout_s=patience_s(self._timeout_s, timeout))

    async def create_claim(self, agent_id: str, request: Mapping[str, Any]) -> ClaimView:
        """Claim devices; a request without `claim_id` gets one, so that it can be repeated."""
        return await self.carry_out(calls.create_claim(agent_id, request))

    async def claims(
        self,
        agent_id: str | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[ClaimView]:
        call = calls.claims(agent_id, labels=labels, limit=limit, after=after)
        return await self.carry_out(call)

    async def claim(self, claim_id: str) -> ClaimView:
        return await self.carry_out(calls.claim(claim_id))

    async def renew_claim(self, claim_id: str, ttl: int | None = None) -> ClaimView:
        return await self.carry_out(calls.renew_claim(claim_id, ttl))

    async def release_claim(self, claim_id: str) -> None:
        await self.carry_out(calls.release_claim(claim_id))

    async def edits(self, claim_ids: Sequence[str], edits_for: str = "process") -> EditsView:
        return await self.carry_out(calls.edits(claim_ids, edits_for))

    async def engines(self) -> list[EngineView]:
        return await self.carry_out(calls.engines())

    async def set_engine(self, engine: str, *, ready: bool) -> EngineView:
        return await self.carry_out(calls.set_engine(engine, ready=ready))

    async def delete_kernel(self, kernel_id: str, timeout: float | None = None) -> None:
        call = calls.delete_kernel(kernel_id, timeout)
        await self.carry_out(call, timeout_s=patience_s(self._timeout_s, timeout))

    @asynccontextmanager
    async def exec(
        self,
        kernel_id: str,
        command: Sequence[str],
        *,
        tty: bool = False,
        env: Mapping[str, str] | None = None,
        working_dir: str | None = None,
        node: str | None = None,
    ) -> AsyncIterator[Execution]:
        """Run a command in a kernel; see `Execution`.

        At a gateway `node` names the kernel's node, if the fleet did not place it.
        """
        wire = await self._connected(calls.run_inside(kernel_id, node))
        asked = {"command": list(command), "tty": tty, "env": dict(env or {})}
        await wire.send_json({**asked, "working_dir": working_dir})
        async with Execution(wire, self._where) as execution:
            yield execution

    @overload
    async def stats(self) -> list[KernelUseView]: ...

    @overload
    async def stats(self, kernel_id: str) -> KernelUseView: ...

    async def stats(self, kernel_id: str | None = None) -> list[KernelUseView] | KernelUseView:
        if kernel_id is None:
            return await self.carry_out(calls.stats())
        return await self.carry_out(calls.kernel_stats(kernel_id))

    async def logs(
        self,
        kernel_id: str,
        *,
        follow: bool = False,
        tail: int | None = None,
        since: str | float | None = None,
        timestamps: bool = False,
        stream: str | None = None,
    ) -> AsyncIterator[bytes]:
        """Yield a kernel's output as it arrives; with `follow` until the kernel ends."""
        call = calls.logs(
            kernel_id,
            follow=follow,
            tail=tail,
            since=since,
            timestamps=timestamps,
            stream=stream,
        )
        async with await self._streamed(call) as response:
            try:
                async for chunk in response.content.iter_chunked(CHUNK):
                    yield chunk
            except aiohttp.ClientError as error:
                raise unreachable(self._where, error) from None

    async def _streamed(
        self, call: Call[bytes], *, silence_s: float | None = None
    ) -> aiohttp.ClientResponse:
        """Open a stream, whose answer must begin in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._opened(call, silence_s=silence_s)
        except TimeoutError:
            why = f"no answer within {self._timeout_s:g} s"
            raise Unreachable(f"{self._where}: {why}") from None

    @asynccontextmanager
    async def listening(
        self, *, after: str | None = None
    ) -> AsyncIterator[AsyncIterator[NodeEvent]]:
        """Listen to new events over one connection, and end with it.

        Raises:
            AgentdError: the events are not available.
        """
        stream = await self._streamed(calls.events(after), silence_s=SILENCE_S)
        async with stream as response:
            yield _events_of(response.content.iter_any(), self._max_bytes)

    async def events(self, *, after: str | None = None) -> AsyncIterator[NodeEvent]:
        """Yield events of the node forever, and reconnect after a lost connection.

        If events were missed, one of kind `reset` asks the reader to list everything again.
        """
        is_again = False
        while True:
            try:
                async with self.listening(after=after) as events:
                    if is_again and after is None:
                        yield NodeEvent("reset", {"reason": "the connection was lost"}, "")
                    is_again = True
                    async for event in events:
                        after = event.id
                        yield event
            except Unavailable:
                pass
            await asyncio.sleep(RECONNECT_S)

    async def metrics(self) -> str:
        content, _ = await self._answer(calls.metrics(), self._timeout_s)
        return content.decode()

    async def openapi(self) -> dict[str, Any]:
        return await self.carry_out(calls.openapi())

    async def alive(self) -> None:
        await self.carry_out(calls.alive())

    async def ready(self) -> None:
        await self.carry_out(calls.ready())


async def _events_of(chunks: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[NodeEvent]:
    """Yield the events of a stream until its connection ends.

    A line may be as long as a kernel's command and labels.

    Raises:
        Refused: a line exceeds `max_bytes`, or is not an event.
    """
    frames, rest = Frames(), bytearray()
    with suppress(aiohttp.ClientError, TimeoutError):
        async for chunk in chunks:
            rest += chunk
            if b"\n" in chunk:
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    if (event := frames.read(line)) is not None:
                        yield event
            if len(rest) > max_bytes:
                raise Refused("Internal", f"an event exceeds {max_bytes} bytes", {})
