"""Every call of the RPC, as a value: what is sent, and the type of what comes back.

Both clients carry these out, so that a route is described in one place.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar

from agentd.client.paths import at, next_query
from agentd.errors import Refused, Unavailable
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


@dataclass(frozen=True)
class Call(Generic[T]):
    """One call; `T` is its answer's type. One that `is_repeatable` may be sent again.

    One that `is_paged` asks for a list without a limit: the clients read all of its pages.
    """

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    is_repeatable: bool = True
    is_paged: bool = False

    def is_worth_another(self, refusal: Unavailable, left_s: float) -> bool:
        """Return whether to send it again: what `refusal` asks to wait for fits what is left."""
        return self.is_repeatable and bool(refusal.content) and refusal.retry_after_s <= left_s

    def next_page(self, link: str | None) -> Self | None:
        """Return the call for the page after an answer with the header `Link`, if there is one.

        It has the path of this call: only the query is taken from the header.

        Raises:
            Refused: it is this page again, as from a cache that does not look at the query.
        """
        query = next_query(link) if self.is_paged else None
        path, _, asked = self.path.partition("?")
        if query is not None and query == asked:
            raise Refused("Internal", f"the page after {self.path} is the same page again", {})
        return None if query is None else replace(self, path=f"{path}?{query}")


def node(*, check: bool = False) -> Call[NodeView]:
    """`GET /v1/node`."""
    return Call("GET", at("node", check=check or None))


def whoami() -> Call[CallerView]:
    """`GET /v1/whoami`."""
    return Call("GET", at("whoami"))


def reload() -> Call[ReloadView]:
    """`POST /v1/reload`."""
    return Call("POST", at("reload"))


def runtimes() -> Call[list[RuntimeView]]:
    """`GET /v1/runtimes`."""
    return Call("GET", at("runtimes"))


def forget_runtime(name: str) -> Call[None]:
    """`DELETE /v1/runtimes/{runtime}`."""
    return Call("DELETE", at("runtimes", name))


def refusals() -> Call[list[RefusalView]]:
    """`GET /v1/refusals`."""
    return Call("GET", at("refusals"))


def plugins() -> Call[list[PluginView]]:
    """`GET /v1/plugins`."""
    return Call("GET", at("plugins"))


def retry_plugin(name: str) -> Call[PluginView]:
    """`POST /v1/plugins/{plugin}/retry`."""
    return Call("POST", at("plugins", name, "retry"))


def slot_types() -> Call[list[SlotTypeView]]:
    """`GET /v1/slot-types`."""
    return Call("GET", at("slot-types"))


def devices() -> Call[list[DeviceView]]:
    """`GET /v1/devices`."""
    return Call("GET", at("devices"))


def drain(device_name: str, device_id: str) -> Call[DeviceView]:
    """`POST /v1/devices/{device_name}/{id}/drain`."""
    return Call("POST", at("devices", device_name, device_id, "drain"))


def undrain(device_name: str, device_id: str) -> Call[DeviceView]:
    """`POST /v1/devices/{device_name}/{id}/undrain`."""
    return Call("POST", at("devices", device_name, device_id, "undrain"))


def forget_device(device_name: str, device_id: str) -> Call[None]:
    """`DELETE /v1/devices/{device_name}/{id}`."""
    return Call("DELETE", at("devices", device_name, device_id))


def agents() -> Call[list[AgentView]]:
    """`GET /v1/agents`."""
    return Call("GET", at("agents"))


def agent(agent_id: str) -> Call[AgentView]:
    """`GET /v1/agents/{agent}`."""
    return Call("GET", at("agents", agent_id))


def create_kernel(
    agent_id: str, request: Mapping[str, Any], *, wait: bool = True
) -> Call[KernelView]:
    """`POST /v1/agents/{agent}/kernels`; with a kernel id, so that it can be repeated."""
    body = {"kernel_id": f"k-{uuid.uuid4().hex[:12]}", **request}
    headers = {} if wait else {"Prefer": "respond-async"}
    return Call("POST", at("agents", agent_id, "kernels"), body, headers)


def explain(agent_id: str, request: Mapping[str, Any]) -> Call[DecisionView]:
    """`POST /v1/agents/{agent}/kernels?dry_run=true`."""
    return Call("POST", at("agents", agent_id, "kernels", dry_run=True), request)


def kernels(
    agent_id: str | None = None,
    *,
    state: str | Sequence[str] | None = None,
    labels: Mapping[str, str] | None = None,
    limit: int | None = None,
    after: str | None = None,
    claim: str | None = None,
) -> Call[list[KernelView]]:
    """`GET /v1/kernels`, or those of one agent."""
    place = ("kernels",) if agent_id is None else ("agents", agent_id, "kernels")
    states = [state] if isinstance(state, str) else list(state or ())
    wanted = [f"{name}={value}" for name, value in (labels or {}).items()]
    query = {"state": states, "label": wanted, "limit": limit, "after": after, "claim": claim}
    return Call("GET", at(*place, **query), is_paged=limit is None)


def kernel(kernel_id: str) -> Call[KernelView]:
    """`GET /v1/kernels/{kernel}`."""
    return Call("GET", at("kernels", kernel_id))


def stop_kernel(kernel_id: str, timeout: float | None = None) -> Call[KernelView]:
    """`POST /v1/kernels/{kernel}/stop`."""
    body = {} if timeout is None else {"timeout": timeout}
    return Call("POST", at("kernels", kernel_id, "stop"), body)


def delete_kernel(kernel_id: str, timeout: float | None = None) -> Call[None]:
    """`DELETE /v1/kernels/{kernel}`."""
    return Call("DELETE", at("kernels", kernel_id, timeout=timeout))


def create_claim(agent_id: str, request: Mapping[str, Any]) -> Call[ClaimView]:
    """`POST /v1/agents/{agent}/claims`; with a claim id, so that it can be repeated."""
    body = {"claim_id": f"c-{uuid.uuid4().hex[:12]}", **request}
    return Call("POST", at("agents", agent_id, "claims"), body)


def claims(
    agent_id: str | None = None,
    *,
    labels: Mapping[str, str] | None = None,
    limit: int | None = None,
    after: str | None = None,
) -> Call[list[ClaimView]]:
    """`GET /v1/claims`."""
    wanted = [f"{name}={value}" for name, value in (labels or {}).items()]
    path = at("claims", agent=agent_id, label=wanted, limit=limit, after=after)
    return Call("GET", path, is_paged=limit is None)


def claim(claim_id: str) -> Call[ClaimView]:
    """`GET /v1/claims/{claim}`."""
    return Call("GET", at("claims", claim_id))


def renew_claim(claim_id: str, ttl: int | None = None) -> Call[ClaimView]:
    """`POST /v1/claims/{claim}/renew`."""
    return Call("POST", at("claims", claim_id, "renew"), {} if ttl is None else {"ttl": ttl})


def release_claim(claim_id: str) -> Call[None]:
    """`DELETE /v1/claims/{claim}`."""
    return Call("DELETE", at("claims", claim_id))


def edits(claim_ids: Sequence[str], edits_for: str = "process") -> Call[EditsView]:
    """`POST /v1/edits`."""
    return Call("POST", at("edits"), {"claims": list(claim_ids), "for": edits_for})


def engines() -> Call[list[EngineView]]:
    """`GET /v1/engines`."""
    return Call("GET", at("engines"))


def set_engine(engine: str, *, ready: bool) -> Call[EngineView]:
    """`PUT /v1/engines/{engine}`."""
    return Call("PUT", at("engines", engine), {"ready": ready})


def logs(
    kernel_id: str,
    *,
    follow: bool = False,
    tail: int | None = None,
    since: str | float | None = None,
    timestamps: bool = False,
    stream: str | None = None,
) -> Call[bytes]:
    """`GET /v1/kernels/{kernel}/logs`."""
    query = {"tail": tail, "since": since, "stream": stream}
    query |= {"follow": follow or None, "timestamps": timestamps or None}
    return Call("GET", at("kernels", kernel_id, "logs", **query), is_repeatable=False)


def run_inside(kernel_id: str, node: str | None = None) -> Call[bytes]:
    """`GET /v1/kernels/{kernel}/exec`, which becomes a WebSocket; `node` is for a gateway."""
    return Call("GET", at("kernels", kernel_id, "exec", node=node))


def stats() -> Call[list[KernelUseView]]:
    """`GET /v1/stats`."""
    return Call("GET", at("stats"))


def kernel_stats(kernel_id: str) -> Call[KernelUseView]:
    """`GET /v1/kernels/{kernel}/stats`."""
    return Call("GET", at("kernels", kernel_id, "stats"))


def events(after: str | None = None) -> Call[bytes]:
    """`GET /v1/events`, from the event after `after` on."""
    headers = {} if after is None else {"Last-Event-ID": after}
    return Call("GET", at("events"), headers=headers, is_repeatable=False)


def metrics() -> Call[bytes]:
    """`GET /metrics`."""
    return Call("GET", "/metrics")


def openapi() -> Call[dict[str, Any]]:
    """`GET /v1/openapi.json`."""
    return Call("GET", at("openapi.json"))


def alive() -> Call[dict[str, str]]:
    """`GET /livez`."""
    return Call("GET", "/livez")


def ready() -> Call[dict[str, str]]:
    """`GET /readyz`."""
    return Call("GET", "/readyz")
