"""The same node when the machine goes down: power-off, power cut; its users, and its end."""

import json
import os
import time

import pytest

from node.conftest import ASK, CONFIG, Node, until_ready
from node.machine import Machine

DEAF = "trap '' TERM; while :; do sleep 1; done"


@pytest.mark.parametrize("live_restore", [False, True] if "AGENTD_SOAK" in os.environ else [False])
def test_power_off_ends_kernels_of_every_runtime_in_time(
    machine: Machine, node: Node, live_restore: bool
) -> None:
    """A soak has containers that outlive their engine, too: systemd waits 90 s for those."""
    settings = json.dumps({"live-restore": live_restore})
    node.must("systemctl stop docker.socket docker; mkdir -p /etc/docker /tmp/r/bin")
    node.must(f"printf '{settings}' >/etc/docker/daemon.json; systemctl start docker", 300)
    node.must("cp /bin/busybox /tmp/r/bin/sleep && tar -C /tmp/r -c . | docker import - tiny:1")
    node.configure(CONFIG.format(runtime="docker") + '[runtime.docker]\nnetwork = "none"\n')
    node.create("of-docker", "sleep", "9999", image="tiny:1")
    node.configure(CONFIG.format(runtime="process"))
    node.create("of-process", "sleep", "9999")
    node.create("deaf-process", "sh", "-c", DEAF)
    node.configure(CONFIG.format(runtime="systemd"))
    polite, deaf = [f"p{number}" for number in range(13)], [f"deaf{number}" for number in range(4)]
    for name in polite + deaf:
        loop = DEAF if name in deaf else "while :; do sleep 1; done"
        node.create(name, "sh", "-c", loop, slots={"cpu": 0, "mem": "16m"})
    assert node.run("systemctl show agentd -p TasksCurrent --value").output.strip().isdecimal()
    in_daemon = node.must("systemd-cgls -u agentd.service --no-pager")
    assert "shim" not in in_daemon
    before = {kernel["kernel_id"] for kernel in node.ask("GET", "/v1/kernels")[1]}
    assert len(before) >= 20
    taken = machine.power_off()
    print(f"power-off with {len(before)} kernels, 5 of them deaf: {taken:.1f} s")
    machine.start()
    until_ready(node)
    kernels = {kernel["kernel_id"]: kernel for kernel in node.ask("GET", "/v1/kernels")[1]}
    assert kernels.keys() == before
    assert {kernel["state"] for kernel in kernels.values()} == {"terminated"}
    assert all(kernel["reason"].startswith("the node restarted") for kernel in kernels.values())
    codes = {name: kernel["exit_code"] for name, kernel in kernels.items()}
    assert {codes[name] for name in ("of-process", *polite)} == {143}
    assert {codes[name] for name in ("deaf-process", *deaf)} == {137}
    assert codes["of-docker"] in ((137, 143, 255) if live_restore else (137, 143))
    if "talks" in before:  # a kernel of the tests before, with a log
        assert codes["talks"] == 143
        assert node.logs("talks")
    assert live_restore or taken < 3 * (10 + 10), "thrice what it may take: it is interpreted"
    node.remove(*kernels)


def test_a_power_cut_leaves_no_kernel_unaccounted_for(machine: Machine, node: Node) -> None:
    """Nor a claim: one ends with the boot, also if the cut left its new record empty."""
    node.create("cut", "sleep", "9999")
    node.must("sync")
    for name, survives in (("kept", True), ("ended", False)):
        holder = {"name": name, "survives_reboot": survives}
        body = {"claim_id": name, "slots": {"mem": "16m"}, "holder": holder}
        status, answer = node.ask("POST", "/v1/agents/team-a/claims", body)
        assert status == 201, answer
    machine.pull_plug()
    machine.start()
    until_ready(node)
    kernel = node.kernel("cut")
    assert kernel["state"] == "terminated"
    assert kernel["reason"].startswith("the node restarted")
    assert [claim["claim_id"] for claim in node.ask("GET", "/v1/claims")[1]] == ["kept"]
    assert node.ask("DELETE", "/v1/claims/kept")[0] == 204
    node.remove("cut")


def test_a_user_s_daemon_beside_the_system_s(node: Node) -> None:
    node.must("loginctl enable-linger mallory; systemctl start user@$(id -u mallory)")
    settings = (
        '[node]\nstate-dir = "/home/mallory/state"\nruntime = "systemd"\n'
        '[rpc]\nsocket = "/home/mallory/a.sock"\n'
    )
    node.must(
        f"printf '{settings}' >/home/mallory/agent.toml && chown mallory /home/mallory/agent.toml"
    )
    as_user = "runuser -u mallory -- env XDG_RUNTIME_DIR=/run/user/$(id -u mallory)"
    node.must(
        f"{as_user} systemd-run --user --unit agentd agentd run --config /home/mallory/agent.toml"
    )
    ask = f"{as_user} AGENTD_SOCKET=/home/mallory/a.sock {ASK}"
    end = time.monotonic() + 120
    while not node.run(f"{ask} GET /readyz").output.startswith("200"):
        assert time.monotonic() < end, node.run("journalctl -n 40").output
        time.sleep(0.5)
    body = {"kernel_id": "u1", "command": ["sleep", "999"], "slots": {"cpu": 0, "mem": "16m"}}
    made = node.must(f"{ask} POST /v1/agents/main/kernels '{json.dumps(body)}'")
    assert made.startswith("201"), made
    assert {"devices", "separation", "cpu", "logs"} <= set(
        json.loads(made.partition("\n")[2])["not_enforced"]
    )
    assert "agentd-" in node.must(f"{as_user} systemctl --user list-units 'agentd-*u1.service'")
    assert node.ask("GET", "/v1/kernels/u1")[0] == 404
    node.must(f"{ask} DELETE '/v1/kernels/u1?timeout=0'")
    node.must(f"{as_user} systemctl --user stop agentd; loginctl disable-linger mallory")


def test_stopping_takes_both_units_and_a_purge_keeps_what_lives(node: Node) -> None:
    node.create("stays", "sleep", "999")
    unit = node.unit("stays")
    node.must("apt-get purge -y agentd >/tmp/purge.log 2>&1 || dpkg --purge agentd", 300)
    assert node.must(f"systemctl is-active {unit}").strip() == "active"
    node.must("test -d /var/lib/agentd/units/stays && test ! -e /usr/bin/agentd")
    node.must("dpkg -i /payload/agentd_*.deb", 300)
    node.must(f"cat >/etc/agentd/agent.toml <<'T'\n{CONFIG.format(runtime='systemd')}\nT")
    node.must("systemctl enable --now agentd.socket agentd.service", 300)
    assert node.kernel("stays")["state"] == "running"
    node.remove("stays")
    node.must("dpkg --purge agentd", 300)
    node.must("test ! -e /var/lib/agentd && test ! -e /etc/agentd")
