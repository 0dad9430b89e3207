"""Requests to the fleet: a node's request for a kernel, with placement constraints."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace
from pydantic import Field

from agentd.core.access import Caller, require_unreserved_id
from agentd.core.slots import WrittenFloat
from agentd.errors import InvalidRequest, Problem
from agentd.http.bodies import Body, Labels, Names
from agentd.rpc.requests import CreateKernelRequest
from agentd_fleet.placement.choice import Constraints, PlacementPolicy


class Placement(Body):
    """Placement constraints; a missing member constrains nothing."""

    nodes: Names | None = Field(default=None, description="Only these nodes.")
    agents: Names | None = Field(default=None, description="Only these agents.")
    labels: Labels = Field(default_factory=dict, description="Nodes with all of these labels.")
    models: Names | None = Field(
        default=None, description="Agents with at least one device of one of these models."
    )
    policy: Annotated[PlacementPolicy, Field(strict=False)] | None = Field(
        default=None, description="Choice among the agents with room. Default: that of the gateway."
    )


class FleetKernelRequest(CreateKernelRequest):
    """A node's request for a kernel, with `placement`."""

    placement: Annotated[Placement, Field(description="Placement constraints.")] = Placement()


class PlacementRequest(msgspec.Struct, frozen=True):
    """A request for a kernel as the fleet handles it, once for its `kernel_id`."""

    kernel_id: str
    request_hash: str
    attempt: str
    """The mark of the attempt, empty if the request has none."""
    slots: Mapping[str, object]
    """Amounts to be free; none for a claim, whose node alone knows its devices."""
    constraints: Constraints
    policy: PlacementPolicy | None
    body: bytes
    is_new: bool
    """Whether the gateway generated the kernel id, so that it cannot be in use."""
    headers: Mapping[str, str] = {}
    has_claim: bool = False

    def as_attempt(self, attempt: str) -> PlacementRequest:
        """Return the request with the mark of the attempt that it repeats."""
        if attempt == self.attempt:
            return self
        members = {**msgspec.json.decode(self.body), "attempt": attempt}
        return replace(self, attempt=attempt, body=msgspec.json.encode(members))


def to_placement_request(
    request: FleetKernelRequest, caller: Caller, headers: Mapping[str, str] | None = None
) -> PlacementRequest:
    """Convert a client's request; only the caller's own agents are suitable.

    Raises:
        InvalidRequest: it names devices or a claim without naming exactly one node.
        Forbidden: only an engine may choose its kernel id.
    """
    require_unreserved_id(caller, request.kernel_id)
    placement = request.placement
    for member, value in (("devices", request.devices), ("claim", request.claim)):
        if value and (placement.nodes is None or len(placement.nodes) != 1):
            reason = f"{member} belong{'s' * (member == 'claim')} to one node"
            reason += ": name exactly that node in placement.nodes"
            raise InvalidRequest([Problem(member, reason)])
    agents = None if placement.agents is None else frozenset(placement.agents)
    if caller.agents is not None:
        agents = caller.agents if agents is None else agents & caller.agents
    kernel_id = request.kernel_id or f"k-{uuid.uuid4().hex[:12]}"
    content = request.model_dump(mode="json", exclude_unset=True, exclude={"placement", "slots"})
    content |= {"kernel_id": kernel_id, "slots": dict(request.slots)}
    placement_members = placement.model_dump(mode="json", exclude_defaults=True)
    hashed = msgspec.json.encode([request.digest(), placement_members], order="deterministic")
    return PlacementRequest(
        kernel_id=kernel_id,
        request_hash=sha256(hashed).hexdigest()[:32],
        attempt=request.attempt or "",
        slots={} if request.claim else request.slots,
        constraints=Constraints(
            nodes=None if placement.nodes is None else frozenset(placement.nodes),
            agents=agents,
            labels=placement.labels,
            models=None if placement.models is None else frozenset(placement.models),
            has_image=request.image is not None,
        ),
        policy=placement.policy,
        body=msgspec.json.encode(content, enc_hook=_encode_amount),
        is_new=request.kernel_id is None,
        headers=headers or {},
        has_claim=request.claim is not None,
    )


def _encode_amount(amount: Any) -> str:
    """Return an amount of `slots` as it was written."""
    if isinstance(amount, WrittenFloat):
        return amount.text
    raise NotImplementedError(type(amount))
