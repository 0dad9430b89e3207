"""The daemon dies at every point of the systemd runtime, and loses nothing over it."""

import json
import os
import shlex

import pytest

from crash.points import POINTS
from node.conftest import CONFIG, Node, until_ready
from support.waiting import until_blocking

DROP_IN = "/run/systemd/system/agentd.service.d"
FAILPOINTS = "/run/agentd-failpoints"
"""An environment file of the service that is there for one start alone."""
OF_SYSTEMD = sorted(
    name for name, point in POINTS.items() if "systemd" in point.on and "docker" not in point.on
)
MORE = sorted(
    name
    for name, point in POINTS.items()
    if name.split(".")[0] in ("create", "intent", "record", "stop", "delete")
    and "systemd" in point.on
    and not name.endswith("_replace")
    and name not in OF_SYSTEMD
)
"""Points without a runtime, which the other tests cover."""
BRIEFLY = ["create.after_group", "create.after_spawn", "delete.after_rename"]
TRIED = [*OF_SYSTEMD, *MORE] if os.environ.get("AGENTD_SOAK") else BRIEFLY
DEAF = "trap '' TERM; while :; do sleep 1; done"
BODY = {"kernel_id": "dies", "command": ["sh", "-c", DEAF], "slots": {"cpu": 0, "mem": "16m"}}
CREATE, STOP, DELETE = (
    ("POST", "/v1/agents/team-a/kernels"),
    ("POST", "/v1/kernels/dies/stop"),
    ("DELETE", "/v1/kernels/dies?timeout=0"),
)


@pytest.fixture(scope="module")
def resident(node: Node) -> str:
    """The process of a kernel that lives through all of it."""
    node.configure(CONFIG.format(runtime="systemd"))
    setting = shlex.quote(f"[Service]\nEnvironmentFile=-{FAILPOINTS}\n")
    node.must(f"mkdir -p {DROP_IN} && printf %s {setting} >{DROP_IN}/f.conf")
    node.must("systemctl daemon-reload")
    node.create("resident", "sleep", "9999")
    return node.main_pid("resident")


def begin(node: Node, point: str) -> None:
    """Restart the daemon so that it dies at a point; the one that follows it does not."""
    node.must(f"echo AGENTD_FAILPOINTS={point}=kill >{FAILPOINTS}")
    node.must(f"systemctl reset-failed agentd; systemctl restart agentd; rm {FAILPOINTS}", 300)
    until_ready(node)


def living(node: Node) -> dict[str, str]:
    """Every kernel whose unit is there, and its invocation, as systemd tells."""
    listing = "systemctl list-units --plain --no-legend --state=running 'agentd-*-*.service'"
    units = node.must(listing).split("\n")
    names = [line.split()[0] for line in units if line and "agentd-shim" not in line]
    shown = {n: node.must(f"systemctl show {n} -p InvocationID --value").strip() for n in names}
    return {n.split("-", 2)[2].removesuffix(".service"): shown[n] for n in names}


@pytest.mark.parametrize("point", TRIED)
def test_a_daemon_that_dies_loses_nothing(node: Node, resident: str, point: str) -> None:
    others = living(node).keys()
    begin(node, point)
    kind = "create" if point.endswith("before_move") else point.partition(".")[0]
    asked = [CREATE, *{"stop": [STOP], "delete": [DELETE], "record": [DELETE]}.get(kind, [])]
    for method, path in asked:
        body = BODY if path == CREATE[1] else {"timeout": 0.2} if path == STOP[1] else None
        node.machine.request(method, path, json.dumps(body) if body else "", 120)
    until_blocking(node.restarts, lambda count: count != "0", text=f"{point} kills", within_s=60)
    until_ready(node)
    kernels = node.ask("GET", "/v1/kernels")[1]
    assert {k["kernel_id"] for k in kernels if k["state"] == "running"} == living(node).keys()
    assert node.main_pid("resident") == resident
    assert node.findings() == []
    status, again = node.ask(*CREATE, BODY)
    was = next((k for k in kernels if k["kernel_id"] == "dies"), None)
    assert status == (201 if was is None else 200), again
    node.remove("dies")
    assert living(node).keys() == others
    assert "dies" not in node.must("ls -A /var/lib/agentd/units /var/lib/agentd/*s")


def test_resident_kernel_is_deleted(node: Node, resident: str) -> None:
    assert node.main_pid("resident") == resident
    node.remove("resident")
    node.must(f"rm -r {DROP_IN} && systemctl daemon-reload")
