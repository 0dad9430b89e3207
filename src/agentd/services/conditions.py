"""The list of the node's conditions, which every surface shows.

Sources yield conditions, and each read asks all of them again, so no surface is late. A condition
is the same one as long as `about` and `reason` are. Its begin and its end are logged and published
within `MIN_PAUSE_S` of an event, and within `POLL_PAUSE_S` of what publishes none.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TypeAlias

import structlog

from agentd.concurrency import SILENT_PAUSE_S, silent_subjects, wait_event
from agentd.core.conditions import ActiveCondition, Condition
from agentd.errors import RuntimeUnavailable
from agentd.events import EventKind, EventLog
from agentd.host.lookups import Lookups
from agentd.services.protocols import Clock

log = structlog.get_logger()

ConditionSource: TypeAlias = Callable[[], Iterable[Condition]]

MIN_PAUSE_S = 1.0
"""Minimum seconds between two reports."""
POLL_PAUSE_S = 10.0
"""Seconds between two reports without an event."""
LOOKUP_PAUSE_S = 300.0
"""Seconds between two lookups of the host, while nothing is silent."""
SOURCE_TIMEOUT_S = 10.0
"""Seconds for one of them: for a silent path, and for what else it looks at."""
MAX_LOGGED_AT_ONCE = 32
"""Begins that one report logs; the next ones log the others."""
QUIET_S, MAX_QUIET_S = 10.0, 3600.0
"""Seconds after a logged end in which a new begin is not logged; they double each time."""
_NUMBER = re.compile(r"\d+")


class _SlowSource:
    """A source that is asked beside the event loop; one that hangs delays no other."""

    def __init__(self, subject: str, source: ConditionSource) -> None:
        self._found: Sequence[Condition] = ()
        self._failure: Sequence[Condition] = ()
        self._subject = subject
        self._source = source
        self._lookups = Lookups(max_threads=1)

    def conditions(self) -> Sequence[Condition]:
        return [*self._found, *self._failure]

    async def refresh(self) -> None:
        """Ask the source; while it is silent or fails, that is a condition beside its last ones."""
        try:
            self._found = await self._lookups.call(
                self._subject, lambda: [*self._source()], SOURCE_TIMEOUT_S
            )
        except Exception as error:  # noqa: BLE001 - one here must not end the other lookups
            is_known = isinstance(error, (RuntimeUnavailable, OSError))
            reason = str(error) if is_known else f"{self._subject}: {error!r}"
            is_shown = not (isinstance(error, RuntimeUnavailable) and silent_subjects())
            self._failure = [Condition("host", reason, agents=())] if is_shown else []
        else:
            self._failure = ()


def silent_conditions() -> Iterable[Condition]:
    """Yield a condition for each path and name of the host that does not answer."""
    for subject in silent_subjects():
        yield Condition("host", f"{subject} does not answer", agents=())


class Conditions:
    """The node's conditions, and what the log and listeners know of them."""

    def __init__(
        self, events: EventLog, clock: Clock, owners: Callable[[str], tuple[str, ...] | None]
    ) -> None:
        """Create the list; `owners` returns the agents whose thing a subject is."""
        self._events = events
        self._clock = clock
        self._owners = owners
        self._sources: list[ConditionSource] = [silent_conditions]
        self._slow_sources: list[_SlowSource] = []
        self._lookup_lock = asyncio.Lock()
        self._active: dict[tuple[str, str], ActiveCondition] = {}
        self._published: dict[tuple[Condition, tuple[str, ...] | None], ActiveCondition] = {}
        self._logged: dict[tuple[str, str], ActiveCondition] = {}
        self._quiet: dict[tuple[str, str], tuple[float, float]] = {}
        """By pattern: a pause of the log in seconds, and its end on the steady clock."""
        self._changed = asyncio.Event()
        events.call_on_publish(self._changed.set)

    def add(self, *sources: ConditionSource) -> None:
        """Register sources; the list has their order."""
        self._sources += sources

    def add_slow(self, subject: str, source: ConditionSource) -> None:
        """Register a source that looks at the host; `subject` names what it looks at."""
        slow_source = _SlowSource(subject, source)
        self._slow_sources.append(slow_source)
        self.add(slow_source.conditions)

    def current(self) -> Sequence[ActiveCondition]:
        """Return the conditions that hold now, each once."""
        now = self._clock.wall()
        active: dict[tuple[str, str], ActiveCondition] = {}
        for condition in chain.from_iterable(source() for source in self._sources):
            key = condition.about, condition.reason
            since = self._active[key].since if key in self._active else now
            owners = self._owners(condition.about)
            active.setdefault(key, ActiveCondition(condition, since, owners))
        self._active = active
        return tuple(active.values())

    async def refresh_lookups(self) -> None:
        """Look up the conditions of the host now."""
        async with self._lookup_lock:
            await asyncio.gather(*(source.refresh() for source in self._slow_sources))

    async def run_lookups(self) -> None:
        """Look up the conditions of the host repeatedly, until cancelled."""
        while True:
            await self.refresh_lookups()
            await asyncio.sleep(SILENT_PAUSE_S if silent_subjects() else LOOKUP_PAUSE_S)

    async def run(self) -> None:
        """Report changes, until cancelled."""
        while True:
            self.report()
            await asyncio.sleep(MIN_PAUSE_S)
            await wait_event(self._changed, POLL_PAUSE_S)

    def report(self) -> None:
        """Log and publish what began and what ended since the last report.

        Whose subject changes owners ends for the former ones and begins for the others.
        """
        active = {(item.condition, item.owners): item for item in self.current()}
        before, self._published = self._published, active
        for item in [item for key, item in before.items() if key not in active]:
            self._events.publish(EventKind.CONDITION_REMOVED, item)
        for item in [item for key, item in active.items() if key not in before]:
            self._events.publish(EventKind.CONDITION, item)
        self._changed.clear()
        self._log_changes()

    def _log_changes(self) -> None:
        now = self._clock.steady()
        for key in [key for key in self._logged if key not in self._active]:
            condition = self._logged.pop(key).condition
            log.info("condition.ended", about=condition.about, reason=condition.reason)
            self._extend_quiet(_pattern(condition), now)
        waiting = [item for key, item in self._active.items() if key not in self._logged]
        quiet = {pattern for pattern, (_, until) in self._quiet.items() if now < until}
        due = [item for item in waiting if _pattern(item.condition) not in quiet]
        for item in due[:MAX_LOGGED_AT_ONCE]:
            found = item.condition
            self._logged[found.about, found.reason] = item
            log.warning(
                "condition.began", about=found.about, reason=found.reason, remedy=found.remedy
            )
        if len(due) > MAX_LOGGED_AT_ONCE:
            self._changed.set()

    def _extend_quiet(self, pattern: tuple[str, str], now: float) -> None:
        """Begin a pause of the log after an end, and forget those that are long over."""
        kept = {k: quiet for k, quiet in self._quiet.items() if now < quiet[1] + MAX_QUIET_S}
        pause_s = min(2 * kept[pattern][0], MAX_QUIET_S) if pattern in kept else QUIET_S
        self._quiet = {**kept, pattern: (pause_s, now + pause_s)}


def _pattern(condition: Condition) -> tuple[str, str]:
    """Return what is the same in a condition whose reason counts or measures."""
    return condition.about, _NUMBER.sub("#", condition.reason)
