"""Claims on a machine with systemd: a scope holds for the children of a command, too."""

from typing import Any

from node.conftest import CONFIG, Node, until_ready
from support.waiting import until_blocking

LEFT_BEHIND = (
    "echo $TPU_VISIBLE_DEVICES; setsid sleep 9999 >/dev/null 2>&1 </dev/null & echo $! >/tmp/child"
)


def claims(node: Node) -> list[dict[str, Any]]:
    status, content = node.ask("GET", "/v1/claims")
    assert status == 200, content
    return list(content)


def held(node: Node) -> list[Any]:
    devices = node.ask("GET", "/v1/devices")[1]
    return [d["holders"] for d in devices if d["device_name"] == "tpu" and d["holders"]]


def until_free(node: Node) -> None:
    until_blocking(lambda: claims(node), lambda listed: not listed)
    assert held(node) == []


def test_a_scope_holds_until_the_last_child_has_ended(node: Node) -> None:
    node.configure(CONFIG.format(runtime="systemd"))
    until_ready(node)
    words = "agentctl claim team-a --scope --id scoped -s tpu.device=1 -- sh -c"
    node.must(f"{words} '{LEFT_BEHIND}'", 120)
    (claim,) = claims(node)
    assert claim["holder"]["cgroup"].startswith("/system.slice/agentd-claim-"), claim
    assert held(node) == [[{"claim_id": "scoped", "amount": "1", "amounts": {"tpu.device": "1"}}]]
    node.must("systemctl restart agentd", 300)
    until_ready(node)
    assert [claim["claim_id"] for claim in claims(node)] == ["scoped"]
    node.must("kill $(cat /tmp/child)")
    until_free(node)


def test_a_cgroup_with_a_container_or_agentd_in_it_is_refused(node: Node) -> None:
    node.configure(CONFIG.format(runtime="systemd"))
    until_ready(node)
    node.create("unit", "sleep", "9999")
    for cgroup in ("/agentd.slice", "/system.slice/agentd.service", "/system.slice"):
        body = {"slots": {"tpu.device": 1}, "holder": {"cgroup": cgroup}}
        status, answer = node.ask("POST", "/v1/agents/team-a/claims", body)
        assert (status, "holds agentd or a kernel" in answer["detail"]) == (422, True), answer
    node.remove("unit")
    until_free(node)
