"""Changes of units and records by hand: each is noticed, and nothing is lost."""

import time

from node.conftest import ASK, CONFIG, Node, until_ready
from support.waiting import until_blocking

OWNED = {"cpu": 0, "mem": "16m", "tpu.device": 1}
DEAF = "trap '' TERM; while :; do sleep 1; done"


def test_units_that_are_stopped_by_hand_keep_how_they_ended(node: Node) -> None:
    node.must("systemctl enable --now agentd.socket agentd.service", 300)
    node.configure(CONFIG.format(runtime="systemd"))
    node.create("stopped", "sleep", "9999")
    node.must(f"systemctl stop {node.unit('stopped')}")
    assert node.until("stopped", "terminated")["exit_code"] == 143
    for name in ("killed", "cleared", "deaf"):
        node.create(name, "sh", "-c", DEAF if name == "deaf" else "sleep 9999; exit 3")
    units = {name: node.unit(name) for name in ("killed", "cleared", "deaf")}
    node.must("systemctl stop agentd.socket agentd.service", 300)
    node.must(f"systemctl kill -s KILL {units['killed']}")
    node.must(f"systemctl stop {units['cleared']}; systemctl reset-failed {units['cleared']} || :")
    node.must(f"systemctl stop {units['deaf']}", 60)
    node.must("systemctl start agentd.socket agentd.service", 300)
    until_ready(node)
    ended = {name: node.until(name, "terminated")["exit_code"] for name in units}
    assert ended == {"killed": 137, "cleared": 143, "deaf": 137}
    assert node.findings() == []
    node.remove("stopped", *units)


def test_operators_drop_ins_take_precedence(node: Node) -> None:
    node.create("early", "sleep", "9999")
    prefix = node.unit("early").split("-")[1]
    said = {
        r"/etc/systemd/system/agentd-team\x2da.slice.d/override.conf": "[Slice]\nMemoryMax=512M\n",
        f"/etc/systemd/system/agentd-{prefix}-.service.d/ours.conf": (
            "[Service]\nNice=7\nMemoryMax=31M\n"
        ),
    }
    for file, text in said.items():
        node.must(f"mkdir -p '{file.rpartition('/')[0]}' && printf '{text}' >'{file}'")
    try:
        node.must("systemctl daemon-reload")
        team = "/sys/fs/cgroup/agentd.slice/agentd-team*2da.slice"
        early = f"{team}/{node.unit('early')}"
        limits = node.must(f"cat {team}/memory.max {early}/memory.max").split()
        assert limits == [str(512 << 20), str(31 << 20)]
        assert node.must(f"ps -o ni= -p $(cat {early}/cgroup.procs)").strip() == "0"
        node.must("systemctl restart agentd", 300)
        until_ready(node)
        node.create("bound", "sleep", "9999")
        shown = r"systemctl show 'agentd-team\x2da.slice' -p MemoryMax --value"
        assert int(node.must(shown)) == 512 << 20
        assert node.must(f"systemctl show {node.unit('bound')} -p Nice --value").strip() == "7"
    finally:
        for file in said:
            node.must(f"rm -r '{file.rpartition('/')[0]}'")
        node.must("systemctl daemon-reload")  # the next test restarts agentd
        node.remove("early")
        node.remove("bound")


def test_a_record_that_is_damaged_or_newer_loses_no_device(node: Node) -> None:
    """systemd has the devices a second time, in what the unit's lines carry."""
    made = {name: node.create(name, "sleep", "9999", slots=OWNED) for name in ("damaged", "newer")}
    node.create("missing", "sleep", "9999")
    for table in ("units/{}/record.json", "records/{}.json"):
        damaged, newer, missing = (
            f"/var/lib/agentd/{table.format(name)}" for name in ("damaged", "newer", "missing")
        )
        node.must(f"truncate -s 40 {damaged}; rm {missing}")
        newest = 's/"schema":2/"schema":99/; s/,"sum":"[0-9a-f]*"//'
        node.must(f"sed -i '{newest}' {newer}")
    node.must("systemctl restart agentd", 300)
    until_ready(node)
    for name, wanted in (("damaged", "running"), ("newer", "unreadable"), ("missing", "running")):
        kernel = node.kernel(name)
        assert (kernel["state"], kernel["agent_id"]) == (wanted, "team-a"), kernel
        assert "record" in kernel["reason"], kernel
        if name in made:
            assert kernel["allocation"]["tpu"] == made[name]["allocation"]["tpu"]
    assert node.printed("again", "echo", "cores are free") == "cores are free"
    node.remove("damaged", "newer", "missing")
    devices = node.ask("GET", "/v1/devices")[1]
    assert {d["allocated"] for d in devices if d["device_name"] == "tpu"} == {"0"}


