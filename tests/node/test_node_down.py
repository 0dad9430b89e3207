"""The same node when the machine goes down: reboots, power cuts; and its users, and its end."""

import json

from node.conftest import ASK, CONFIG, Node, until_ready
from node.machine import Machine
from support.waiting import until_blocking

POLITE = "while :; do sleep 1; done"
LIMIT = "/etc/systemd/system.conf.d/limit.conf"
DEAF = f"trap '' TERM; {POLITE}"


def test_power_off_ends_kernels_of_every_runtime(machine: Machine, node: Node) -> None:
    """Also containers that outlive their engine, and kernels that ignore SIGTERM."""
    live_restore(node)
    node.must("mkdir -p /tmp/r/bin && cp /bin/busybox /tmp/r/bin/sleep")
    node.must("tar -C /tmp/r -c . | docker import - tiny:1")
    for runtime, options in (("docker", {"image": "tiny:1"}), ("process", {})):
        node.configure(CONFIG.format(runtime=runtime) + '[runtime.docker]\nnetwork = "none"\n')
        node.create(f"of-{runtime}", "sleep", "9999", **options)
    node.create("deaf-process", "sh", "-c", DEAF)
    node.configure(CONFIG.format(runtime="systemd"))
    for number in range(14):
        name, script = (f"deaf{number}", DEAF) if number < 4 else (f"polite{number}", POLITE)
        node.create(name, "sh", "-c", script, slots={"cpu": 0, "mem": "16m"})
    assert node.run("systemctl show agentd -p TasksCurrent --value").output.strip().isdecimal()
    in_daemon = node.must("systemd-cgls -u agentd.service --no-pager")
    assert "shim" not in in_daemon
    names = [kernel["kernel_id"] for kernel in node.ask("GET", "/v1/kernels")[1]]
    assert {"secret", "talks"} < set(names)
    taken = machine.power_off()
    print(f"power-off with {len(names)} kernels, 5 of them deaf: {taken:.1f} s")
    machine.start()
    until_ready(node)
    assert {kernel["kernel_id"] for kernel in node.ask("GET", "/v1/kernels")[1]} == set(names)
    for name in names:
        kernel = node.until(name, "terminated")
        assert kernel["reason"].startswith("the node restarted"), kernel
        wanted = (137,) if name.startswith("deaf") else (143,)
        if name == "of-docker":  # its engine had stopped before it ended
            wanted = (137, 143, 255)
        assert kernel["exit_code"] in wanted, kernel
    assert node.logs("talks")
    node.remove(*names)
    node.must(f"rm /etc/docker/daemon.json {LIMIT}; systemctl daemon-reexec", 300)
    node.must("systemctl restart docker", 300)


def live_restore(node: Node) -> None:
    """Make containers outlive their engine.

    When the machine ends, systemd waits for them as long as its default says: here 15 s, not 90.
    """
    node.must("mkdir -p /etc/systemd/system.conf.d; systemctl stop docker.socket docker")
    node.must(
        f"printf '[Manager]\\nDefaultTimeoutStopSec=15s\\n' >{LIMIT}; systemctl daemon-reexec"
    )
    node.must("""mkdir -p /etc/docker; printf '{"live-restore": true}' >/etc/docker/daemon.json""")
    node.must("systemctl start docker", 300)


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
    until_blocking(
        lambda: node.run(f"{ask} GET /readyz").output,
        lambda answer: answer.startswith("200"),
        within_s=120,
        every_s=0.5,
    )
    assert "lingering is off" not in node.must(f"{ask} GET /v1/node?check=true")
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
    node.must("cd /payload && apt install -y ./agentd_*.deb", 300)
    node.must(f"cat >/etc/agentd/agent.toml <<'T'\n{CONFIG.format(runtime='systemd')}\nT")
    node.must("systemctl enable --now agentd.socket agentd.service", 300)
    assert node.kernel("stays")["state"] == "running"
    node.remove("stays")
    node.must("dpkg --purge agentd", 300)
    node.must("test ! -e /var/lib/agentd && test ! -e /etc/agentd")
