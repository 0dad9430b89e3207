"""agentd at home: a real node with systemd as PID 1 and cgroup v2, from its package to its purge.

One machine, in the order in which the tests stand.
"""

import json
import os
import re
from itertools import pairwise

from node.conftest import CONFIG, Node, until_ready
from node.machine import Machine
from support.waiting import until_blocking

STEAL = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
pidfd = libc.syscall(434, int(sys.argv[1]), 0)
for number in range(3, 64):
    got = libc.syscall(438, pidfd, number, 0)
    if got >= 0 or ctypes.get_errno() not in (9,):
        print("got" if got >= 0 else os.strerror(ctypes.get_errno()))
        break
"""


def test_the_package_starts_nothing_and_is_all_there(machine: Machine, node: Node) -> None:
    assert machine.run("systemctl is-active agentd.service agentd.socket").output.split() == [
        "inactive", "inactive",
    ]  # fmt: skip
    assert node.must("stat -c '%a %U:%G' /etc/agentd/agent.toml") == "640 root:agentd\n"
    assert "version 0.2" in node.must("man agentd | head -100; agentd --version")
    assert "allowed-mounts" in node.must("man agent.toml | cat")
    assert "_agentctl_completion" in node.must(
        "cat /usr/share/bash-completion/completions/agentctl"
    )
    refused = machine.run("agentctl ls")
    assert refused.status != 0
    assert "systemctl start agentd.socket agentd.service" in refused.output


def test_installed_and_the_first_kernel_by_the_readme(node: Node) -> None:
    node.must("agentd config init /tmp/new.toml && stat -c %a /tmp/new.toml | grep -q 640")
    all_plugins = CONFIG.format(runtime="systemd").replace('allow = ["generic"]', "")
    node.must(f"cat >/etc/agentd/agent.toml <<'T'\n{all_plugins}\nT")
    node.must("agentd check-config")
    node.must("systemd-analyze verify agentd.service agentd.socket agentd.slice")
    node.must("systemctl enable --now agentd.socket agentd.service", 300)
    assert node.printed("first", "sh", "-c", "echo hello from $AGENTD_KERNEL") == "hello from first"
    status = node.must("systemctl show agentd -p StatusText -p NRestarts")
    assert "kernels" in status
    exposure = node.must("systemd-analyze security agentd.service --no-pager | tail -1")
    assert float(re.search(r"level for agentd.service: ([0-9.]+)", exposure)[1]) <= 4.0


def test_commands_ignore_python_variables_of_a_user(node: Node) -> None:
    """Environment modules, conda and ROS set them; plugins have processes of their own."""
    shadows = "/tmp/shadows"
    names = " ".join(f"{shadows}/{name}.py" for name in ("click", "msgspec", "agentd", "json"))
    node.must(f"mkdir {shadows} && echo 'raise SystemExit(9)' | tee {names}")
    variables = f"PYTHONPATH={shadows} PYTHONHOME=/nowhere PYTHONWARNINGS=error"
    for command in (
        "agentd --version",
        "agentctl ls",
        "agentd plugins",
        "agentctl run --rm team-a true",
    ):
        node.must(f"cd {shadows} && {variables} {command}")


def test_limits_of_kernels_hold(node: Node) -> None:
    script = "x = bytearray(300 << 20); x[::4096] = b'1' * len(x[::4096])"
    node.create("big", "python3", "-c", script, slots={"cpu": 0, "mem": "64m"})
    ended = node.until("big", "terminated")
    assert (ended["oom_killed"], ended["exit_code"]) == (True, 137)
    fork = (
        "import os, signal\ntry:\n  [os.fork() or signal.pause() for _ in range(99)]\n"
        "except OSError as error: print(error)"
    )
    node.create("many", "python3", "-c", fork, pids_limit=10)
    until_blocking(lambda: node.logs("many"), lambda log: "temporarily unavailable" in log)
    seen = node.create("one", "sh", "-c", "nproc; sleep 999", slots={"cpu": 1, "mem": "32m"})
    core = next(iter(seen["allocation"]["cpu"]["cpu"]))
    assert node.must(f"systemctl show {node.unit('one')} -p AllowedCPUs --value").strip() == core
    until_blocking(lambda: node.logs("one"), "1")
    node.remove("big", "many", "one")


def test_a_kernel_opens_its_own_devices_and_no_others(node: Node) -> None:
    script = "for d in /dev/tpu0 /dev/tpu1 /dev/null; do (exec 3<>$d) 2>&1 && echo open $d; done"
    slots = {"cpu": 0, "mem": "32m", "tpu.device": 1}
    has = node.create("has", "sh", "-c", f"{script}; exec 9<>/dev/$T; sleep 999", slots=slots,
                      env={"T": "null"})  # fmt: skip
    mine = next(iter(has["allocation"]["tpu"]["tpu.device"]))
    number = re.search(r"\d+$", mine)[0]
    other = {"0": "1", "1": "0"}[number]
    text = until_blocking(lambda: node.logs("has"), lambda log: "open /dev/null" in log)
    assert f"open /dev/tpu{number}" in text or "No such device" in text
    assert f"open /dev/tpu{other}" not in text
    assert f"/dev/tpu{other}: Operation not permitted" in text, text


def test_a_kernel_cannot_take_another_s_descriptor(node: Node) -> None:
    pid = node.main_pid("has")
    stolen = node.printed("thief", "python3", "-c", STEAL, pid)
    assert stolen == "Operation not permitted"
    assert node.must(f"python3 -c '{STEAL}' {pid}") == "got\n", "root can: the trick works"
    node.remove("has")


def test_orphaned_child_keeps_the_kernel_alive(node: Node) -> None:
    slots = {"cpu": 0, "mem": "32m", "tpu.device": 1}
    node.create("parent", "sh", "-c", "sleep 999 & echo gone; exit 3", slots=slots)
    until_blocking(lambda: node.logs("parent"), "gone")
    kernel = node.kernel("parent")
    assert kernel["state"] == "running"
    assert kernel["allocation"]["tpu"]
    node.must("pkill -x sleep")
    assert node.until("parent", "terminated")["exit_code"] == 3
    node.remove("parent")


def test_commands_and_variables_arrive_as_they_were_sent(node: Node) -> None:
    hard = "a ${HOME} $$ %n \\x41 \"q\" 'r' `id`\ttab\nline"
    script = "import os, sys; print(sys.argv[1:] + [os.environ['V']])"
    text = node.printed("hard", "python3", "-c", script, hard, "%i", "$V", env={"V": hard})
    assert text == repr([hard, "%i", "$V", hard])


def test_a_frozen_kernel_is_paused_and_can_be_stopped(node: Node) -> None:
    node.create("frozen", "sleep", "999")
    node.must(f"systemctl freeze {node.unit('frozen')}")
    node.configure(CONFIG.format(runtime="systemd"))  # systemd 252 tells nobody of it
    assert node.kernel("frozen")["state"] == "paused"
    node.remove("frozen")


def test_world_readable_files_contain_no_variables(node: Node) -> None:
    node.must("id mallory || useradd --create-home mallory")
    node.create("secret", "sleep", "99999", env={"TOKEN": "hunter2"})
    unit = node.unit("secret")
    shown = node.must(
        f"runuser -u mallory -- systemctl show {unit}; cat /run/systemd/transient/{unit}"
    )
    assert "hunter2" not in shown
    denied = node.run("runuser -u mallory -- sh -c 'cat /var/lib/agentd/units/secret/environment'")
    assert denied.status != 0


def test_units_logs_and_records_cannot_be_forged(node: Node) -> None:
    unit = node.unit("secret")
    assert node.run("runuser -u mallory -- systemd-run --unit agentd-forged true").status != 0
    assert node.run(f"runuser -u mallory -- systemctl kill {unit}").status != 0
    made = "mkdir /var/lib/agentd/units/forged || ls /var/lib/agentd/units"
    assert node.run(f"runuser -u mallory -- sh -c '{made}'").status != 0
    claims = "AGENTD_KERNEL=forged AGENTD_AGENT=team-a AGENTD_NODE=node1"
    node.must(f"runuser -u mallory -- env {claims} setsid sleep 300 >/dev/null 2>&1 &")
    forged = (
        "import socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM);"
        "s.sendto(b'MESSAGE=forged\\nAGENTD_KERNEL=secret\\n_SYSTEMD_UNIT={unit}\\nUNIT={unit}\\n',"
        " '/run/systemd/journal{where}/socket')"
    )
    for where in ("", ".agentd-team-a"):
        line = forged.replace("{unit}", unit).replace("{where}", where)
        node.run(f'runuser -u mallory -- python3 -c "{line}"')
    node.must("journalctl --namespace=agentd-team-a --sync; journalctl --sync")
    assert "forged" not in node.logs("secret")
    copied = "cp -r /var/lib/agentd/units/secret /var/lib/agentd/units/copy"
    node.must(f"{copied} && systemctl restart agentd", 300)
    status, kernels = node.ask("GET", "/v1/kernels")
    assert status == 200
    assert [kernel["kernel_id"] for kernel in kernels] == ["secret"]
    node.must("rm -r /var/lib/agentd/units/copy")


def test_a_reload_of_systemd_itself_loses_no_kernel(node: Node) -> None:
    node.must("systemctl daemon-reload")
    assert node.kernel("secret")["state"] == "running"
    node.create("reloaded", "sh", "-c", "sleep 2; exit 7")
    node.must("systemctl daemon-reload")
    assert node.until("reloaded", "terminated")["exit_code"] == 7
    node.must("systemctl daemon-reexec")
    assert node.kernel("secret")["state"] == "running"
    assert node.must(f"systemctl show {node.unit('secret')} -p LoadState --value") == "loaded\n"
    node.remove("reloaded")


def test_kernels_and_logs_survive_any_end_of_the_daemon(node: Node) -> None:
    node.create("talks", "sh", "-c", "while :; do date +%s; sleep 1; done", agent="team-b")
    pids = main_pids(node)
    for end in ("systemctl kill -s KILL agentd", "dpkg -i /payload/newer/agentd_*.deb"):
        node.must(end, 300)
        until_ready(node)
        assert main_pids(node) == pids
    times = [int(line) for line in node.logs("talks").splitlines()]
    assert all(0 < after - before < 10 for before, after in pairwise(times))
    assert node.logs("talks", "?tail=2&timestamps=true").count("Z ") == 2


def main_pids(node: Node) -> list[str]:
    """Return the main processes of two kernels, which run."""
    names = ("talks", "secret")
    assert {node.kernel(name)["state"] for name in names} == {"running"}
    return [node.main_pid(name) for name in names]


def test_hanging_daemon_is_restarted(node: Node) -> None:
    drop_in = "/run/systemd/system/agentd.service.d"
    node.must(f"mkdir -p {drop_in} && printf '[Service]\\nWatchdogSec=8\\n' >{drop_in}/w.conf")
    node.must("systemctl daemon-reload && systemctl restart agentd", 300)
    node.must("systemctl kill -s STOP --kill-whom=main agentd")
    until_blocking(node.restarts, lambda count: count != "0", within_s=120, every_s=1)
    node.must(f"rm -r {drop_in} && systemctl daemon-reload")
    until_ready(node)
    assert node.kernel("talks")["state"] == "running"


REQUESTS = r"""
import http.client, json, socket, sys, threading, time
bad, made, over = [], 0, threading.Event()
class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX); self.sock.settimeout(100)
        self.sock.connect("/run/agentd/agentd.sock")
