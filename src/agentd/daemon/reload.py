"""Reload: the whole configuration is applied while the daemon runs, or none of it.

Everything is read and checked first, off the event loop, and exactly that is applied. `APPLIED` has
the keys that each step applies; every other key is reported and requires a restart. Related keys
are applied together: tokens and the certificate with `listen`, user accounts with the agents. Of an
agent, only its means are applied: those that replace keys of `[runtime.docker]`.

What is missing and may come (users, groups, files of tokens and certificate) refuses nothing. It is
a condition, and is looked for every `RETRY_S` seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import structlog
from pydantic import BaseModel

from agentd import log as logging
from agentd.config.loading import LoadedSettings, load
from agentd.config.settings import Settings
from agentd.core.conditions import Condition
from agentd.daemon import runtime_factory
from agentd.daemon.host_names import RETRY_REMEDY, RETRY_S, HostNames, configured_names
from agentd.daemon.problems import Problems
from agentd.errors import ConfigRefused, Problem, StartRefused
from agentd.http.credentials import read_configured_certificate, read_tokens
from agentd.http.server import Server
from agentd.http.settings import RpcSettings
from agentd.services.protocols import Runtime

log = structlog.get_logger()

APPLIED: Mapping[str, tuple[str, ...]] = {
    "tokens": ("rpc.token-file", "rpc.tokens"),
    "certificate": ("rpc.tls-cert", "rpc.tls-key"),
    "log level": ("node.log-level",),
    "docker": (
        "runtime.docker.network",
        "runtime.docker.allowed-mounts",
        "runtime.docker.allowed-networks",
        "runtime.docker.capabilities",
        "runtime.docker.pids-limit",
        "runtime.docker.log-max-size",
        "runtime.docker.log-max-files",
        "runtime.docker.registry-auth",
        "runtime.docker.stop-timeout",
        "runtime.docker.ulimits",
        "runtime.docker.default-ulimits",
        "runtime.docker.allowed-groups",
    ),
    "systemd": (
        "runtime.systemd.user",
        "runtime.systemd.pids-limit",
        "runtime.systemd.stop-timeout",
        "runtime.systemd.ulimits",
        "runtime.systemd.default-ulimits",
        "runtime.systemd.allowed-groups",
    ),
    "process": (
        "runtime.process.user",
        "runtime.process.log-max-size",
        "runtime.process.log-max-files",
        "runtime.process.pids-limit",
        "runtime.process.stop-timeout",
        "runtime.process.ulimits",
        "runtime.process.default-ulimits",
        "runtime.process.allowed-groups",
    ),
}
"""The keys that each step applies; a step of a runtime has its name."""


class Step(msgspec.Struct, frozen=True):
    """Applies the keys of an entry of `APPLIED`; cannot fail."""

    keys: tuple[str, ...]
    apply: Callable[[], object]


def flatten_settings(section: BaseModel, path: str = "") -> dict[str, Any]:
    """Return the value of each key of a configuration; a plugin's table is one value."""
    fields = type(section).model_fields
    values: dict[str, Any] = {}
    for name, value in section:
        key = f"{path}{fields[name].alias or name if name in fields else name}"
        values |= (
            flatten_settings(value, f"{key}.") if isinstance(value, BaseModel) else {key: value}
        )
    return values


