"""Ends of claims: of their time, of their holders, and of those that kernels took over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import structlog

from agentd.concurrency import wait_event
from agentd.core.claim.claim import (
    CgroupHolder,
    Claim,
    EndedClaim,
    EndReason,
    ProcessHolder,
    TimeHolder,
)
from agentd.errors import StateUnavailable
from agentd.events import EventKind
from agentd.host.claim_holders import HolderObserver
from agentd.services.node import Node
from agentd.services.protocols import Clock
from agentd.state.folder import StateFolder

log = structlog.get_logger()

IDLE_PAUSE_S, POLL_PAUSE_S = 3600.0, 0.5
"""Pauses between two checks of all claims.

The shorter one applies while a claim has a time limit, could not be ended, or has a holder that
cannot be observed. Claims are polled, since a timer of the event loop would not count the time in
which the host is suspended.
"""
_END_REASON_BY_HOLDER = {ProcessHolder: EndReason.PROCESS, CgroupHolder: EndReason.CGROUP}


class ClaimEnds:
    """Observes time limits and holders of claims, and ends claims."""

    def __init__(
        self, node: Node, store: StateFolder, holders: HolderObserver, clock: Clock
    ) -> None:
        self._state, self._events, self._counts = node.state, node.events, node.claim_counts
        self._store = store
        self._holders = holders
        self._clock = clock
        self._deadlines: dict[str, float] = {}
        self._watches: dict[str, Callable[[], None]] = {}
        self._unwatched: set[str] = set()
        self._end_reasons: dict[str, EndReason] = {}
        self._failures: dict[str, str] = {}
        """Why a claim could not be ended or watched when that was last tried."""
        self._woken = asyncio.Event()

    def expires_at(self, claim_id: str) -> float | None:
        """Return when a claim's time limit is over, in seconds since the epoch, if it has one."""
        deadline = self._deadlines.get(claim_id)
        if deadline is None:
            return None
        return self._clock.wall() + max(0.0, deadline - self._clock.uptime())

    def restart_time(self, claim_id: str, ttl: int) -> None:
        """Give a claim `ttl` seconds from now on."""
        self._deadlines[claim_id] = self._clock.uptime() + ttl
        self._woken.set()

    def is_ending(self, claim_id: str) -> bool:
        """Return whether a claim ends once no kernel uses it."""
        return claim_id in self._end_reasons

    def mark_used(self, claim_id: str) -> None:
        """Close a claim whose devices a kernel took over; `try_end` ends it."""
        self._end_reasons[claim_id] = EndReason.USED
        self._state.close_claim(claim_id)

    def resume(self, claim: Claim, boot_id: str) -> None:
        """Resume a claim of the state folder, unless a reboot has ended it.

        A process that lives, by its id and start time, proves that there was none.
        """
        holder = claim.holder
        is_alive = isinstance(holder, ProcessHolder) and self._holders.is_alive(holder)
        if is_alive or not claim.is_ended_by_reboot(boot_id):
            self.start_watching(claim)
        else:
            self.on_holder_end(claim.claim_id, EndReason.REBOOT)

    def start_watching(self, claim: Claim) -> None:
        """Observe the holder of a claim from now on, and allow creates from it."""
        claim_id = claim.claim_id
        self._state.open_claim(claim_id)
        if isinstance(claim.holder, TimeHolder):
            self.restart_time(claim_id, claim.holder.ttl)
        elif type(claim.holder) in _END_REASON_BY_HOLDER:
            self._watch(claim)

    def _watch(self, claim: Claim) -> None:
        claim_id = claim.claim_id
        on_end = partial(self.on_holder_end, claim_id, _END_REASON_BY_HOLDER[type(claim.holder)])
        try:
            self._watches[claim_id] = self._holders.watch(claim.holder, on_end)
        except OSError as error:
            if self._record_failure(claim_id, error):
                log.warning("claim.watch_failed", claim_id=claim_id, reason=str(error))
            self._unwatched.add(claim_id)
            self._woken.set()

    def on_holder_end(self, claim_id: str, reason: EndReason) -> None:
        """End a claim now if no kernel uses it, else when none does any more."""
        if claim_id not in self._state.claims:
            return
        self._end_reasons.setdefault(claim_id, reason)
        self._state.close_claim(claim_id)
        self.try_end(claim_id)

    def try_end(self, claim_id: str) -> None:
        """End a claim whose holder has ended or whose devices a kernel took over, if that can be.

        A record that cannot be removed keeps the claim, and is tried again.
        """
        reason = self._end_reasons.get(claim_id)
        if reason is None or (reason is not EndReason.USED and self._state.claim_kernels(claim_id)):
            return
        try:
            self.end(claim_id, reason)
        except StateUnavailable as error:
            if self._record_failure(claim_id, error):
                log.warning("claim.end_failed", claim_id=claim_id, reason=str(error))
            self._woken.set()

    def _record_failure(self, claim_id: str, error: Exception) -> bool:
        """Note why a step failed that is tried again; return whether the reason is another one."""
        before, self._failures[claim_id] = self._failures.get(claim_id), str(error)
        return before != str(error)

    def end(self, claim_id: str, reason: EndReason) -> None:
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
                self.on_holder_end(claim_id, EndReason.TIME)
        for claim_id in list(self._end_reasons):
            self.try_end(claim_id)
        for claim_id in list(self._unwatched):
            self._unwatched.discard(claim_id)
            self._watch(self._state.claim(claim_id))
