"""Counters since the start of the daemon: creates, refusals, and durations of creates."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from itertools import accumulate
from types import MappingProxyType

from agentd.core.kernel.states import ENDED, STARTING, Kernel, KernelState
from agentd.errors import AgentdError

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
MAX_FAILED = 1024
CREATED, FAILED, REFUSED = "created", "failed", "refused"


class Histogram:
    """A histogram of durations in seconds, with Prometheus's upper bounds (`le`)."""

    def __init__(self) -> None:
        self._sum_s = 0.0
        self._counts = [0] * (len(BUCKETS_S) + 1)

    def add(self, seconds: float) -> None:
        """Add one duration."""
        self._sum_s += seconds
        self._counts[bisect_left(BUCKETS_S, seconds)] += 1

    def cumulated(self) -> tuple[list[tuple[str, int]], float]:
        """Return each bound with the count of durations up to it, and the sum of all durations."""
        bounds = (*map(str, BUCKETS_S), "+Inf")
        return [*zip(bounds, accumulate(self._counts), strict=True)], self._sum_s


class NodeCounts:
    """Counters of creates and refusals."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start at zero; `clock` is a monotonic clock in seconds."""
        self._creates: Counter[tuple[str, str]] = Counter()
        self._refusals: Counter[tuple[str, str]] = Counter()
        self._durations = {"own": Histogram(), "whole": Histogram()}
        self._clock = clock
        self._begun_at: dict[str, float] = {}
        self._called: set[str] = set()
        """Those of these whose runtime was called; it is called again for other cores."""
        self._failed: OrderedDict[str, None] = OrderedDict()
        """Ids whose failure their callers will see; the latest `MAX_FAILED`."""

    @property
    def creates(self) -> Mapping[tuple[str, str], int]:
        """The number of creates by agent and result."""
        return MappingProxyType(self._creates)

    @property
    def refusals(self) -> Mapping[tuple[str, str], int]:
        """The number of refusals by error code and slot; the slot is empty for other reasons."""
        return MappingProxyType(self._refusals)

    @property
    def durations(self) -> Mapping[str, Histogram]:
        """Durations of creates: `own` until the runtime was called, `whole` until it ran."""
        return MappingProxyType(self._durations)

    def on_kernel_change(self, before: Kernel | None, now: Kernel | None) -> None:
        """Count a change of a kernel."""
        state_before, state = before and before.state, now and now.state
        kernel = now or before
        if kernel is None:
            return
        if state_before is None and state is KernelState.PREPARING:
            self._begun_at[kernel.kernel_id] = self._clock()
        begun_at = self._begun_at.get(kernel.kernel_id)
        if begun_at is None or state_before is state:
            return
        duration_s = self._clock() - begun_at
        if state_before is KernelState.PREPARING and kernel.kernel_id not in self._called:
            self._called.add(kernel.kernel_id)
            self._durations["own"].add(duration_s)
        if state_before in STARTING and state not in STARTING:
            del self._begun_at[kernel.kernel_id]
            self._called.discard(kernel.kernel_id)
            if state is None:
                self._failed[kernel.kernel_id] = None
                if len(self._failed) > MAX_FAILED:
                    self._failed.popitem(last=False)
            is_failed = state is None or (state in ENDED and state is not KernelState.TERMINATED)
            self._creates[kernel.agent_id, FAILED if is_failed else CREATED] += 1
            if not is_failed:
                self._durations["whole"].add(duration_s)

    def count_refusal(self, agent_id: str, kernel_id: str, error: AgentdError) -> None:
        """Count an error that answered a create."""
        if kernel_id in self._failed:
            del self._failed[kernel_id]
        else:  # nothing was started
            self._creates[agent_id, REFUSED] += 1
        self._refusals[error.code, str(error.facts().get("slot", ""))] += 1
