"""Requests for claims: create, renew and release. `ClaimEnds` ends them.

The record of a claim is in place before the create is answered, and removed before its devices are
free. Deciding and charging happen without an `await` between them. A claim that kernels use ends
once they let go of it; whether a create from it succeeded shows in the kernel (`on_kernel_change`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakValueDictionary

import structlog
from msgspec.structs import replace

from agentd.core.access import Caller
from agentd.core.allocation.ledger import holder_text
from agentd.core.claim.claim import (
    MAX_CLAIMS,
    Claim,
    ClaimSpec,
    ClaimStatus,
    Collision,
    EditsTarget,
    EndReason,
    NameHolder,
    ProcessHolder,
    TimeHolder,
    merge_allocations,
)
from agentd.core.claim.record import encode
from agentd.core.kernel.edits import ContainerEdits
from agentd.core.kernel.states import STARTING, Kernel, KernelState
from agentd.errors import ClaimConflict, TooManyClaims, UnknownClaim
from agentd.events import EventKind
from agentd.failpoints import hit_async
from agentd.host.claim_holders import max_process_holders
from agentd.plugin_api import Features
from agentd.services.claims.claim_ends import ClaimEnds
from agentd.services.node import Node, NodeContext
from agentd.services.planner import Planner
from agentd.services.protocols import Plugins
from agentd.state.folder import StateFolder

log = structlog.get_logger()

FEATURES: Mapping[EditsTarget, Features] = {
    EditsTarget.PROCESS: Features("process"),
    EditsTarget.CONTAINER: Features("docker", cdi=True, cdi_spec_dirs=("/etc/cdi", "/var/run/cdi")),
}
"""The features for which plugins return the edits, by the target of the edits."""


class ClaimService:
    """The claims of the node."""

    def __init__(
        self,
        node: Node,
        context: NodeContext,
        planner: Planner,
        plugins: Plugins,
        store: StateFolder,
        ends: ClaimEnds,
    ) -> None:
        self._state, self._devices = node.state, node.devices
        self._planner = planner
        self._plugins = plugins
        self._store = store
        self._ends = ends
        self._node_id, self._boot_id = context.node_id, context.boot_id
        self._clock = context.clock
        self._events, self._counts = node.events, node.claim_counts
        self._pending: set[str] = set()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def get(self, claim_id: str) -> ClaimStatus:
        """Return a claim as it is now.

        Raises:
            UnknownClaim: there is none of that id.
        """
        claim = self._state.claim(claim_id)
        if claim_id in self._pending:
            raise UnknownClaim.of(claim_id)
        return self.status(claim)

    def recorded_claims(self) -> list[Claim]:
        """Return every claim whose create has finished."""
        return [c for c in self._state.claims.values() if c.claim_id not in self._pending]

    def status(self, claim: Claim) -> ClaimStatus:
        """Return a claim with the time that it has left, and whether kernels use it."""
        is_used = bool(self._state.claim_kernels(claim.claim_id))
        return ClaimStatus(claim, is_used, self._ends.expires_at(claim.claim_id))

    def find_existing(self, spec: ClaimSpec) -> Claim | None:
        """Return the claim that the same request made before.

        Raises:
            UnknownAgent: there is no such agent.
            ClaimConflict: another request made it, or a kernel holds devices of an earlier one.
        """
        self._devices.partition(spec.agent_id)
        known = self._state.claims.get(spec.claim_id)
        if known is not None and known.request_hash != spec.request_hash:
            if known.agent_id != spec.agent_id:
                raise ClaimConflict(f"claim id {spec.claim_id} is taken")
            raise ClaimConflict(f"claim {spec.claim_id} exists, made by another request")
        if known is None:
            for kernel in self._state.claim_kernels(spec.claim_id).values():
                is_own = kernel.agent_id == spec.agent_id
                user = f"kernel {kernel.kernel_id}" if is_own else "a kernel"
                raise ClaimConflict(f"claim id {spec.claim_id} stays taken until {user} has ended")
        return known

    async def create(self, spec: ClaimSpec) -> tuple[ClaimStatus, bool]:
        """Take devices for a claim, or return the claim that the same request made before.

        Raises:
            RequestError: it cannot be granted.
            PluginUnavailable, StateUnavailable: nothing is held.
        """
        async with self._locks.setdefault(spec.claim_id, asyncio.Lock()):
            if (known := self.find_existing(spec)) is not None:
                return self.status(known), False
            with self._counts.count_request(spec.agent_id):
                claim = await self._charge_and_record(self._decide(spec))
        log.info("claim.created", claim_id=claim.claim_id, agent_id=claim.agent_id)
        self._publish_collisions(claim)
        return self.status(claim), True

    def _decide(self, spec: ClaimSpec) -> Claim:
        """Choose the devices of a claim; changes nothing.

        Raises:
            RequestError: it cannot be granted.
        """
        request = self._planner.parse_claim_request(spec)
        self._require_room(spec)
        decision = self._planner.decide_claim(spec, request, self._state)
        return Claim(
            claim_id=spec.claim_id,
            agent_id=spec.agent_id,
            holder=spec.holder,
            request_hash=spec.request_hash,
            created_at=self._clock.wall(),
            boot_id=self._boot_id,
            slots=decision.slots,
            allocation=decision.allocation,
            edits_for=spec.edits_for,
            labels=spec.labels,
            created_by=spec.created_by,
            owner_uid=spec.owner_uid,
            is_observed=spec.is_observed,
        )

    def _require_room(self, spec: ClaimSpec) -> None:
        """Refuse a claim beyond the bounds of the node or of its agent.

        Raises:
            TooManyClaims: names the agent and the bound.
        """
        claims, agents = self._state.claims.values(), len(self._devices.split.partitions)
        own = [claim.holder for claim in claims if claim.agent_id == spec.agent_id]
        bounds = [(f"agent {spec.agent_id}", "claims", len(own), MAX_CLAIMS // agents)]
        bounds += [("this node", "claims", len(claims), MAX_CLAIMS)]
        if isinstance(spec.holder, ProcessHolder):
            count = sum(isinstance(holder, ProcessHolder) for holder in own)
            bound = max_process_holders() // agents
            bounds += [(f"agent {spec.agent_id}", "claims that end with a process", count, bound)]
        for owner, things, count, bound in bounds:
            if count >= bound:
                raise TooManyClaims(f"{owner} has {count} {things}, the maximum is {bound}")

    async def _charge_and_record(self, claim: Claim) -> Claim:
        """Charge a claim, ask the plugins for its edits, and record it; or hold nothing."""
        claim_id = claim.claim_id
        self._pending.add(claim_id)
        self._state.close_claim(claim_id)
        self._state.put_claim(claim)
        try:
            await hit_async("claim.after_commit")
            features = FEATURES[claim.edits_for]
            edits = await self._plugins.container_edits(claim.allocation, features)
            claim = replace(self._state.claim(claim_id), edits=edits)
            self._save(claim)
        except BaseException:
            self._state.drop_claim(claim_id)
            self._events.publish(EventKind.FREE, claim, is_of_shares=True)
            raise
        finally:
            self._pending.discard(claim_id)
        self._state.put_claim(claim)
        self._ends.start_watching(claim)
        self._publish(claim_id)
        return claim

    def _save(self, claim: Claim) -> None:
        is_lasting = isinstance(claim.holder, NameHolder) and claim.holder.survives_reboot
        text = encode(claim, self._node_id)
        self._store.save_claim(claim.claim_id, text, is_lasting=is_lasting)

    async def edits_of(
        self, claim_ids: Sequence[str], edits_for: EditsTarget, caller: Caller
    ) -> ContainerEdits:
        """Ask the plugins for the edits of several claims together, each device once.

        Raises:
            UnknownClaim: there is no such claim, or it is not the caller's.
            ClaimConflict: the record of one cannot be read.
            PluginUnavailable: a plugin did not answer.
        """
        claims = [self._get_owned(claim_id, caller) for claim_id in dict.fromkeys(claim_ids)]
        for claim in claims:
            claim.require_readable()
        allocation = merge_allocations([claim.allocation for claim in claims])
        return await self._plugins.container_edits(allocation, FEATURES[edits_for])

    def renew(self, claim_id: str, ttl: int | None, caller: Caller) -> ClaimStatus:
        """Restart the time limit of a claim, or set another one.

        Raises:
            UnknownClaim: there is none, or it is not the caller's.
            ClaimConflict: it has no time limit, or its time is over.
            StateUnavailable: nothing changed.
        """
        claim = self._get_owned(claim_id, caller)
        if not isinstance(claim.holder, TimeHolder):
            raise ClaimConflict(f"claim {claim_id} has no time limit")
        if self._ends.is_ending(claim_id):
            raise ClaimConflict(f"the time of claim {claim_id} is over")
        ttl = claim.holder.ttl if ttl is None else ttl
        claim = replace(claim, holder=TimeHolder(ttl))
        self._save(claim)
        self._state.put_claim(claim)
        self._ends.restart_time(claim_id, ttl)
        self._publish(claim_id, is_of_shares=False)
        return self.status(claim)

    def release(self, claim_id: str, caller: Caller) -> None:
        """End a claim for its caller.

        Raises:
            UnknownClaim: there is none, or it is not the caller's.
            ClaimConflict: kernels use it.
            StateUnavailable: nothing changed.
        """
        self._get_owned(claim_id, caller)
        if users := self._state.claim_kernels(claim_id):
            raise ClaimConflict(f"claim {claim_id} is used by kernel {', '.join(users)}")
        self._ends.end(claim_id, EndReason.RELEASED)

    def _get_owned(self, claim_id: str, caller: Caller) -> Claim:
        claim = self._state.claim(claim_id)
        if claim_id in self._pending or not claim.may_be_used_by(caller):
            raise UnknownClaim.of(claim_id)
        return claim

    def on_kernel_change(self, before: Kernel | None, now: Kernel | None) -> None:
        """Follow a kernel that takes its devices from a claim.

        One that begins to run takes them over, unless the claim outlives it. One that had ended is
        of an earlier claim of this id, even if it runs again.
        """
        kernel = now or before
        if kernel is None or kernel.claim_id is None:
            return
        claim = self._state.claims.get(kernel.claim_id)
        if claim is None or claim.claim_id in self._pending:
            return
        begins = before is None or before is now or before.state in STARTING
        is_held = begins and (before or kernel).holds_devices
        has_run = now is not None and now.state not in STARTING | {KernelState.FAILED}
        if is_held and has_run and not kernel.keeps_claim:
            self._ends.mark_used(claim.claim_id)
        is_step = now is None or before is None or before.holds_devices != now.holds_devices
        self._ends.try_end(claim.claim_id)
        if is_step and claim.claim_id in self._state.claims:
            self._publish(claim.claim_id)

    def resume_claims(self, claims: Iterable[Claim]) -> None:
        """Resume the claims of the state folder, after its kernels were restored.

        Each has its whole time again, since its holder could not renew it.
        """
        for claim in claims:
            self._ends.resume(claim, self._boot_id)
        for kernel in list(self._state):
            self.on_kernel_change(kernel, kernel)

    def _publish_collisions(self, claim: Claim) -> None:
        """Publish the devices of an observed claim that others hold too."""
        if not claim.is_observed:
            return
        for share in claim.allocation.shares:
            device = self._devices.inventory.by_id[share.device_id]
            if self._state.ledger.excess(device):
                holders = tuple(self._state.ledger.holders(device.device_id))
                names = ", ".join(map(holder_text, holders))
                log.warning("claim.collided", device=str(device.device_id), holders=names)
                self._events.publish(EventKind.COLLISION, Collision(device.device_id, holders))

    def _publish(self, claim_id: str, *, is_of_shares: bool = True) -> None:
        status = self.status(self._state.claim(claim_id))
        self._events.publish(EventKind.CLAIM, status, is_of_shares=is_of_shares)
