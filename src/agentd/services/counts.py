"""Counters since the start of the daemon: creates, refusals, and durations of creates."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from agentd.core.kernel.states import ENDED, STARTING, Kernel, KernelState
from agentd.errors import AgentdError

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
MOST_FAILED = 1024
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

    @property
    def sum_s(self) -> float:
        """The sum of all durations."""
        return self._sum_s

    def cumulated(self) -> Iterator[tuple[str, int]]:
        """Yield each bound with the cumulative count of durations up to it."""
        total = 0
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), self._counts, strict=True):
            total += count
            yield bound, total


class NodeCounts:
    """Counters of creates and refusals."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start at zero; `clock` is a monotonic clock in seconds."""
        self._creates: Counter[tuple[str, str]] = Counter()
        self._refusals: Counter[tuple[str, str]] = Counter()
        self._whole, self._own = Histogram(), Histogram()
        self._clock = clock
        self._begun: dict[str, float] = {}
        self._failed: OrderedDict[str, None] = OrderedDict()
        """Ids whose failure their callers will see; the latest `MOST_FAILED`."""

    @property
    def creates(self) -> Mapping[tuple[str, str], int]:
        """The number of creates by agent and result."""
        return MappingProxyType(self._creates)

    @property
    def refusals(self) -> Mapping[tuple[str, str], int]:
        """The number of refusals by error code and slot; the slot is empty for other reasons."""
        return MappingProxyType(self._refusals)

    @property
    def whole(self) -> Histogram:
        """Durations until the kernel ran."""
        return self._whole

    @property
    def own(self) -> Histogram:
        """Durations until the runtime was called."""
        return self._own

    def note(self, before: Kernel | None, now: Kernel | None) -> None:
        """Count a change of a kernel."""
        was, state = before and before.state, now and now.state
        kernel = now or before
        if kernel is None:
            return
        if was is None and state is KernelState.PREPARING:
            self._begun[kernel.kernel_id] = self._clock()
        begun = self._begun.get(kernel.kernel_id)
        if begun is None or was is state:
            return
        took_s = self._clock() - begun
        if was is KernelState.PREPARING:
            self._own.add(took_s)
        if was in STARTING and state not in STARTING:
            del self._begun[kernel.kernel_id]
            if state is None:
                self._failed[kernel.kernel_id] = None
                if len(self._failed) > MOST_FAILED:
                    self._failed.popitem(last=False)
            is_failed = state is None or (state in ENDED and state is not KernelState.TERMINATED)
            self._creates[kernel.agent_id, FAILED if is_failed else CREATED] += 1
            if not is_failed:
                self._whole.add(took_s)

    def refused(self, agent_id: str, kernel_id: str, error: AgentdError) -> None:
        """Count an error that answered a create."""
        if kernel_id in self._failed:
            del self._failed[kernel_id]
        else:  # nothing was started
            self._creates[agent_id, REFUSED] += 1
        self._refusals[error.code, str(error.facts().get("slot", ""))] += 1