class Reload:
    """Reloads the configuration of a daemon that started with `loaded`."""

    def __init__(
        self,
        loaded: LoadedSettings,
        server: Server,
        runtimes: Mapping[str, Runtime],
        names: HostNames,
        missing: Sequence[Problem] = (),
    ) -> None:
        self._loaded = loaded
        self._in_force = flatten_settings(loaded.settings)
        self.settings = loaded.settings
        """Those in force: credentials, means of agents, and what a runtime is given."""
        self._server = server
        self._runtimes = runtimes
        self._names = names
        self._missing = missing
        self._lock = asyncio.Lock()

    def prepare(self) -> tuple[Settings, Settings, list[Step]]:
        """Read the configuration; return it, its applicable part, and the steps.

        Raises:
            ConfigRefused: the configuration is unusable.
        """
        started = self._loaded.settings
        path = self._loaded.path
        settings = load(path, self._loaded.environ).settings
        if path is not None and not path.stat().st_nlink:
            reason = "was replaced on the host, but the mount keeps the old file; mount its folder"
            raise ConfigRefused([Problem("", reason)])
        rpc = settings.rpc if settings.rpc.listen == started.rpc.listen else self.settings.rpc
        listed = {agent.id: agent for agent in settings.agents}
        agents = tuple(old.with_means_of(listed.get(old.id, old)) for old in self.settings.agents)
        applicable = settings.model_copy(update={"agents": agents, "rpc": rpc})
        configured_names(applicable, started.node.runtime)
        return settings, applicable, [*self._steps(applicable)]

    def _steps(self, applicable: Settings) -> Iterator[Step]:
        problems = Problems()
        yield from self._credential_steps(applicable.rpc, problems)
        problems.raise_if_any()
        yield Step((), partial(setattr, self, "_missing", problems.passing))
        yield Step(APPLIED["log level"], lambda: logging.set_level(applicable.node.log_level))
        for name, runtime in self._runtimes.items():
            yield Step(APPLIED[name], runtime_factory.prepare_settings_update(runtime, applicable))

    def _credential_steps(self, rpc: RpcSettings, problems: Problems) -> Iterator[Step]:
        """Read tokens and certificate: a problem of one hides nothing of the other."""
        if rpc.listen is not None:
            with problems.collect():
                tokens = read_tokens(rpc, problems.passing, self._server.current_tokens)
                yield Step(APPLIED["tokens"], partial(self._server.replace_tokens, tokens))
        if self._server.has_tls and rpc.tls_cert is not None:
            with problems.collect():
                certificate = read_configured_certificate(rpc, missing=problems.passing)
                context = certificate.context if certificate is not None else None
                yield Step(APPLIED["certificate"], partial(self._server.replace_tls, context))

    async def apply(self) -> list[str]:
        """Read and apply the configuration; return the keys that require a restart.

        Raises:
            ConfigRefused: the configuration is unusable; nothing has changed.
            StartRefused: its file does not answer; nothing has changed.
        """
        settings, applicable, steps = await asyncio.to_thread(self.prepare)
        values = flatten_settings(applicable)
        for step in steps:
            step.apply()
            self._in_force |= {key: values[key] for key in step.keys}
        self.settings = applicable
        self._in_force["agents"] = applicable.agents
        await self._use_names(self._names.refresh(applicable))
        in_force, configured = self._in_force, flatten_settings(settings)
        return [key for key in in_force | configured if in_force.get(key) != configured.get(key)]

    async def _use_names(self, lookup: Awaitable[None]) -> None:
        await lookup
        runtime: Any = self._runtimes.get(self._loaded.settings.node.runtime)
        if hasattr(runtime, "update_accounts"):
            runtime.update_accounts(self._names.accounts)
        with suppress(StartRefused):  # it stays in `conditions`
            self._server.assign_groups(self._names.group_id)

    async def run(self) -> None:
        """Look for what is missing repeatedly, until cancelled."""
        while True:
            await asyncio.sleep(RETRY_S)
            await self.look_for_missing()

    async def look_for_missing(self) -> None:
        """Look for what is missing, and use what has come."""
        async with self._lock:
            await self._use_names(self._names.look_again())
            if self._missing:
                problems, rpc = Problems(), self.settings.rpc
                read = partial(self._credential_steps, rpc, problems)
                for step in await asyncio.to_thread(lambda: [*read()]):
                    step.apply()
                self._missing = [*problems.passing, *problems.collected]

    def conditions(self) -> Iterator[Condition]:
        """Yield what is missing."""
        yield from self._names.conditions()
        for problem in self._missing:
            yield Condition("host", str(problem), RETRY_REMEDY, agents=())
        for unix in self._server.ungrouped:
            reason = f"socket {unix.path} is not given to group {unix.group!r} yet"
            yield Condition("host", f"{reason}: only agentd's user can connect", RETRY_REMEDY, ())

    async def apply_and_log(self) -> list[str]:
        """Apply the configuration, log the outcome, and return the keys that require a restart.

        Raises:
            ConfigRefused: the configuration is unusable; nothing has changed.
        """
        try:
            async with self._lock:
                restart_keys = await self.apply()
        except ConfigRefused as error:
            refusal = error.with_source(self._loaded.source)
        except StartRefused as error:
            refusal = ConfigRefused([Problem("", str(error))])
        except Exception as error:  # an error here must not end all reloads
            log.exception("daemon.reload_failed")
            refusal = ConfigRefused([Problem("", f"{type(error).__name__}: {error}")])
        else:
            log.info("daemon.reloaded", needs_restart=restart_keys)
            return restart_keys
        log.warning("daemon.reload_refused", reasons=refusal.lines())
        raise refusal
