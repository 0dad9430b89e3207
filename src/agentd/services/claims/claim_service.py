"""Creating, renewing and ending claims.

The record of a claim is in place before the create is answered, and removed before its devices are
free. Deciding and charging happen without an `await` between them. A claim that kernels use ends
once they let go of it; whether a create from it succeeded shows in the kernel (`on_kernel_change`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from weakref import WeakValueDictionary

import structlog
from msgspec.structs import replace

from agentd.concurrency import wait_event
from agentd.core.access import Caller
from agentd.core.allocation.ledger import holder_text
from agentd.core.claim.claim import (
    MAX_CLAIMS,
    CgroupHolder,
    Claim,
    ClaimSpec,
    ClaimStatus,
    Collision,
    EditsTarget,
    EndedClaim,
    EndReason,
    NameHolder,
    ProcessHolder,
    TimeHolder,
    merge_allocations,
)
from agentd.core.claim.record import encode
from agentd.core.kernel.edits import ContainerEdits
from agentd.core.kernel.states import STARTING, Kernel, KernelState
from agentd.errors import ClaimConflict, StateUnavailable, TooManyClaims, UnknownClaim
from agentd.events import EventKind
from agentd.failpoints import hit_async
from agentd.host.claim_holders import HolderObserver
from agentd.plugin_api import Features
from agentd.services.node import Node, NodeContext
from agentd.services.planner import Planner
from agentd.services.protocols import Plugins
from agentd.state.folder import StateFolder

log = structlog.get_logger()

IDLE_PAUSE_S, POLL_PAUSE_S = 3600.0, 0.5
"""Pauses between two checks of all claims.

