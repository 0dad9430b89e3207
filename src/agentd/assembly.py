"""Building runtimes and the RPC endpoint from the settings."""

from __future__ import annotations

import os
import ssl
import stat
from contextlib import suppress
from pathlib import Path

import structlog

from agentd.config.runtimes import DockerSettings
from agentd.config.settings import RpcSettings, Settings
from agentd.core.access import Caller, Role
from agentd.errors import ConfigRefused, InvalidRequest, Problem
from agentd.host.cgroups import find_cgroups
from agentd.host.probe import boot_id
from agentd.rpc.callers import Token
from agentd.rpc.server import Door, Endpoint
from agentd.runtimes.docker.config import DockerRules
from agentd.runtimes.docker.runtime import DockerRuntime
from agentd.runtimes.process.runtime import ProcessRuntime
from agentd.runtimes.process.spawn import Account, ProcessRules, find_account
from agentd.services.interfaces import Runtime

log = structlog.get_logger()

TOKEN_MODE = 0o640
MAX_TOKEN = 4096
RUNTIMES = frozenset({"docker", "process"})


def runtime(name: str, settings: Settings, node_id: str, kernels: Path) -> Runtime:
    """Return one of `RUNTIMES`; `kernels` is where the bundles of processes are.

    Raises:
        ConfigRefused: its settings do not fit this machine.
    """
    if name == "docker":
        docker = settings.runtime.docker
        return DockerRuntime(docker.socket, node_id, docker_rules(docker))
    rules = process_rules(settings)
    return ProcessRuntime(kernels, node_id, boot_id(), rules, find_cgroups())


def docker_rules(docker: DockerSettings) -> DockerRules:
    """Return what containers may have."""
    return DockerRules(
        network=docker.network,
        allowed_networks=docker.allowed_networks,
        allowed_mounts=docker.allowed_mounts,
        capabilities=docker.capabilities,
        pids_limit=docker.pids_limit,
        log_max_size=docker.log_max_size,
        log_max_files=docker.log_max_files,
        registry_auth=docker.registry_auth,
        stop_timeout_s=docker.stop_timeout,
        ulimits=docker.ulimits,
    )


def process_rules(settings: Settings) -> ProcessRules:
    """Return what process kernels may have, with every user looked up.

    Raises:
        ConfigRefused: there is no such user, or agentd may not run processes as another user.
    """
    process, is_root = settings.runtime.process, os.geteuid() == 0
    problems: list[Problem] = []
    accounts: dict[str, Account] = {}
    default = None
    try:
        default = find_account(process.user, "runtime.process.user") if is_root else None
    except InvalidRequest as error:
        problems += error.problems
    for index, agent in enumerate(settings.agents):
        where = f"agents.{index}.user"
        if agent.user is not None and not is_root:
            problems.append(Problem(where, "agentd is not root, and runs kernels as its own user"))
        elif agent.user is not None:
            try:
                accounts[agent.id] = find_account(agent.user, where)
            except InvalidRequest as error:
                problems += error.problems
    if problems:
        raise ConfigRefused(problems)
    return ProcessRules(
        default,
        accounts,
        log_max_size=process.log_max_size,
        log_max_files=process.log_max_files,
        pids_limit=process.pids_limit,
        stop_timeout_s=process.stop_timeout,
        ulimits=process.ulimits,
    )


def remarks(settings: Settings) -> list[str]:
    """Return what an operator should know of what these settings let kernels do."""
    wanted = os.ST_NOSUID | os.ST_NODEV
    found = []
    for folder in settings.runtime.docker.allowed_mounts:
        with suppress(OSError):
            if os.statvfs(folder).f_flag & wanted != wanted:
                found.append(
                    f"{folder} (allowed-mounts) is not mounted nosuid,nodev: root of a container"
                    " can leave setuid programs and devices there, and the engine cannot prevent it"
                )
    return found


def lock_folder() -> Path:
    """Return where a lock is held for each node id, by the daemons of this user."""
    if os.geteuid() == 0:
        return Path("/run/agentd")
    return Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp"))  # noqa: S108 - a lock, with the user's mode


def endpoint(settings: Settings) -> Endpoint:
    """Return where the daemon answers, and whom.

    Raises:
        ConfigRefused: a token or the certificate cannot be used.
    """
    rpc = settings.rpc
    main = Caller(rpc.socket.stem, Role.ADMIN)
    doors = [Door(rpc.socket.absolute(), rpc.socket_group, main)]
    doors += [
        Door(further.path.absolute(), further.group, further.to_caller(further.caller_name))
        for further in rpc.sockets
    ]
    if rpc.listen is None:
        return Endpoint(tuple(doors))
    host, port = rpc.host_port
    return Endpoint(tuple(doors), str(host), port, tokens(rpc), _tls(settings), rpc.max_connections)


def tokens(rpc: RpcSettings) -> tuple[Token, ...]:
    """Read every bearer token.

    Raises:
        ConfigRefused: files that cannot be used are named, all of them.
    """
    named = [
        (f"rpc.tokens.{index}.file", token.file, token.to_caller(token.name), token.gateway)
        for index, token in enumerate(rpc.tokens)
    ]
    if rpc.token_file is not None:
        admin = Caller(rpc.token_file.stem, Role.ADMIN)
        named.insert(0, ("rpc.token-file", rpc.token_file, admin, False))
    if rpc.token_file is not None and (why := _seen_by_others(rpc.token_file)):
        log.warning("rpc.token_file", file=str(rpc.token_file), reason=why)
    found: list[Token] = []
    problems: list[Problem] = []
    for where, path, caller, is_gateway in named:
        try:
            if path != rpc.token_file and (why := _seen_by_others(path)):
                problems.append(Problem(where, f"{path} {why}"))
                continue
            found.append(Token(_secret(path), caller, is_gateway))
        except ValueError as error:
            problems.append(Problem(where, f"{path} {error}"))
    secrets = [token.secret for token in found]
    if len(set(secrets)) < len(secrets):
        problems.append(Problem("rpc.tokens", "two callers have the same token"))
    if problems:
        raise ConfigRefused(problems)
    return tuple(found)


def _seen_by_others(path: Path) -> str:
    """Return what is wrong with the mode of a token's file; empty if nothing is."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return ""
    if not mode & ~TOKEN_MODE:
        return ""
    return f"has mode {mode:04o}: others can read or write it; allowed: 0600 or 0640"


def _secret(path: Path) -> str:
    """Read a token; the message of a ValueError says why it cannot be used."""
    try:
        with path.open(encoding="utf-8") as file:
            lines = file.read(MAX_TOKEN + 1).split()
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    if len(lines) != 1 or len(lines[0]) > MAX_TOKEN:
        raise ValueError("is empty; it needs one line" if not lines else "is not one word")
    return lines[0]


def _tls(settings: Settings) -> ssl.SSLContext | None:
    rpc = settings.rpc
    if rpc.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(rpc.tls_cert, rpc.tls_key)
    except (OSError, ssl.SSLError) as error:
        why = f"{rpc.tls_cert} and {rpc.tls_key} cannot be used: {error}"
        raise ConfigRefused([Problem("rpc.tls-cert", why)]) from None
    return context
