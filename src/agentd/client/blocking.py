"""The blocking client of one daemon, for command lines and scripts.

Generated from `asynchronous.py` by `docs/generate.py`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, overload

from agentd.client.calls import Call, label_parameters
from agentd.client.defaults import CREATE_TIMEOUT_S, stop_timeout_s
from agentd.client.paths import api_path
from agentd.client.transport_blocking import BlockingTransport
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


class Client(BlockingTransport):
    """A client of one daemon, over its socket (default: the system's) or TCP with a token.

    Refusals are raised as the classes of `agentd.errors`; a daemon that does not answer is
    `Unreachable`. Answers of 503 are retried after their Retry-After, for at most `retry_s`.
    """

    def node(self, *, check: bool = False) -> NodeView:
        return self.execute(Call("GET", api_path("node", check=check)))

    def whoami(self) -> CallerView:
        return self.execute(Call("GET", api_path("whoami")))

    def reload(self) -> ReloadView:
        return self.execute(Call("POST", api_path("reload")))

    def runtimes(self) -> list[RuntimeView]:
        return self.execute(Call("GET", api_path("runtimes")))

    def forget_runtime(self, name: str) -> None:
        self.execute(Call("DELETE", api_path("runtimes", name)))

    def refusals(self) -> list[RefusalView]:
        return self.execute(Call("GET", api_path("refusals")))

    def plugins(self) -> list[PluginView]:
        return self.execute(Call("GET", api_path("plugins")))

    def retry_plugin(self, name: str) -> PluginView:
        return self.execute(Call("POST", api_path("plugins", name, "retry")))

    def stop_plugin(self, name: str) -> PluginView:
        return self.execute(Call("POST", api_path("plugins", name, "stop")))

    def start_plugin(self, name: str) -> PluginView:
        return self.execute(Call("POST", api_path("plugins", name, "start")))

    def slot_types(self) -> list[SlotTypeView]:
        return self.execute(Call("GET", api_path("slot-types")))

    def devices(self) -> list[DeviceView]:
        return self.execute(Call("GET", api_path("devices")))

    def drain(self, device_name: str, device_id: str) -> DeviceView:
        path = api_path("devices", device_name, device_id, "drain")
        return self.execute(Call("POST", path))

    def undrain(self, device_name: str, device_id: str) -> DeviceView:
        path = api_path("devices", device_name, device_id, "undrain")
        return self.execute(Call("POST", path))

    def clear_device(self, device_name: str, device_id: str) -> DeviceView:
        path = api_path("devices", device_name, device_id, "clear")
        return self.execute(Call("POST", path))

    def forget_device(self, device_name: str, device_id: str) -> None:
        self.execute(Call("DELETE", api_path("devices", device_name, device_id)))

    def agents(self) -> list[AgentView]:
        return self.execute(Call("GET", api_path("agents")))

    def agent(self, agent_id: str) -> AgentView:
        return self.execute(Call("GET", api_path("agents", agent_id)))

    def create_kernel(
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
        return self.execute(call, timeout_s=timeout_s)

    def explain(self, agent_id: str, request: Mapping[str, Any]) -> DecisionView:
        """Return the decision that a create would get now, with its explanation."""
        path = api_path("agents", agent_id, "kernels", dry_run=True)
        return self.execute(Call("POST", path, request))

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
        """Return the kernels that have all of this; without a limit those of all pages."""
        parts = ("kernels",) if agent_id is None else ("agents", agent_id, "kernels")
        label = label_parameters(labels)
        path = api_path(*parts, state=state, label=label, limit=limit, after=after, claim=claim)
        return self.execute(Call("GET", path, is_paged=limit is None))

    def kernel(self, kernel_id: str) -> KernelView:
        return self.execute(Call("GET", api_path("kernels", kernel_id)))

    def stop_kernel(self, kernel_id: str, timeout: float | None = None) -> KernelView:
        body = {} if timeout is None else {"timeout": timeout}
        call: Call[KernelView] = Call("POST", api_path("kernels", kernel_id, "stop"), body)
        return self.execute(call, timeout_s=stop_timeout_s(self._timeout_s, timeout))

    def signal_kernel(self, kernel_id: str, signal: str) -> None:
        """Send a signal such as "INT" to the kernel's first process."""
        path = api_path("kernels", kernel_id, "signal")
        self.execute(Call("POST", path, {"signal": signal}))

    def delete_kernel(
        self, kernel_id: str, timeout: float | None = None, node: str | None = None
    ) -> None:
        """Stop and delete a kernel; `node` is for a gateway, if the fleet did not place it."""
        call: Call[None] = Call(
            "DELETE", api_path("kernels", kernel_id, timeout=timeout, node=node)
        )
        self.execute(call, timeout_s=stop_timeout_s(self._timeout_s, timeout))

    def create_claim(self, agent_id: str, request: Mapping[str, Any]) -> ClaimView:
        """Claim devices; a request without `claim_id` gets one, so that it can be repeated."""
        body = {"claim_id": f"c-{uuid.uuid4().hex[:12]}", **request}
        return self.execute(Call("POST", api_path("agents", agent_id, "claims"), body))

    def claims(
        self,
        agent_id: str | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[ClaimView]:
        label = label_parameters(labels)
        path = api_path("claims", agent=agent_id, label=label, limit=limit, after=after)
        return self.execute(Call("GET", path, is_paged=limit is None))

    def claim(self, claim_id: str) -> ClaimView:
        return self.execute(Call("GET", api_path("claims", claim_id)))

    def renew_claim(self, claim_id: str, ttl: int | None = None) -> ClaimView:
        body = {} if ttl is None else {"ttl": ttl}
        return self.execute(Call("POST", api_path("claims", claim_id, "renew"), body))

    def release_claim(self, claim_id: str) -> None:
        self.execute(Call("DELETE", api_path("claims", claim_id)))

    def edits(self, claim_ids: Sequence[str], edits_for: str = "process") -> EditsView:
        body = {"claims": list(claim_ids), "for": edits_for}
        return self.execute(Call("POST", api_path("edits"), body))

    def engines(self) -> list[EngineView]:
        return self.execute(Call("GET", api_path("engines")))

    def set_engine(self, engine: str, *, ready: bool) -> EngineView:
        return self.execute(Call("PUT", api_path("engines", engine), {"ready": ready}))

    @overload
    def stats(self) -> list[KernelUseView]: ...

    @overload
    def stats(self, kernel_id: str) -> KernelUseView: ...

    def stats(self, kernel_id: str | None = None) -> list[KernelUseView] | KernelUseView:
        path = api_path("stats") if kernel_id is None else api_path("kernels", kernel_id, "stats")
        call: Call[list[KernelUseView] | KernelUseView] = Call("GET", path)
        return self.execute(call)

    def metrics(self) -> str:
        content, _ = self._fetch(Call("GET", "/metrics"), self._timeout_s)
        return content.decode()

    def openapi(self) -> dict[str, Any]:
        return self.execute(Call("GET", api_path("openapi.json")))

    def alive(self) -> None:
        self.execute(Call("GET", "/livez"))

    def ready(self) -> None:
        self.execute(Call("GET", "/readyz"))
