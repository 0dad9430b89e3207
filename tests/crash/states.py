"""The crash states of a runtime, and everything that a death leaves behind."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from agentd.core.kernel.plan import name_prefix
from crash.points import POINTS
from support.checked_node import KERNEL_CGROUPS, CheckedNode, agentd_processes, start_time

VARYING = ("_at", "start_time", "since", "until", "sum")
"""Suffixes of members whose values differ from one life to the next."""
PIDS = ("pid", "shim_pid")


def state_of(point: str, runtime: str) -> str:
    """Return the first point at which a death leaves the same state as at this one."""
    for earlier in POINTS[point].same_as:
        if runtime in POINTS[earlier].on:
            return state_of(earlier, runtime)
    return point


def states_of(points: Iterable[str], runtime: str) -> dict[str, list[str]]:
    """Group points by the state that a death leaves."""
    states: dict[str, list[str]] = {}
    for point in points:
        states.setdefault(state_of(point, runtime), []).append(point)
    return states


def left_behind(node: CheckedNode) -> str:
    """Return what a dead daemon's node consists of, one line for each thing.

    Times, sums, pids and the node's name are left out; of a pid it stands there whether it lives.
    """
    folder = node.daemon.folder
    lines = [f"file {line}" for line in _files(folder)]
    for pid, env in agentd_processes():
        if env.get("AGENTD_NODE") == node.node_id:
            lines.append(f"process {env['AGENTD_KERNEL']} {_command(pid)}")
        if int(env.get("AGENTD_PLUGIN", "0").partition(".")[0]) in node.dead:
            lines.append("plugin")
    for parent in KERNEL_CGROUPS:
        for group in parent.glob(f"{name_prefix(node.node_id)}*"):
            members = (group / "cgroup.procs").read_text().split()
            lines.append(f"cgroup {parent.parent.name} {group.name} {len(members)}")
    lines += [f"container {line}" for line in _containers(node)]
    text = "\n".join(sorted(lines)).replace(name_prefix(node.node_id), "KERNEL-")
    return text.replace(node.node_id, "NODE").replace(str(folder), "FOLDER")


def _files(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        is_content = name.parts[0] == "state" and path.is_file() and path.name != "lock"
        is_content |= path.name == "host.lock"
        yield f"{name} {_content(path) if is_content else ''}"


def _content(path: Path) -> str:
    text = path.read_text(errors="replace")
    try:
        return json.dumps(_lasting(json.loads(text)), sort_keys=True)
    except ValueError:
        return text


def _lasting(value: Any) -> Any:
    if isinstance(value, list):
        return [_lasting(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: bool(start_time(member)) if name in PIDS else _lasting(member)
        for name, member in value.items()
        if not name.endswith(VARYING)
    }


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _containers(node: CheckedNode) -> Iterator[str]:
    if node.engine is None:
        return
    for container in node.engine.containers():
        if container["Labels"].get("io.agentd.node") == node.node_id:
            shown = node.engine.call("GET", f"/containers/{container['Id']}/json")
            state = {m: shown["State"][m] for m in ("Status", "ExitCode", "Error", "OOMKilled")}
            labels = dict(container["Labels"])
            record = json.dumps(_lasting(json.loads(labels.pop("io.agentd.record"))))
            yield f"{container['Names']} {state} {sorted(labels.items())} {record}"
