"""The blocking client of one daemon, for command lines and scripts.

Generated from `asynchronous.py` by `docs/generate.py`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, overload

from agentd.client.calls import Call, labels_of
from agentd.client.defaults import CREATE_TIMEOUT_S, patience_s
from agentd.client.paths import at
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
        return self.carry_out(Call("GET", at("node", check=check)))

    def whoami(self) -> CallerView:
        return self.carry_out(Call("GET", at("whoami")))

    def reload(self) -> ReloadView:
        return self.carry_out(Call("POST", at("reload")))

    def runtimes(self) -> list[RuntimeView]:
        return self.carry_out(Call("GET", at("runtimes")))

    def forget_runtime(self, name: str) -> None:
        self.carry_out(Call("DELETE", at("runtimes", name)))

    def refusals(self) -> list[RefusalView]:
        return self.carry_out(Call("GET", at("refusals")))

    def plugins(self) -> list[PluginView]:
        return self.carry_out(Call("GET", at("plugins")))

    def retry_plugin(self, name: str) -> PluginView:
        return self.carry_out(Call("POST", at("plugins", name, "retry")))

    def slot_types(self) -> list[SlotTypeView]:
        return self.carry_out(Call("GET", at("slot-types")))

    def devices(self) -> list[DeviceView]:
        return self.carry_out(Call("GET", at("devices")))

    def drain(self, device_name: str, device_id: str) -> DeviceView:
        return self.carry_out(Call("POST", at("devices", device_name, device_id, "drain")))

    def undrain(self, device_name: str, device_id: str) -> DeviceView:
        return self.carry_out(Call("POST", at("devices", device_name, device_id, "undrain")))

    def forget_device(self, device_name: str, device_id: str) -> None:
        self.carry_out(Call("DELETE", at("devices", device_name, device_id)))

    def agents(self) -> list[AgentView]:
        return self.carry_out(Call("GET", at("agents")))

    def agent(self, agent_id: str) -> AgentView:
        return self.carry_out(Call("GET", at("agents", agent_id)))

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
        call: Call[KernelView] = Call("POST", at("agents", agent_id, "kernels"), body, headers)
        return self.carry_out(call, timeout_s=timeout_s)

    def explain(self, agent_id: str, request: Mapping[str, Any]) -> DecisionView:
        """Return the decision that a create would get now, with its explanation."""
        path = at("agents", agent_id, "kernels", dry_run=True)
        return self.carry_out(Call("POST", path, request))

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
        label = labels_of(labels)
        path = at(*parts, state=state, label=label, limit=limit, after=after, claim=claim)
        return self.carry_out(Call("GET", path, is_paged=limit is None))

    def kernel(self, kernel_id: str) -> KernelView:
        return self.carry_out(Call("GET", at("kernels", kernel_id)))

    def stop_kernel(self, kernel_id: str, timeout: float | None = None) -> KernelView:
        body = {} if timeout is None else {"timeout": timeout}
        call: Call[KernelView] = Call("POST", at("kernels", kernel_id, "stop"), body)
        return self.carry_out(call, timeout_s=patience_s(self._timeout_s, timeout))

    def delete_kernel(
        self, kernel_id: str, timeout: float | None = None, node: str | None = None
    ) -> None:
        """Stop and delete a kernel; `node` is for a gateway, if the fleet did not place it."""
        call: Call[None] = Call("DELETE", at("kernels", kernel_id, timeout=timeout, node=node))
        self.carry_out(call, timeout_s=patience_s(self._timeout_s, timeout))

    def create_claim(self, agent_id: str, request: Mapping[str, Any]) -> ClaimView:
        """Claim devices; a request without `claim_id` gets one, so that it can be repeated."""
        body = {"claim_id": f"c-{uuid.uuid4().hex[:12]}", **request}
        return self.carry_out(Call("POST", at("agents", agent_id, "claims"), body))

    def claims(
        self,
        agent_id: str | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[ClaimView]:
        label = labels_of(labels)
        path = at("claims", agent=agent_id, label=label, limit=limit, after=after)
        return self.carry_out(Call("GET", path, is_paged=limit is None))

    def claim(self, claim_id: str) -> ClaimView:
        return self.carry_out(Call("GET", at("claims", claim_id)))

    def renew_claim(self, claim_id: str, ttl: int | None = None) -> ClaimView:
        body = {} if ttl is None else {"ttl": ttl}
        return self.carry_out(Call("POST", at("claims", claim_id, "renew"), body))

    def release_claim(self, claim_id: str) -> None:
        self.carry_out(Call("DELETE", at("claims", claim_id)))

    def edits(self, claim_ids: Sequence[str], edits_for: str = "process") -> EditsView:
        body = {"claims": list(claim_ids), "for": edits_for}
        return self.carry_out(Call("POST", at("edits"), body))

    def engines(self) -> list[EngineView]:
        return self.carry_out(Call("GET", at("engines")))

    def set_engine(self, engine: str, *, ready: bool) -> EngineView:
        return self.carry_out(Call("PUT", at("engines", engine), {"ready": ready}))

    @overload
    def stats(self) -> list[KernelUseView]: ...

    @overload
    def stats(self, kernel_id: str) -> KernelUseView: ...

    def stats(self, kernel_id: str | None = None) -> list[KernelUseView] | KernelUseView:
        path = at("stats") if kernel_id is None else at("kernels", kernel_id, "stats")
        call: Call[list[KernelUseView] | KernelUseView] = Call("GET", path)
        return self.carry_out(call)

    def metrics(self) -> str:
        content, _ = self._answer(Call("GET", "/metrics"), self._timeout_s)
        return content.decode()

    def openapi(self) -> dict[str, Any]:
        return self.carry_out(Call("GET", at("openapi.json")))

    def alive(self) -> None:
        self.carry_out(Call("GET", "/livez"))

    def ready(self) -> None:
        self.carry_out(Call("GET", "/readyz"))
