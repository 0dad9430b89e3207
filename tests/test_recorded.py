"""Names and files are those that 427f930 recorded, but for the changes that stand here.

A member that is renamed in a value class would otherwise rename a member on disk or on the wire
without anybody noticing.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentd.core.claim import record as claim_records
from agentd.core.kernel.record import read_members
from agentd.state.schemas import SavedDevices, SavedEngines, SavedNode
from recorded.names import names
from recorded.record import BODIES, record_etcd, record_node
from support.engine import Engine

HERE = Path(__file__).parent / "recorded"
ROOT = Path(__file__).parents[1]
NAMES = json.loads((HERE / "427f930-names.json").read_text())
NODE = json.loads((HERE / "427f930.json").read_text())
ETCD = json.loads((HERE / "427f930-etcd.json").read_text())
RUNTIMES = ("process", "docker")
RECORDS = (
    *(f"kernels/{kernel}/record.json" for kernel in BODIES),
    *(f"{'ended' if kernel == 'ended' else 'records'}/{kernel}.json" for kernel in BODIES),
)
_LOGS = {
    "agentd get_logs GET /v1/kernels/{kernel}/logs path:kernel query:follow": "",
    "gateway get_logs GET /v1/kernels/{kernel}/logs path:kernel query:follow": " query:node",
    "gateway get_logs_at_node GET /v1/nodes/{node}/kernels/{kernel}/logs path:kernel path:node"
    " query:follow": "",
}
"""The routes of logs, with their parameters around `from`, which is new."""
_LOGS_QUERY = " query:since query:stream query:tail query:timestamps"
GONE: Mapping[str, frozenset[str]] = {
    "log_events": frozenset({"node.warned", "peers.publish_failed"}),
    "options": frozenset(
        {
            "agentctl fleet logs kernel",  # now several: `kernels`
            "agentctl run --async",
            "agentd config migrate",
            "agentd config migrate --force",
            "agentd config migrate --output",
            "agentd config migrate old",
            "agentd plugin check --hardware",
            "agentd plugin check --image",
            "agentd plugin check --probe",
        }
    ),
    "operations": frozenset(f"{route}{node}{_LOGS_QUERY}" for route, node in _LOGS.items()),
}
"""Recorded names that exist no more, by their list."""
_RUNTIMES = ("docker", "systemd", "process")
_LIMITS = ("", ".*.soft", ".*.hard")
_AGENT = ("allowed-groups", "allowed-mounts", "allowed-networks", "network", "registry-auth")
_NODE, _CLEAR = "/v1/nodes/{node}", "devices/{device_name}/{id}/clear"
_CLEAR_PATHS = "path:device_name path:id"
_SIGNAL = "/kernels/{kernel}/signal path:kernel"
_PLUGIN_AT_NODE = f"{_NODE}/plugins/{{plugin}}"
NEW: Mapping[str, frozenset[str]] = {
    "configuration": frozenset(
        {
            "plugins.*.exclude",
            *(f"agents.{key}" for key in _AGENT),
            *(f"runtime.{runtime}.allowed-groups" for runtime in _RUNTIMES),
            *(f"runtime.{name}.default-ulimits{part}" for name in _RUNTIMES for part in _LIMITS),
        }
    ),
    "audit_actions": frozenset(
        f"{program} {action}"
        for program in ("agentd", "gateway")
        for action in ("clear_device", "signal_kernel", "start_plugin", "stop_plugin")
    )
    | {"gateway cordon_node", "gateway uncordon_node"},
    "operations": frozenset(
        {
            *(f"{route} query:from{node}{_LOGS_QUERY}" for route, node in _LOGS.items()),
            f"agentd clear_device POST /v1/{_CLEAR} {_CLEAR_PATHS}",
            f"agentd signal_kernel POST /v1{_SIGNAL}",
            f"gateway signal_kernel POST /v1{_SIGNAL} query:node",
            f"gateway signal_kernel_at_node POST {_NODE}{_SIGNAL} path:node",
            f"gateway clear_device_at_node POST {_NODE}/{_CLEAR} {_CLEAR_PATHS} path:node",
            "agentd start_plugin POST /v1/plugins/{plugin}/start path:plugin",
            "agentd stop_plugin POST /v1/plugins/{plugin}/stop path:plugin",
            f"gateway start_plugin_at_node POST {_PLUGIN_AT_NODE}/start path:node path:plugin",
            f"gateway stop_plugin_at_node POST {_PLUGIN_AT_NODE}/stop path:node path:plugin",
            *(f"gateway {w}_node POST {_NODE}/{w} path:node" for w in ("cordon", "uncordon")),
        }
    ),
    "environment": frozenset(
        {"AGENTD_RUN_DIR", "AGENTD_SLOTS", "AGENTD_SLURM_RUN", "AGENTD_SLURM_SETTINGS"}
    ),
    "log_events": frozenset(
        {
            "condition.began",
            "condition.ended",
            "credential.replaced",
            "log.lines_lost",
            "node.keys_deleted",
            "node.located",
            "node.reached",
            "node.read_failed",
            "node.unreachable",
            "node.unusable",
            "plugin.unavailable",  # since 427f930, but only now found by the generator
            "plugin.watch_failed",
            "publisher.reload_refused",
            "publisher.reloaded",
            "runtime.leftover_unreadable",
            "store.recovered",
            "store.reverted",
            "store.write_failed",
        }
    ),
    "options": frozenset(
        {
            "agentctl fleet logs --since",
            "agentctl fleet logs --stream",
            "agentctl fleet logs --timestamps/-t",
            "agentctl fleet logs kernels",
            "agentd-fleet join-options",  # hidden
            "agentd-fleet join-options --config",
            *(
                f"agentctl {command} --{option}"
                for command in ("create", "run", "fleet create")
                for option in ("entrypoint", "group", "init")
            ),
            *(
                f"agentctl plugins {word}{argument}"
                for word in ("start", "stop")
                for argument in ("", " --json", " -o/--output", " name")
            ),
            "agentctl claim --user",
            "agentctl events --after",
            "slurm gres --node",
            "slurm gres --type",
            "slurm gres --types",
            *(
                f"agentctl clear{argument}"
                for argument in ("", " --json", " -o/--output", " device")
            ),
            *(
                f"agentctl fleet nodes {command}{argument}"
                for command in ("cordon", "uncordon")
                for argument in ("", " --json", " -o/--output", " node")
            ),
            "agentctl fleet nodes cordon --reason",
            *(f"agentctl signal{argument}" for argument in ("", " kernel", " signal")),
            "agentctl run --overcommit",
        }
    ),
    "schemas": frozenset(
        {
            "agentd ClaimView reason",
            "agentd DeviceView files",
            "gateway ClaimView reason",
            "gateway DeviceView files",
            "gateway FleetDeviceView files",
            *(f"gateway CordonRequest{member}" for member in ("", " reason")),
            *(f"gateway CordonView{member}" for member in ("", " by", " reason", " since")),
            "gateway FleetNodeView cordon",
        }
        | {
            f"{document} {name}"
            for document in ("agentd", "gateway")
            for name in (
                *(f"EngineCondition{member}" for member in ("", " reason", " remedy")),
                "EngineRequest conditions",
                "SignalRequest",
                "SignalRequest signal",
                "ConditionView",
                "ConditionView about",
                "ConditionView reason",
                "ConditionView remedy",
                "ConditionView since",
                "NodeView conditions",
            )
        }
        | {
            f"{model} {member}"
            for model in ("agentd CreateKernelRequest", "gateway FleetKernelRequest")
            for member in ("attempt", "entrypoint", "groups", "init", "overcommit", "remove")
        }
    ),
}
"""Names that came since, by their list."""
GONE_MEMBERS = frozenset({"/files/intents/.next.new str"})
"""Members of files, labels, views, metrics and values in etcd that exist no more."""
NEW_MEMBERS = frozenset(
    {
        *(f"/files/claims/c-{claim}.json/sum str" for claim in ("name", "pid", "ttl", "used")),
        *(f"/files/{path}/sum str" for path in RECORDS),
        *(f"/files/{name}.json/sum str" for name in ("devices", "engines", "node")),
        *(f"/files/kernels/{kernel}/identity.json/kernel_id str" for kernel in BODIES),
        *(f"/containers/{kernel}/io.agentd.record/sum str" for kernel in BODIES),
        "/agentd/main/nodes/NODE/reason str",
        "/agentd/main/nodes/NODE/runtime/name str",
        "/agentd/main/nodes/NODE/runtime/state str",
        "/agentd/main/known/NODE/rival str",
        "/agentd/main/routes/k1/attempt str",
        *(
            f"/files/kernels/{kernel}/identity.json/kernel_id str"
            for kernel in ("ended", "from-claim", "lives")
        ),
        "/files/devices.json/devices/is_excluded bool",
        "/files/devices.json/devices/taken_place NoneType",
        "/files/devices.json/devices/needs_clear str",
        "/files/devices.json/devices/unserved str",
        "agentd_condition gauge A condition in GET /v1/node about",
        "agentd_fleet_node_usable gauge Whether kernels can be created on a node node_id",
        "agentd_log_lines_lost counter Lines of the log that could not be written",
        "agentd_fleet_log_lines_lost counter Lines of the gateway's log that could not be written",
    }
)
"""Members that came since."""


def flat(listed: Any, before: str = "") -> Iterator[str]:
    """Yield one text for each name of a list."""
    if isinstance(listed, dict):
        for name, below in listed.items():
            yield from flat(below, f"{before}{name} ")
    elif isinstance(listed, list):
        yield before.strip()
        yield from (f"{before}{name}" for name in listed)
    else:
        yield f"{before}{listed}"


@pytest.mark.parametrize("listed", NAMES)
def test_names_are_the_recorded_ones(listed: str) -> None:
    was, now = set(flat(NAMES[listed])), set(flat(names()[listed]))
    assert was - now == GONE.get(listed, frozenset())
    assert now - was == NEW.get(listed, frozenset())


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_recorded_files_are_read_and_written_alike(runtime: str) -> None:
    files = NODE[runtime]["files"]
    structs = {"devices": SavedDevices, "engines": SavedEngines, "node": SavedNode}
    for name, struct in structs.items():
        text = files[f"{name}.json"]
        again = msgspec.json.encode(msgspec.json.decode(text, type=struct))
        assert _recorded_part(json.loads(again), json.loads(text)) == json.loads(text)
    kinds = []
    for path, text in files.items():
        folder, name = Path(path).parts[0], Path(path).stem
        if folder == "claims":
            claim = claim_records.decode(name, text)
            again = read_members(claim_records.encode(claim, "recorded-" + runtime))
            assert again == json.loads(text) | {"schema": 2}
            kinds.append(json.loads(text)["holder"]["type"])
    assert {"process", "cgroup", "ttl", "name"} == set(kinds)


def _recorded_part(content: Any, recorded: Any) -> Any:
    """Return a file without the empty members that came since."""
    if isinstance(content, dict):
        return {
            name: _recorded_part(below, recorded.get(name))
            for name, below in content.items()
            if below or name in recorded
        }
    if isinstance(content, list):
        return [_recorded_part(*pair) for pair in zip(content, recorded, strict=True)]
    return content


def members(content: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each member with its type; numbers in names are those of one run."""
    if isinstance(content, dict):
        for name, below in content.items():
            yield from members(below, f"{path}/{re.sub(r'[0-9]+', 'N', name)}")
    elif isinstance(content, list):
        for item in content:
            yield from members(item, path)
    else:
        yield f"{path} {type(content).__name__}"


