"""Construction of runtimes from the settings.

Modules of a runtime are imported only when one is built, so a start does not pay for unused
runtimes: those of units and processes need D-Bus.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from agentd.concurrency import ANSWER_TIMEOUT_S, Walk, call_in_time
from agentd.config.settings import Settings
from agentd.core.conditions import Condition
from agentd.errors import ConfigRefused, Problem, RuntimeUnavailable
from agentd.host.cgroups.hierarchies import find_cgroups, find_existing_cgroups
from agentd.host.host_conditions import host_conditions
from agentd.host.systemd.availability import (
    failed_units,
    has_manager,
    is_booted,
    is_lingering,
    systemd_problems,
)
from agentd.program.boot_id import boot_id
from agentd.runtimes.host.user_accounts import UserAccounts
from agentd.services.protocols import Plugins, Runtime
from agentd.services.state import NodeState
from agentd.state.folder import StateFolder

RUNTIMES = frozenset({"docker", "systemd", "process"})
_NETWORK_MODES = frozenset({"bridge", "default", "host", "none", "pasta", "private", "slirp4netns"})
"""Networks of a container that an engine has by itself, or that are none of its networks."""


def create_runtime(
    name: str,
    settings: Settings,
    node_id: str,
    bundles: Mapping[str, Path],
    accounts: UserAccounts,
) -> Runtime:
    """Return one of `RUNTIMES`; `bundles` maps each to its folder for kernels."""
    if name == "docker":
        from agentd.runtimes.docker.last_seen import OutageLog
        from agentd.runtimes.docker.runtime import DockerRuntime

        last_seen = OutageLog(bundles[name] / "last_seen.json", boot_id())
        return DockerRuntime(
            node_id,
            settings.runtime.docker,
            last_seen,
            settings.docker_settings_by_agent(),
            bundles[name],
        )
    folder = bundles[name]
    if name == "systemd":
        from agentd.runtimes.systemd.runtime import SystemdRuntime

        return SystemdRuntime(
            folder=folder,
            node_id=node_id,
            boot_id=boot_id(),
            settings=settings.runtime.systemd,
            accounts=accounts,
        )
    from agentd.host.systemd.dbus import SystemdManager
    from agentd.runtimes.process.runtime import ProcessRuntime

    # Units of a user's manager end at logout, unless the user lingers.
    uid = os.geteuid()
    is_lasting = has_manager() and (uid == 0 or is_lingering(uid))
    manager = SystemdManager(is_user=uid != 0) if is_lasting else None
    return ProcessRuntime(
        folder,
        node_id,
        boot_id(),
        settings=settings.runtime.process,
        accounts=accounts,
        cgroups=find_cgroups() or find_existing_cgroups(),
        manager=manager,
    )


def prepare_settings_update(runtime: Any, settings: Settings) -> Callable[[], object]:
    """Return a function that applies settings to a runtime; an engine's socket stays."""
    section = getattr(settings.runtime, runtime.name)
    if runtime.name == "docker":
        return partial(runtime.update_settings, section, settings.docker_settings_by_agent())
    return partial(runtime.update_settings, section)


def refuse_unusable_runtime(settings: Settings) -> None:
    """Refuse settings of the runtime that do not fit this host.

    Raises:
        ConfigRefused: the settings do not fit this host.
    """
    reasons = systemd_problems() if settings.node.runtime == "systemd" else []
    if reasons:
        raise ConfigRefused([Problem("node.runtime", reason) for reason in reasons])


def find_host_conditions(
    settings: Settings, plugins: Plugins, state: NodeState
) -> Iterator[Condition]:
    """Yield the conditions of this host for the configured runtime, and those with kernels."""
    kernels = state.snapshot().kernels.values()  # a copy: this is beside the event loop
    runtimes = {settings.node.runtime, *(k.runtime for k in kernels if k.holds_devices)}
    loaded = {status.plugin for status in plugins.statuses()}
    engine = settings.runtime.docker.socket if "docker" in runtimes else None
    yield from host_conditions(engine, loaded)
    if settings.node.runtime == "systemd":
        yield from _systemd_conditions()
    if "systemd" in runtimes and is_booted():
        from agentd.runtimes.systemd.slices import journal_conditions

        yield from journal_conditions(failed_units("systemd-journald@*"))


async def refuse_changed_id(settings: Settings, node_id: str, store: StateFolder) -> None:
    """Refuse another node id while kernels of the old one live; changes nothing.

    Raises:
        ConfigRefused: kernels live, or that is unknown.
    """
    node = store.load_node()
    if node is None or node.node_id == node_id:
        return
    old_id = node.node_id
    problems: list[Problem] = []
    for name in sorted(RUNTIMES & {*node.runtimes, *store.runtimes_with_folders()}):
        try:
            live = await _live_kernels(name, settings, old_id, store.runtime_folders)
        except RuntimeUnavailable as error:
            reason = f"unknown whether kernels of {old_id} live on the {name} runtime: {error}"
            problems.append(Problem("node.id", reason))
            continue
        if live:
            reason = (
                f"was {old_id}, whose kernels {', '.join(sorted(live))} are running;"
                f" restore the old id, or remove the kernels first"
            )
            problems.append(Problem("node.id", reason))
    if problems:
        raise ConfigRefused(problems)


