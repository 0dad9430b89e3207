"""A user of kernels that the host learns while agentd runs, on the runtimes of the host."""

import pytest

from node.conftest import CONFIG, Node, until_ready
from support.waiting import until_blocking

USER = "team-ldap"


@pytest.mark.parametrize("runtime", ["systemd", "process"])
def test_user_that_comes_later_delays_its_agent_alone(node: Node, runtime: str) -> None:
    node.must("systemctl enable agentd.socket agentd.service; systemctl start agentd.socket", 300)
    text = CONFIG.format(runtime=runtime).replace(
        'id = "team-b"', f'id = "team-b"\nuser = "{USER}"'
    )
    node.run(f"userdel {USER}")
    node.configure(text)
    until_ready(node)
    body = {"command": ["id", "-un"], "slots": {"cpu": 0, "mem": "32m"}}
    status, answer = node.ask("POST", "/v1/agents/team-b/kernels", body)
    assert (status, answer["code"]) == (503, "NotReady"), answer
    why = f"agents.1.user: no user '{USER}' on this host"
    found = {c["about"]: c["reason"] for c in node.ask("GET", "/v1/node")[1]["conditions"]}
    assert found["agent/team-b"] == why
    node.create("others", "sleep", "9999")
    checked = node.run("agentd check-config")
    assert (checked.status, why in checked.output) == (78, True)
    node.must("systemctl reload agentd", 60)
    try:
        node.must(f"useradd {USER}")
        until_blocking(
            lambda: node.ask("GET", "/v1/node")[1]["conditions"],
            lambda conditions: all(c["about"] != "agent/team-b" for c in conditions),
            within_s=90,
            every_s=1,
        )
        assert node.printed("theirs", "id", "-un", agent="team-b") == USER
    finally:
        node.remove("others")
        node.run(f"userdel {USER}")