def members_of_node(content: dict[str, Any]) -> set[str]:
    """Return the members of files, labels, views and metrics, without the claim of a cgroup."""
    files = {
        path: json.loads(text) if path.endswith(".json") and text.strip(" \0") else ""
        for path, text in content["files"].items()
        if Path(path).stem != "c-cgroup" and not path.startswith("docker/")
    }
    labels = {
        name: {key: _json(value) for key, value in container["labels"].items()}
        for name, container in content["containers"].items()
    }
    views = {name: view for name, view in content.items() if name not in ("node", "metrics")}
    views["claims"] = [claim for claim in content["claims"] if claim["claim_id"] != "c-cgroup"]
    shown = set(members({**views, "files": files, "containers": labels}))
    return shown | metrics_of(content)


def _json(text: str) -> Any:
    return json.loads(text) if text.startswith("{") else text


@pytest.mark.parametrize("runtime", ["process", pytest.param("docker", marks=pytest.mark.docker)])
async def test_node_writes_and_shows_what_was_recorded(
    runtime: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    engine: Engine | None = request.getfixturevalue("engine") if runtime == "docker" else None
    was, now = (
        members_of_node(NODE[runtime]),
        members_of_node(await record_node(folder, runtime, engine)),
    )
    assert was - now <= GONE_MEMBERS
    assert now - was <= NEW_MEMBERS


async def test_fleet_writes_what_was_recorded(folder: Path) -> None:
    was, now = members_of_fleet(ETCD), members_of_fleet(await record_etcd(folder))
    assert was - now <= GONE_MEMBERS
    assert now - was <= NEW_MEMBERS


def members_of_fleet(content: dict[str, Any]) -> set[str]:
    """Return the members of the values in etcd, by key, and the metrics of the gateway."""
    shown = (
        members(value, key.replace(content["node"], "NODE"))
        for key, value in content["keys"].items()
    )
    return {member for each in shown for member in each} | metrics_of(content)


def test_each_metric_is_documented() -> None:
    pages = [ROOT / "docs" / "reference" / name for name in ("usage-and-metrics.md", "fleet.md")]
    words = re.findall(r"`((?:agentd|…)?_[a-z_]+)", " ".join(page.read_text() for page in pages))
    names = {word for word in words if word.startswith("agentd_")}
    ends = {word.removeprefix("…") for word in words} - names
    beginnings = {name[: place.start()] for name in names for place in re.finditer("_", name)}
    documented = names | {beginning + end for beginning in beginnings for end in ends}
    contents = (*(NODE[runtime] for runtime in RUNTIMES), ETCD)
    recorded = {name for content in contents for name in content["metrics"]}
    new = {member.split()[0] for member in NEW_MEMBERS if member.startswith("agentd_")}
    assert {name for name in recorded | new if not {name, f"{name}_total"} & documented} == set()


def metrics_of(content: dict[str, Any]) -> set[str]:
    return {" ".join([name, *words]) for name, words in content["metrics"].items()}
