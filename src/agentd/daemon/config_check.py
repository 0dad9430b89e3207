"""The check of a configuration: everything that `agentd run` reads, without a daemon.

It takes the two steps of a start. The first lists all problems of the file and the environment.
If there are none, the second lists all of plugins, partition and host. Only processes of plugins
are started. Nothing is written, locked or listened on, so a daemon with the same configuration may
be running.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from agentd import failpoints
from agentd.concurrency import silent_subjects
from agentd.config.loading import load
from agentd.config.settings import Settings
from agentd.core.printable import printable_line
from agentd.daemon import discovery, runtime_factory
from agentd.daemon.host_names import HostNames
from agentd.daemon.problems import Problems
from agentd.errors import ConfigRefused, Problem, StartRefused
from agentd.events import EventLog
from agentd.host.probe import probe
from agentd.http.connections.unix_sockets import socket_group_problem, socket_path_problem
from agentd.http.credentials import build_endpoint, credential_weaknesses, expiry_problems
from agentd.http.server import address_problem
from agentd.http.settings import RpcSettings
from agentd.pluginhost.host import PluginHost
from agentd.program.boot_id import boot_id
from agentd.program.exit_status import ExitStatus
from agentd.state.folder import StateFolder
from agentd.tomlfile.parsing import source_name

CALL_MARGIN_S = 5.0
"""Seconds beyond `call-timeout`, so that the call's own deadline gives the reason."""
VALIDATION_TIMEOUT_S = 60.0
"""Maximum seconds to wait for the plugins' `validate`, whatever `call-timeout` is."""


class ConfigCheck(msgspec.Struct, frozen=True):
    """The problems and warnings of a configuration, and the exit status of a start."""

    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    source: str
    status: int


async def check_configuration(path: Path | None) -> ConfigCheck:
    """Return every problem for which `agentd run` would refuse a configuration.

    It also reports problems that no start refuses: entry points that are not installed, tables that
    their plugins did not validate, an expired certificate, credentials of registries that no pull
    can use, and users, groups and files that time can bring.

    Raises:
        ConfigRefused: the file or the environment is unusable; lists every problem of them.
    """
    problems = Problems()
    with problems.collect():
        loaded = load(path)
    try:
        failpoints.parse_points(os.environ.get(failpoints.VARIABLE, ""))
    except ValueError as error:
        problems.collected.append(Problem(failpoints.VARIABLE, str(error)))
    if problems.collected:
        raise ConfigRefused(problems.collected, source_name(path))
    settings = loaded.settings
    store = StateFolder(settings.node.state_dir)
    async with discovery.open_plugins(settings, store) as plugins:
        return await _check(settings, store, plugins, loaded.source)


async def _check(
    settings: Settings, store: StateFolder, plugins: PluginHost, source: str
) -> ConfigCheck:
    """Check plugins, partition and host; the first problem found decides the exit status."""
    problems_by_status: list[tuple[int, Problem]] = []

    def add(status: int, problems: Iterable[Problem]) -> None:
        problems_by_status.extend((status, problem) for problem in problems)

    add(ExitStatus.FAILED, _as_problems("node.state-dir", store.open_problem()))
    try:
        boot_id()
    except StartRefused as error:
        add(ExitStatus.FAILED, _as_problems("", str(error)))
    timeout_s = min(settings.plugins.call_timeout + CALL_MARGIN_S, VALIDATION_TIMEOUT_S)
    unvalidated = await plugins.unvalidated_problems(timeout_s)
    start_problems, names = Problems(), HostNames(settings)
    devices = await discovery.check_and_discover(
        settings, probe(), plugins, store, EventLog(), start_problems, names
    )
    with start_problems.collect():
        build_endpoint(settings.rpc, missing=start_problems.passing)
    add(ExitStatus.CONFIG, start_problems.collected)
    reported = {problem.where.split(".")[1] for problem in plugins.problems()}
    for name, reason in plugins.required_failures().items():
        if name not in reported:
            add(ExitStatus.FAILED, _as_problems(f"plugins.{name}", reason))
    add(ExitStatus.FAILED, _socket_problems(settings.rpc, names))
    for problems in runtime_factory.login_problems(settings).values():
        add(ExitStatus.CONFIG, problems)
    add(ExitStatus.CONFIG, plugins.missing_entry_points())
    add(ExitStatus.FAILED, unvalidated)
    rpc = settings.rpc
    expired = expiry_problems("rpc.tls-cert", rpc.tls_cert, rpc.tls_key)
    add(ExitStatus.CONFIG, expired)
    add(ExitStatus.CONFIG, start_problems.passing)
    deque(runtime_factory.folder_conditions(settings), maxlen=0)
    add(ExitStatus.CONFIG, _silent_problems(str(p) for _, p in problems_by_status))
    warnings: tuple[str, ...] = ()
    if not start_problems.collected:
        lock_warnings = discovery.withhold_if_served(settings, devices)
        texts = set(credential_weaknesses(rpc)) - {problem.why for problem in expired}
        warnings = (*devices.warnings, *lock_warnings, *sorted(texts))
    status = problems_by_status[0][0] if problems_by_status else ExitStatus.DONE
    return ConfigCheck(
        tuple(dict.fromkeys(p for _, p in problems_by_status)), warnings, source, status
    )


def _silent_problems(reported: Iterable[str]) -> list[Problem]:
    """Return a problem for each path or name of the host that does not answer, if it has none."""
    text = "\n".join(reported)
    return [Problem("", f"{s} does not answer") for s in silent_subjects() if s not in text]


def _socket_problems(rpc: RpcSettings, names: HostNames) -> Iterator[Problem]:
    sockets = [("rpc.socket", rpc.socket, "rpc.socket-group", rpc.socket_group)]
    for index, socket in enumerate(rpc.sockets):
        where = f"rpc.sockets.{index}"
        sockets.append((f"{where}.path", socket.path, f"{where}.group", socket.group))
    for path_key, path, group_key, group in sockets:
        yield from _as_problems(path_key, socket_path_problem(path.absolute()))
        if group_key in names.problems:
            yield names.problems[group_key]
        elif group is not None:
            yield from _as_problems(group_key, socket_group_problem(group, names.group_id(group)))
    if rpc.listen is not None:
        reason = address_problem(str(rpc.host_port[0]))
        yield from _as_problems("rpc.listen", reason and f"{rpc.listen}: {reason}")


def _as_problems(where: str, reason: str) -> list[Problem]:
    """Return a problem, or none without a reason."""
    return [Problem(where, printable_line(reason))] if reason else []
