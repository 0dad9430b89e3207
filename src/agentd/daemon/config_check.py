"""The check of a configuration: everything that `agentd run` reads, without a daemon.

The parts are checked in the order of a start, and all problems are collected. Only processes of
plugins are started. Nothing is written, locked or listened on, so a daemon with the same
configuration may be running. If an unusable key is missing, only the checks that depend on it are
skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from agentd import failpoints
from agentd.config.loading import Examined, Loaded, examine_text
from agentd.config.settings import Settings
from agentd.core.printable import printable_line
from agentd.daemon import assembly, runtime_factory
from agentd.errors import ConfigRefused, Problem
from agentd.events import EventLog
from agentd.host.probe import probe
from agentd.http.connections.unix_sockets import group_refusal, path_refusal
from agentd.http.credentials import Weaknesses, certificate_of, tokens, weaknesses
from agentd.http.server import address_refusal
from agentd.http.settings import RpcSettings
from agentd.pluginhost.host import PluginHost
from agentd.service.exit_status import ExitStatus
from agentd.state.folder import ReadOnlyState
from agentd.tomlfile.parsing import read_text

CALL_MARGIN_S = 5.0
"""Seconds beyond `call-timeout`, so that the call's own deadline gives the reason."""
VALIDATION_TIMEOUT_S = 60.0
"""Maximum seconds to wait for the plugins' `validate`, whatever `call-timeout` is."""


class Checked(NamedTuple):
    """The problems and warnings of a configuration, and the exit status of a start."""

    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    source: str
    status: int


async def check(path: Path | None) -> Checked:
    """Return every problem for which `agentd run` would refuse a configuration.

    It also reports two kinds of problems that no start refuses: entry points that are not
    installed, and tables that their plugins did not validate.

    Raises:
        ConfigRefused: the file is unreadable or not TOML.
    """
    return await _Check(examine_text(read_text(path), path, os.environ)).checked()