def loop():
    global made
    while not over.is_set():
        try:
            c = Unix("x"); c.request("GET", "/v1/kernels"); a = c.getresponse()
            a.read(); made += 1
            if a.status != 200: bad.append(a.status)
        except OSError as e: bad.append(repr(e))
import subprocess
t = threading.Thread(target=loop); t.start()
for _ in range(int(sys.argv[1])):
    subprocess.run(["systemctl", "restart", "agentd"], check=True)
    n = made
    while made < n + 100 and not bad: time.sleep(0.05)
over.set(); t.join(); print(json.dumps([made, bad]))
"""


def test_no_request_is_refused_while_the_daemon_restarts(node: Node) -> None:
    node.must(f"cat >/tmp/requests.py <<'P'\n{REQUESTS}\nP")
    restarts = 10 if "AGENTD_SOAK" in os.environ else 2
    pids = main_pids(node)
    made, bad = json.loads(node.must(f"python3 /tmp/requests.py {restarts}", 900))
    assert made >= 100 * restarts
    assert bad == []
    assert main_pids(node) == pids


def test_reload_applies_all_or_nothing_of_a_file(node: Node) -> None:
    settings = CONFIG.format(runtime="systemd")
    limited = f"{settings}[runtime.systemd]\npids-limit = 7\n[rpc]\nmax-connections = 99\n"
    node.must(f"cat >/etc/agentd/agent.toml <<'T'\n{limited}\nT")
    pid = node.must("systemctl show agentd -p MainPID --value")
    node.must("systemctl reload agentd")
    assert "rpc.max-connections" in node.must(
        "journalctl -u agentd AGENTD_EVENT=daemon.reloaded -n 1"
    )
    node.create("few", "sleep", "999")
    assert node.must(f"systemctl show {node.unit('few')} -p TasksMax --value").strip() == "7"
    node.must("printf 'what = 1' >/etc/agentd/agent.toml")
    failed = node.run("systemctl reload agentd; systemctl status agentd --no-pager -n 5")
    assert "what" in failed.output
    assert node.must("systemctl is-active agentd").strip() == "active"
    assert node.must("systemctl show agentd -p MainPID --value") == pid
    node.must(f"cat >/etc/agentd/agent.toml <<'T'\n{settings}\nT")
    node.must("systemctl reload agentd")
    node.remove("few")


NARROW = """
[node]
runtime = "systemd"
[host]
cpus = 2
[resource]
allocation-mode = "manual"
[[agents]]
id = "team-a"
resource = { cpu = ["0"], mem = "256m" }
[[agents]]
id = "team-b"
resource = { cpu = ["1"], mem = "256m" }
[plugins]
block = ["cuda", "generic", "rocm"]
"""


def test_smaller_slice_kills_no_kernel(node: Node) -> None:
    node.create("wide", "sleep", "999", slots={"cpu": 1, "mem": "1g"})
    node.configure(NARROW)
    kernels = node.ask("GET", "/v1/kernels")[1]
    held = [int(k["slots"]["mem"]) >> 20 for k in kernels if k["agent_id"] == "team-a"]
    held_mib = sum(held)
    assert held_mib >= 1024
    assert fence_mib(node) >= held_mib
    assert node.kernel("wide")["state"] == "running"
    node.remove("wide")
    node.create("small", "sleep", "999", slots={"cpu": 0, "mem": "16m"})
    assert fence_mib(node) == 256 + held_mib - 1024 + 16
    node.remove("small")


def fence_mib(node: Node) -> int:
    shown = node.must(r"systemctl show 'agentd-team\x2da.slice' -p MemoryMax --value")
    return int(shown) >> 20


def test_journal_separates_kernels_and_warnings(node: Node) -> None:
    node.must("journalctl --sync")
    warned = node.must(
        "journalctl -u agentd -p warning -o json --output-fields=AGENTD_EVENT,AGENTD_KERNEL"
    )
    lines = [json.loads(line) for line in warned.splitlines()]
    assert "kernel.oom_killed" in {line.get("AGENTD_EVENT") for line in lines}
    assert "kernel.oom_killed" in node.must("journalctl AGENTD_KERNEL=big -p warning")
    assert "SYSLOG_IDENTIFIER=agentd" in node.must(
        "journalctl _SYSTEMD_UNIT=agentd.service -n 1 -o export"
    )


def test_a_full_disk_refuses_creates_and_loses_nothing(node: Node) -> None:
    try:
        node.must("fallocate -l $(df --output=avail -B1 / | tail -1) /filler")
        node.run("dd if=/dev/zero of=/filler2 bs=64k status=none")
        body = {"kernel_id": "full", "command": ["true"], "slots": {"cpu": 0, "mem": "16m"}}
        status, content = node.ask("POST", "/v1/agents/team-a/kernels", body)
        assert status in (502, 503), content
        assert node.kernel("talks")["state"] == "running"
    finally:
        node.must("rm -f /filler /filler2")
    assert node.printed("free", "echo", "again") == "again"