The shorter one applies while a claim has a time limit, could not be ended, or has a holder that
cannot be observed. Claims are polled, since a timer of the event loop would not count the time in
which the host is suspended.
"""
FEATURES: Mapping[EditsTarget, Features] = {
    EditsTarget.PROCESS: Features("process"),
    EditsTarget.CONTAINER: Features("docker", cdi=True, cdi_spec_dirs=("/etc/cdi", "/var/run/cdi")),
}
"""The features for which plugins return the edits, by the target of the edits."""
_END_REASON_BY_HOLDER = {ProcessHolder: EndReason.PROCESS, CgroupHolder: EndReason.CGROUP}


class ClaimService:
    """The claims of the node, and the ends of their holders."""

    def __init__(
        self,
        node: Node,
        context: NodeContext,
        planner: Planner,
        plugins: Plugins,
        store: StateFolder,
        holders: HolderObserver,
    ) -> None:
        self._state, self._devices = node.state, node.devices
        self._planner = planner
        self._plugins = plugins
        self._store = store
        self._holders = holders
        self._node_id, self._boot_id = context.node_id, context.boot_id
        self._clock = context.clock
        self._events, self._counts = node.events, node.claim_counts
        self._pending: set[str] = set()
        self._deadlines: dict[str, float] = {}
        self._watches: dict[str, Callable[[], None]] = {}
        self._unwatched: set[str] = set()
        self._end_reasons: dict[str, EndReason] = {}
        self._failures: dict[str, str] = {}
        """Why a claim could not be ended or watched when that was last tried."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._woken = asyncio.Event()

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
        deadline = self._deadlines.get(claim.claim_id)
        expires = None
        if deadline is not None:
            expires = self._clock.wall() + max(0.0, deadline - self._clock.uptime())
        return ClaimStatus(claim, bool(self._state.claim_kernels(claim.claim_id)), expires)

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
        if len(self._state.claims) >= MAX_CLAIMS:
            raise TooManyClaims(f"this node has {MAX_CLAIMS} claims, the most it may have")
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
        self._start_watching(claim)
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
        if claim_id in self._end_reasons:
            raise ClaimConflict(f"the time of claim {claim_id} is over")
        ttl = claim.holder.ttl if ttl is None else ttl
        claim = replace(claim, holder=TimeHolder(ttl))
        self._save(claim)
        self._state.put_claim(claim)
        self._deadlines[claim_id] = self._clock.uptime() + ttl
        self._woken.set()
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
        self._end(claim_id, EndReason.RELEASED)

    def _get_owned(self, claim_id: str, caller: Caller) -> Claim:
        claim = self._state.claim(claim_id)
        if claim_id in self._pending or not claim.may_be_used_by(caller):
            raise UnknownClaim.of(claim_id)
        return claim

    def _start_watching(self, claim: Claim) -> None:
        """Observe the holder of a claim from now on, and allow creates from it."""
        claim_id = claim.claim_id
        self._state.open_claim(claim_id)
        if isinstance(claim.holder, TimeHolder):
            self._deadlines[claim_id] = self._clock.uptime() + claim.holder.ttl
            self._woken.set()
        elif type(claim.holder) in _END_REASON_BY_HOLDER:
            self._watch(claim)

    def _watch(self, claim: Claim) -> None:
        claim_id = claim.claim_id
        on_end = partial(self._on_holder_end, claim_id, _END_REASON_BY_HOLDER[type(claim.holder)])
        try:
            self._watches[claim_id] = self._holders.watch(claim.holder, on_end)
        except OSError as error:
            if self._record_failure(claim_id, error):
                log.warning("claim.watch_failed", claim_id=claim_id, reason=str(error))
            self._unwatched.add(claim_id)
            self._woken.set()

    def _on_holder_end(self, claim_id: str, reason: EndReason) -> None:
        """End a claim now if no kernel uses it, else when none does any more."""
        if claim_id not in self._state.claims:
            return
        self._end_reasons.setdefault(claim_id, reason)
        self._state.close_claim(claim_id)
        self._try_end(claim_id)

    def _try_end(self, claim_id: str) -> None:
        """End a claim whose holder has ended or whose devices a kernel took over, if that can be.

        A record that cannot be removed keeps the claim, and is tried again.
        """
        reason = self._end_reasons.get(claim_id)
        if reason is None or (reason is not EndReason.USED and self._state.claim_kernels(claim_id)):
            return
        try:
            self._end(claim_id, reason)
        except StateUnavailable as error:
            if self._record_failure(claim_id, error):
                log.warning("claim.end_failed", claim_id=claim_id, reason=str(error))
            self._woken.set()

    def _record_failure(self, claim_id: str, error: Exception) -> bool:
        """Note why a step failed that is tried again; return whether the reason is another one."""
        before, self._failures[claim_id] = self._failures.get(claim_id), str(error)
        return before != str(error)

    def _end(self, claim_id: str, reason: EndReason) -> None:
        """Remove the record of a claim, then free its devices.

        Raises:
            StateUnavailable: the record is still there; nothing changed.
        """
        claim = self._state.claim(claim_id)
        self._store.drop_claim(claim_id)
        if (stop := self._watches.pop(claim_id, None)) is not None:
            stop()
        self._deadlines.pop(claim_id, None)
        self._end_reasons.pop(claim_id, None)
        self._failures.pop(claim_id, None)
        self._unwatched.discard(claim_id)
        self._state.drop_claim(claim_id)
        self._counts.count_end(claim.agent_id, reason)
        log.info("claim.ended", claim_id=claim_id, agent_id=claim.agent_id, reason=reason.value)
        ended_claim = EndedClaim(claim, reason)
        self._events.publish(EventKind.CLAIM_REMOVED, ended_claim, is_of_shares=True)

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
            self._end_reasons[claim.claim_id] = EndReason.USED
            self._state.close_claim(claim.claim_id)
        is_step = now is None or before is None or before.holds_devices != now.holds_devices
        self._try_end(claim.claim_id)
        if is_step and claim.claim_id in self._state.claims:
            self._publish(claim.claim_id)

    def resume_claims(self, claims: Iterable[Claim]) -> None:
        """Resume the claims of the state folder, after its kernels were restored.

        Each has its whole time again, since its holder could not renew it.
        """
        for claim in claims:
            if claim.is_ended_by_reboot(self._boot_id):
                self._on_holder_end(claim.claim_id, EndReason.REBOOT)
            else:
                self._start_watching(claim)
        for kernel in list(self._state):
            self.on_kernel_change(kernel, kernel)

    async def run(self) -> None:
        """End claims whose time is over, and retry failed steps, until cancelled."""
        while True:
            self._expire_and_retry()
            self._woken.clear()
            is_idle = not (self._deadlines or self._end_reasons or self._unwatched)
            await wait_event(self._woken, IDLE_PAUSE_S if is_idle else POLL_PAUSE_S)

    def _expire_and_retry(self) -> None:
        now = self._clock.uptime()
        for claim_id, deadline in list(self._deadlines.items()):
            if deadline <= now:
                self._on_holder_end(claim_id, EndReason.TIME)
        for claim_id in list(self._end_reasons):
            self._try_end(claim_id)
        for claim_id in list(self._unwatched):
            self._unwatched.discard(claim_id)
            self._watch(self._state.claim(claim_id))

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
