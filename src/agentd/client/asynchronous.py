"""The asyncio client of one daemon, for schedulers, the fleet and other programs.

`docs/generate.py` makes the blocking client from this module, without `async` and `await`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, overload

from agentd.client.calls import Call, label_parameters
from agentd.client.defaults import CREATE_TIMEOUT_S, stop_timeout_s
from agentd.client.paths import api_path
from agentd.client.stream_calls import StreamCalls
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
        """Create a kernel; a request without `kernel_id` gets one, so that it can be repeated."""
        body = {"kernel_id": f"k-{uuid.uuid4().hex[:12]}", **request}
        headers = {} if wait else {"Prefer": "respond-async"}
        call: Call[KernelView] = Call(
            "POST", api_path("agents", agent_id, "kernels"), body, headers
        )
        return await self.execute(call, timeout_s=timeout_s)

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
        """Send a signal such as "INT" to the kernel's first process."""
        path = api_path("kernels", kernel_id, "signal")
        await self.execute(Call("POST", path, {"signal": signal}))

    async def delete_kernel(
        self, kernel_id: str, timeout: float | None = None, node: str | None = None
    ) -> None:
        """Stop and delete a kernel; `node` is for a gateway, if the fleet did not place it."""
        call: Call[None] = Call(
            "DELETE", api_path("kernels", kernel_id, timeout=timeout, node=node)
        )
        await self.execute(call, timeout_s=stop_timeout_s(self._timeout_s, timeout))

    async def create_claim(self, agent_id: str, request: Mapping[str, Any]) -> ClaimView:
        """Claim devices; a request without `claim_id` gets one, so that it can be repeated."""
        body = {"claim_id": f"c-{uuid.uuid4().hex[:12]}", **request}
        return await self.execute(Call("POST", api_path("agents", agent_id, "claims"), body))

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

    async def set_engine(self, engine: str, *, ready: bool) -> EngineView:
        return await self.execute(Call("PUT", api_path("engines", engine), {"ready": ready}))

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
