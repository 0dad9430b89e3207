"""Reload: the whole configuration is applied while the daemon runs, or none of it.

Everything is read and checked first, off the event loop, and exactly that is applied. A key counts
as applied only if a step read it; every other key is reported and requires a restart. Related keys
are applied together: tokens and the certificate with `listen`, user accounts with the agents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, TypeVar, cast

import structlog
from pydantic import BaseModel

from agentd import log as logging
from agentd.config.loading import Loaded, load
from agentd.config.settings import Settings
from agentd.daemon import runtime_factory
from agentd.errors import ConfigRefused, Problem, RuntimeUnavailable
from agentd.host.lookups import Lookups
from agentd.http.credentials import Weaknesses, certificate_of, tokens, weaknesses
from agentd.http.server import Server
from agentd.services.protocols import Runtime

log = structlog.get_logger()

READ_TIMEOUT_S = 20.0
"""Seconds in which all files must be read."""
_M = TypeVar("_M", bound=BaseModel)


class ReadSettings:
    """Settings that record which of their keys are read."""

    def __init__(self, section: BaseModel, keys: set[str], path: str = "") -> None:
        self._section, self._keys, self._path = section, keys, path

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._section, name)
        key = f"{self._path}{name.replace('_', '-')}"
        if isinstance(value, BaseModel):
            return ReadSettings(value, self._keys, f"{key}.")
        if name in type(self._section).model_fields:
            self._keys.add(key)
        return value


class Step(NamedTuple):
    """Applies the keys that it was built from; cannot fail."""

    keys: AbstractSet[str]
    take: Callable[[], object]


def differing(one: BaseModel, other: BaseModel, path: str = "") -> Iterator[str]:
    """Yield the keys in which two configurations differ, including tables of plugins."""
    for name, was, now in _pairs(one, other):
        key = f"{path}{name.replace('_', '-')}"
        if isinstance(was, BaseModel) and isinstance(now, BaseModel):
            yield from differing(was, now, f"{key}.")
        elif was != now:
            yield key


def _pairs(one: BaseModel, other: BaseModel) -> Iterator[tuple[str, Any, Any]]:
    for name in type(one).model_fields:
        yield name, getattr(one, name), getattr(other, name)
    before, after = one.model_extra or {}, other.model_extra or {}
    for name in before.keys() | after.keys():
        yield name, before.get(name), after.get(name)


def with_keys(one: _M, other: BaseModel, keys: AbstractSet[str], path: str = "") -> _M:
    """Return a configuration with some keys of another."""
    updates: dict[str, Any] = {}
    for name in type(one).model_fields:
        was, now = getattr(one, name), getattr(other, name)
        key = f"{path}{name.replace('_', '-')}"
        if isinstance(was, BaseModel):
            updates[name] = with_keys(was, now, keys, f"{key}.")
        elif key in keys:
            updates[name] = now
    return one.model_copy(update=updates)


class Reload:
    """Reloads the configuration of a daemon that started with `loaded`."""

    def __init__(
        self,
        loaded: Loaded,
        server: Server,
        runtimes: Mapping[str, Runtime],
        known: Weaknesses,
    ) -> None:
        self._loaded = loaded
        self._in_force = loaded.settings
        self._server = server
        self._runtimes = runtimes
        self._known = known
        self._turn = asyncio.Lock()
        self._lookups = Lookups(most=1)

    def prepare(self) -> tuple[Settings, Settings, list[Step]]:
        """Read the configuration; return it, its applicable part, and the steps.

        Raises:
            ConfigRefused: the configuration is unusable.
        """
        settings = load(self._loaded.path, self._loaded.environ).settings
        wanted = settings.model_copy(update={"agents": self._in_force.agents})
        if settings.rpc.listen != self._in_force.rpc.listen:
            wanted = wanted.model_copy(update={"rpc": self._in_force.rpc})
        made = (step(wanted) for step in (self._tokens, self._certificate, self._level))
        steps = [step for step in made if step is not None]
        steps += [self._rules(wanted, runtime) for runtime in self._runtimes.values()]
        weak = weaknesses(wanted.rpc)
        steps.append(Step(frozenset(), lambda: self._known.replace(weak)))
        return settings, wanted, steps

    def _tokens(self, wanted: Settings) -> Step | None:
        if wanted.rpc.listen is None:
            return None
        seen, keys = _reading(wanted)
        found = tokens(seen.rpc)
        return Step(keys, lambda: self._server.renew_tokens(found))

    def _certificate(self, wanted: Settings) -> Step | None:
        seen, keys = _reading(wanted)
        if not self._server.has_tls or (found := certificate_of(seen.rpc)) is None:
            return None
        return Step(keys, lambda: self._server.renew_tls(found.context))

    def _level(self, wanted: Settings) -> Step:
        seen, keys = _reading(wanted)
        level = seen.node.log_level
        return Step(keys, lambda: logging.set_level(level))

    def _rules(self, wanted: Settings, runtime: Runtime) -> Step:
        seen, keys = _reading(wanted)
        return Step(keys, runtime_factory.renewal(runtime, seen))

    async def take(self) -> list[str]:
        """Read and apply the configuration; return the keys that require a restart.

        Raises:
            ConfigRefused: the configuration is unusable; nothing has changed.
            RuntimeUnavailable: something of it does not answer; nothing has changed.
        """
        reading = self._lookups.look(self._loaded.source, self.prepare, READ_TIMEOUT_S)
        settings, wanted, steps = await reading
        for step in steps:
            step.take()
            self._in_force = with_keys(self._in_force, wanted, step.keys)
        return list(differing(self._in_force, settings))

    async def once(self) -> list[str]:
        """Apply the configuration, log the outcome, and return the keys that require a restart.

        Raises:
            ConfigRefused: the configuration is unusable; nothing has changed.
        """
        try:
            async with self._turn:
                waiting = await self.take()
        except ConfigRefused as error:
            refused = error.of(self._loaded.source)
        except RuntimeUnavailable as error:
            refused = ConfigRefused([Problem("", str(error))])
        except Exception as error:  # an error here must not end all reloads
            log.exception("daemon.reload_failed")
            refused = ConfigRefused([Problem("", f"{type(error).__name__}: {error}")])
        else:
            log.info("daemon.reloaded", needs_restart=waiting)
            return waiting
        log.warning("daemon.reload_refused", reasons=refused.lines())
        raise refused


def _reading(settings: Settings) -> tuple[Settings, set[str]]:
    """Return settings, and the set that records which keys are read."""
    keys: set[str] = set()
    return cast("Settings", ReadSettings(settings, keys)), keys