def test_a_bundle_that_others_may_write_loses_no_device(node: Node) -> None:
    made = node.create("exposed", "sleep", "9999", slots=OWNED)
    folder = "/var/lib/agentd/units/exposed"
    node.must(f"chmod 777 {folder}; systemctl restart agentd", 300)
    until_ready(node)
    kernel = node.kernel("exposed")
    assert kernel["state"] == "unreadable", kernel
    assert f"{folder}: has mode 0777" in kernel["reason"], kernel
    assert kernel["allocation"] == made["allocation"]
    assert any("exposed" in text for text in node.ask("GET", "/v1/node")[1]["warnings"])
    node.must(f"chmod 700 {folder}")
    until_blocking(lambda: node.kernel("exposed")["state"], "running")
    node.remove("exposed")


def test_a_line_is_the_journals_and_a_late_reader_misses_none(node: Node) -> None:
    script = (
        "import signal, time\n"
        "told = []; signal.signal(signal.SIGUSR1, lambda *_: told.append(1))\n"
        "while not told: print('waits', flush=True); time.sleep(0.2)\n"
        "print('a\\n\\nb\\0c\\nd'); print('x' * 49160); print('late')"
    )
    node.create("lines", "python3", "-c", script)
    follow = f"{ASK} GET '/v1/kernels/lines/logs?follow=true&tail=0'"
    follows = "systemd-run --collect --unit follow -p StandardOutput=truncate:/tmp/shown"
    node.must(f"rm -f /tmp/shown; {follows} {follow}")
    node.must("until grep -q waits /tmp/shown; do sleep 0.1; done")
    node.must(f"kill -USR1 {node.main_pid('lines')}")
    node.must("while systemctl is-active -q follow; do sleep 0.1; done")
    status, *lines = node.must("cat /tmp/shown; rm /tmp/shown").rstrip("\n").split("\n")
    assert status == "200"
    shown = [line for line in lines if line != "waits"]
    assert shown[:4] == ["a", "b", "c", "d"]
    assert [len(part) for part in shown[4:6]] == [49152, 8]
    assert shown[6:] == ["late"]
    assert node.logs("lines", "?tail=1") == "late"
    assert node.logs("lines", f"?since={time.time() + 3600:.0f}") == ""
    assert node.ask("GET", "/v1/kernels/lines/logs?stream=stderr")[0] == 422
    node.remove("lines")


def test_the_doctor_looks_at_the_journals_of_agents(node: Node) -> None:
    node.create("prints", "sleep", "9999")
    journald = "systemd-journald@agentd-team-a"
    limits = "/run/systemd/journald@agentd-team-a.conf.d/10-agentd.conf"
    broken = f"/run/systemd/system/{journald}.service.d"
    node.must(f"mv {limits} /tmp/limits; mkdir {broken}; systemctl daemon-reload")
    node.must(f"printf '[Service]\nExecStart=\nExecStart=/bin/false\n' >{broken}/x.conf")
    node.must(f"systemctl daemon-reload; systemctl restart {journald} || :", 120)
    said = " ".join(node.ask("GET", "/v1/node?check=true")[1]["warnings"])
    node.must(f"mv /tmp/limits {limits}; rm -r {broken}; systemctl daemon-reload")
    node.must(f"systemctl reset-failed '{journald}*'; systemctl start {journald}", 120)
    assert f"{journald}.service has failed" in said
    assert "the journal agentd-team-a has no limits" in said
    assert "journal" not in " ".join(node.ask("GET", "/v1/node?check=true")[1]["warnings"])
    node.remove("prints")


def test_the_fleet_s_package_comes_and_goes(node: Node) -> None:
    node.must("dpkg -i /payload/agentd-fleet_*.deb", 300)
    node.must("systemd-analyze verify agentd-fleet-join.service agentd-fleet-gateway.service")
    assert "--version" in node.must("agentd-fleet --help")
    node.must("systemctl enable agentd-fleet-gateway")
    node.must("dpkg --purge agentd-fleet", 300)
    node.must("! systemctl is-enabled agentd-fleet-gateway; test ! -e /etc/agentd/fleet.toml")
    node.must("! find /etc/systemd/system -name 'agentd-fleet*' | grep .")
    node.must("test -e /etc/agentd/agent.toml && systemctl is-active agentd")