class _Check:
    """One check of a configuration."""

    def __init__(self, examined: Examined) -> None:
        self._examined = examined
        self._problems: list[Problem] = []
        self._warnings: list[str] = []
        self._status = self._status_of_tolerated = 0

    async def checked(self) -> Checked:
        """Check all parts in the order of a start."""
        examined = self._examined
        self._add(ExitStatus.CONFIG, examined.problems)
        try:
            failpoints.parsed(os.environ.get(failpoints.VARIABLE, ""))
        except ValueError as error:
            self._add(ExitStatus.CONFIG, [Problem(failpoints.VARIABLE, str(error))])
        if examined.loaded is not None:
            settings = examined.loaded.settings
            store = ReadOnlyState(settings.node.state_dir.absolute())
            await self._check_node(settings, store)
            await self._check_plugins(examined.loaded, store)
            self._check_rpc(settings.rpc)
        problems = tuple(dict.fromkeys(self._problems))
        status = self._status or self._status_of_tolerated
        return Checked(problems, tuple(self._warnings), examined.source, status)

    async def _check_node(self, settings: Settings, store: ReadOnlyState) -> None:
        is_whole, name = self._examined.is_whole, settings.node.runtime
        node_id = ""
        if is_whole("node", "id"):
            with self._collecting():
                node_id = assembly.node_id_of(settings)
        if is_whole("node", "runtime") and is_whole("runtime", name):
            with self._collecting():
                runtime_factory.refuse_unfit(settings)
        if is_whole("node", "state_dir"):
            self._add(ExitStatus.FAILED, _problems("node.state-dir", store.refusal()))
            if node_id:
                with self._collecting():
                    await runtime_factory.refuse_changed_id(settings, node_id, store)

    async def _check_plugins(self, loaded: Loaded, store: ReadOnlyState) -> None:
        """Validate the plugins' tables, and divide the devices that they list."""
        if self._examined.lacks("plugins"):
            return
        settings = loaded.settings.plugins
        host = assembly.plugin_host(loaded.settings, store)
        self._add_tolerated(ExitStatus.CONFIG, host.missing_entry_points())
        if not self._may_open(loaded):
            self._add(ExitStatus.CONFIG, host.problems())
            return
        try:
            await host.open(settings.open_timeout)
            patience_s = min(settings.call_timeout + CALL_MARGIN_S, VALIDATION_TIMEOUT_S)
            unvalidated = await host.unvalidated(patience_s)
            wrong = host.problems()
            self._add(ExitStatus.CONFIG, wrong)
            self._check_partition(loaded, host, store)
            self._add_tolerated(ExitStatus.FAILED, unvalidated)
            reported = {problem.where.split(".")[1] for problem in wrong}
            for name, why in host.failed_required().items():
                if name not in reported:
                    self._add(ExitStatus.FAILED, _problems(f"plugins.{name}", why))
        finally:
            await host.close()

    def _may_open(self, loaded: Loaded) -> bool:
        """Return whether it is certain which plugins the operator allows."""
        given = loaded.raw.get("plugins", {})
        left_out = [keys[1] for keys in self._examined.left_out if keys[0] == "plugins"]
        return all(
            str(key).endswith(("_timeout", "_interval")) or isinstance(given.get(key), Mapping)
            for key in left_out
        )

    def _check_partition(self, loaded: Loaded, host: PluginHost, store: ReadOnlyState) -> None:
        examined = self._examined
        is_known = all(map(examined.is_whole, ("resource", "host"))) and not examined.lacks(
            "agents"
        )
        if not is_known or not examined.is_whole("node", "state_dir"):
            return
        devices = assembly.node_devices(loaded.settings, probe(), host, store, EventLog())
        try:
            devices.discover()
        except ConfigRefused as error:
            self._add(
                ExitStatus.CONFIG, [p for p in error.problems if not self._follows_from_gap(p)]
            )
            return
        assembly.withhold_devices_of_peers(loaded.settings, devices)
        self._warnings += devices.warnings

    def _follows_from_gap(self, problem: Problem) -> bool:
        """Return whether a problem is about a table with a missing key."""
        gaps = (".".join(map(str, keys)).replace("_", "-") for keys in self._examined.left_out)
        return any(f"{gap}.".startswith(f"{problem.where}.") for gap in gaps)

    def _check_rpc(self, rpc: RpcSettings) -> None:
        examined = self._examined
        if examined.lacks("rpc"):
            return
        if rpc.listen is not None or examined.lacks("rpc", "listen"):
            with self._collecting():
                certificate_of(rpc)
            with self._collecting():
                tokens(rpc)
        sockets = [("rpc.socket", rpc.socket, "rpc.socket-group", rpc.socket_group)]
        for index, further in enumerate(rpc.sockets):
            where = f"rpc.sockets.{index}"
            sockets.append((f"{where}.path", further.path, f"{where}.group", further.group))
        for at, path, group_at, group in sockets:
            if at != "rpc.socket" or examined.is_whole("rpc", "socket"):
                self._add(ExitStatus.FAILED, _problems(at, path_refusal(path.absolute())))
            if group is not None:
                self._add(ExitStatus.FAILED, _problems(group_at, group_refusal(group)))
        if rpc.listen is not None:
            why = address_refusal(str(rpc.host_port[0]))
            self._add(ExitStatus.FAILED, _problems("rpc.listen", why and f"{rpc.listen}: {why}"))
        weak = Weaknesses()
        weak.replace(weaknesses(rpc))
        self._warnings += weak.warnings()

    def _add(self, status: int, problems: Iterable[Problem]) -> None:
        """Add problems that end a start with an exit status."""
        if found := list(problems):
            self._problems += found
            self._status = self._status or status

    def _add_tolerated(self, status: int, problems: Iterable[Problem]) -> None:
        """Add problems that no start refuses; any other problem decides the exit status."""
        if found := list(problems):
            self._problems += found
            self._status_of_tolerated = self._status_of_tolerated or status

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        try:
            yield
        except ConfigRefused as error:
            self._add(ExitStatus.CONFIG, error.problems)


def _problems(where: str, why: str) -> list[Problem]:
    """Return a problem, or none without a reason."""
    return [Problem(where, printable_line(why))] if why else []
