"""A node whose /run or state folder is full for a moment, and one that may not write cgroups."""

import pytest

from node.conftest import CONFIG, Node, until_ready
from support.waiting import until_blocking

BODY = {"kernel_id": "full", "command": ["true"], "slots": {"cpu": 0, "mem": "32m"}}
UNITS = "/var/lib/agentd/units"
FILL = "dd if=/dev/zero of={folder}/filler bs=4k 2>/dev/null; sync"


@pytest.mark.parametrize("folder", [UNITS, "/run"])
def test_unit_that_finds_no_room_is_refused_for_the_moment(node: Node, folder: str) -> None:
    node.must("systemctl start agentd.socket", 300)
    node.configure(CONFIG.format(runtime="systemd"))
    until_ready(node)
    if folder == UNITS:
        node.must(f"mount -t tmpfs -o size=256k,mode=700 none {folder}")
    node.run(FILL.format(folder=folder))
    try:
        status, answer = node.ask("POST", "/v1/agents/team-a/kernels", BODY)
        assert (status, answer["code"]) == (503, "StateUnavailable"), answer
        shown = [c["reason"] for c in node.ask("GET", "/v1/node")[1]["conditions"]]
        assert any(UNITS in reason for reason in shown) == (folder == UNITS), shown
    finally:
        node.must(f"rm {folder}/filler")
    until_blocking(
        lambda: node.ask("GET", "/v1/node")[1]["conditions"],
        lambda conditions: not any(UNITS in c["reason"] for c in conditions),
        within_s=60,
        every_s=1,
    )
    node.create("full", "true")
    node.until("full", "terminated")
    node.remove("full")
    if folder == UNITS:
        node.must(f"umount {folder}")


def test_protected_cgroups_hide_no_member_of_a_kernel(node: Node) -> None:
    drop_in = "/run/systemd/system/agentd.service.d/protected.conf"
    node.must("systemctl start agentd.socket", 300)
    node.configure(CONFIG.format(runtime="process"))
    until_ready(node)
    node.create("forks", "sh", "-c", "sleep 9999 & exec sleep 9998", slots={"cpu": 0, "mem": "32m"})
    identity = "$(cat /var/lib/agentd/kernels/forks/identity.json)"
    pids = "import json, sys; i = json.loads(sys.argv[1]); print(i['shim_pid'], i['pid'])"
    shim, command = node.must(f'python3 -c "{pids}" "{identity}"').split()
    node.must(f"mkdir -p $(dirname {drop_in})")
    node.must(f"printf '[Service]\\nProtectControlGroups=yes\\n' >{drop_in}")
    try:
        node.must("systemctl daemon-reload; systemctl stop agentd", 120)
        node.must(f"kill -9 {shim} {command}")
        node.must("systemctl start agentd", 300)
        until_ready(node)
        assert node.kernel("forks")["state"] == "running"
        conditions = node.ask("GET", "/v1/node")[1]["conditions"]
        assert "runtime/process" in [c["about"] for c in conditions]
        created = node.create("unlimited", "sleep", "9999")
        assert {"mem", "pids_limit"} <= {*created["not_enforced"]}
        node.remove("forks", "unlimited")
        assert node.run("pgrep -f 'sleep 999[89]'").status == 1
    finally:
        node.must(f"rm {drop_in}; systemctl daemon-reload; systemctl restart agentd", 300)
        until_ready(node)
    assert node.findings() == []