async def _live_kernels(
    name: str, settings: Settings, node_id: str, bundles: Mapping[str, Path]
) -> list[str]:
    """Return the live kernels of a node in one of `RUNTIMES`; changes nothing.

    Raises:
        RuntimeUnavailable: the runtime does not answer.
    """
    if name == "systemd":
        from agentd.host.systemd.dbus import SystemdManager
        from agentd.runtimes.systemd.unit_observer import list_live_kernels

        manager = SystemdManager(is_user=os.geteuid() != 0)
        try:
            return await list_live_kernels(manager, node_id)
        finally:
            await manager.close()
    if name == "docker":
        from agentd.runtimes.docker.container_observer import ContainerObserver
        from agentd.runtimes.docker.docker_client import DockerClient

        engine = DockerClient(settings.runtime.docker.socket)
        try:
            listing = await ContainerObserver(engine, node_id).list_kernels()
        finally:
            await engine.close()
    else:
        from agentd.runtimes.host.private_folder import os_errors_as_unavailable
        from agentd.runtimes.process.bundles import Bundles

        with os_errors_as_unavailable():
            listing = Bundles(
                bundles[name], node_id, boot_id(), find_existing_cgroups()
            ).list_kernels()
    return [kernel.kernel_id for kernel in listing.kernels if kernel.is_alive]


def _docker_sections(settings: Settings) -> Iterator[tuple[str, str, Any]]:
    """Yield the tables with means of containers: subject of conditions, section, settings."""
    yield "runtime/docker", "runtime.docker", settings.runtime.docker
    for index, agent in enumerate(settings.agents):
        yield f"agent/{agent.id}", f"agents.{index}", agent


def login_problems(settings: Settings) -> Mapping[str, Sequence[Problem]]:
    """Return the credentials of registries that no pull can use, by the subject of a condition."""
    files = {
        about: (section, table.registry_auth)
        for about, section, table in _docker_sections(settings)
        if table.registry_auth is not None
    }
    if not files:
        return {}
    from agentd.runtimes.docker.registry_auth import registry_auth_problems

    walk = Walk()
    return {
        about: [*registry_auth_problems(f"{where}.registry-auth", path, walk)]
        for about, (where, path) in files.items()
    }


def login_conditions(settings: Settings) -> Iterator[Condition]:
    """Yield the credentials of registries that no pull can use."""
    for about, problems in login_problems(settings).items():
        yield from (Condition(about, f"{problem.where}: {problem.why}") for problem in problems)


def folder_conditions(settings: Settings) -> Iterator[Condition]:
    """Yield the folders for mounts in which a container can leave what the host trusts."""
    flags = os.ST_NOSUID | os.ST_NODEV
    agents_by_folder: dict[Path, tuple[str, ...] | None] = {}
    for agent, docker in settings.docker_settings_by_agent().items():
        for folder in docker.allowed_mounts:
            agents_by_folder[folder] = (*(agents_by_folder.get(folder) or ()), agent)
    agents_by_folder |= dict.fromkeys(settings.runtime.docker.allowed_mounts)
    walk = Walk()
    for folder, agents in agents_by_folder.items():
        with suppress(OSError):
            found = call_in_time(str(folder), partial(os.statvfs, folder), walk)
            if found.f_flag & flags != flags:
                yield Condition(
                    "host",
                    f"{folder} (allowed-mounts) is not mounted nosuid,nodev: root of a container"
                    " can leave setuid programs and devices there, and the engine cannot prevent"
                    " it",
                    f"mount -o remount,nosuid,nodev {folder}, if it is a mount of its own",
                    agents,
                )


def network_conditions(settings: Settings) -> Iterator[Condition]:
    """Yield the networks that the configuration names and the engine, which is asked, lacks."""
    wanted = [
        (about, f"{section}.{key}", name)
        for about, section, table in _docker_sections(settings)
        for key, names in (
            ("network", (table.network,)),
            ("allowed-networks", table.allowed_networks),
        )
        for name in names or ()
        if name and name not in _NETWORK_MODES and ":" not in name
    ]
    if settings.node.runtime != "docker" or not wanted:
        return
    with suppress(RuntimeUnavailable):  # a condition of its own
        found = asyncio.run(_list_networks(settings.runtime.docker.socket))
        for about, key, name in wanted:
            if name not in found:
                reason = f"{key}: the engine has no network {name!r}"
                yield Condition(about, reason, f"docker network create {name}")


async def _list_networks(socket: Path) -> set[str]:
    """Return the names and the ids of the engine's networks.

    Raises:
        RuntimeUnavailable: the engine does not answer.
    """
    from agentd.runtimes.docker.docker_client import DockerClient
    from agentd.runtimes.docker.error_translation import errors_as_unavailable

    docker = DockerClient(socket)
    try:
        with errors_as_unavailable():
            networks = await docker.call("GET", "/networks", timeout_s=ANSWER_TIMEOUT_S)
            return {network[member] for network in networks for member in ("Name", "Id")}
    finally:
        await docker.close()


def _systemd_conditions() -> Iterator[Condition]:
    from agentd.runtimes.systemd.unit_bundle import static_busybox

    if static_busybox() is None:
        yield Condition(
            "host",
            "this host has no static BusyBox: the exit status of a kernel is lost if only systemd"
            " sees its end, such as at shutdown",
            "install busybox-static",
        )
    if (uid := os.geteuid()) != 0 and not is_lingering(uid):
        reason = "kernels end when this user logs out: lingering is off"
        yield Condition("host", reason, "loginctl enable-linger")
