"""Usage on cgroup v2: loads of known size, compared with systemd and the engine."""

import json
import re
import time
from typing import Any

import pytest

from node.conftest import ASK, CONFIG, Node, until_ready
from support.waiting import until_blocking

MIB = 1 << 20
WRITTEN, HELD, SENT = 32 * MIB, 24 * MIB, 2 * MIB
BRIDGE, PORT = "172.17.0.1", 5999
LOAD = (
    f"dd if=/dev/zero of=/tmp/{{name}} bs=1M count={WRITTEN // MIB} conv=fsync 2>/dev/null;"
    f"dd if=/dev/zero of=/dev/shm/{{name}} bs=1M count={HELD // MIB} 2>/dev/null;"
    "timeout 3 sh -c 'while :; do :; done'; {also}; times; echo loaded; exec sleep 9999"
)
"""Blocks to a disk, memory that no cache gives back, processor time."""


@pytest.fixture(scope="module", autouse=True)
def _enabled(node: Node) -> None:
    """The daemon starts with the first test's configuration."""
    node.must("systemctl enable agentd.socket agentd.service; systemctl start agentd.socket", 300)


def test_a_process_kernel_s_figures_are_its_load_s(node: Node) -> None:
    loaded(node, "process")
    node.remove("of-process")
    node.must("rm /tmp/of-process /dev/shm/of-process")


def test_a_container_s_figures_are_its_engine_s(node: Node) -> None:
    """Its network's too: it sends to the node over the engine's bridge, and has it all back."""
    names = "busybox sh dd timeout sleep nc wc"
    node.must(f"mkdir -p /tmp/i/bin /tmp/i/tmp && cd /tmp/i/bin && cp /bin/busybox . && for n in "
              f"{names}; do ln -s busybox $n || :; done")  # fmt: skip
    node.must("systemctl start docker && tar -C /tmp/i -c . | docker import - loads:1", 300)
    node.must(f"systemd-run --unit echoes busybox nc -l -p {PORT} -e busybox cat")
    sent = f"dd if=/dev/zero bs=1M count={SENT // MIB} 2>/dev/null | nc {BRIDGE} {PORT} | wc -c"
    used = loaded(node, "docker", also=sent, image="loads:1")
    container = node.must("docker ps -q --no-trunc").strip()
    path = f"/containers/{container}/stats?stream=false&one-shot=true"
    said = json.loads(
        node.must(f"AGENTD_SOCKET=/run/docker.sock {ASK} GET '{path}'").partition("\n")[2]
    )
    written = sum(
        row["value"]
        for row in said["blkio_stats"]["io_service_bytes_recursive"]
        if row["op"] == "write"
    )
    (network,) = said["networks"].values()
    assert used["cpu_seconds"] == pytest.approx(
        said["cpu_stats"]["cpu_usage"]["total_usage"] / 1e9, abs=0.05
    )
    assert used["io_write_bytes"] == written
    for direction in ("rx", "tx"):
        passed = used[f"network_{direction}_bytes"]
        assert passed == pytest.approx(network[f"{direction}_bytes"], abs=4096)
        assert passed == pytest.approx(SENT, rel=0.2)
    node.remove("of-docker")


def test_a_unit_s_figures_are_systemd_s(node: Node) -> None:
    used = loaded(node, "systemd")
    unit = node.unit("of-systemd")
    kernel = node.ask("GET", "/v1/kernels/of-systemd")[1]
    main = node.must(f"systemctl show {unit} -p MainPID --value").strip()
    assert (kernel["unit"], str(kernel["pid"])) == (unit, main)
    wanted = ("CPUUsageNSec", "MemoryCurrent", "IOReadBytes", "IOWriteBytes")
    shown = node.must(f"systemctl show {unit} " + " ".join(f"-p {name}" for name in wanted))
    said = {name: int(value) for name, _, value in (line.partition("=") for line in shown.split())}
    assert used["cpu_seconds"] == pytest.approx(said["CPUUsageNSec"] / 1e9, abs=0.05)
    assert used["memory_bytes"] == pytest.approx(said["MemoryCurrent"], abs=MIB)
    assert used["io_read_bytes"] == said["IOReadBytes"]
    assert used["io_write_bytes"] == said["IOWriteBytes"]
    assert used["network_tx_bytes"] is None
    node.must(f"systemctl stop {unit}")
    node.until("of-systemd", "terminated")
    ended = node.ask("GET", "/v1/kernels/of-systemd/stats")[1]
    assert ended["memory_bytes"] is None
    kernel = node.ask("GET", "/v1/kernels/of-systemd")[1]
    assert (kernel["unit"], kernel["pid"]) == (unit, None)
    assert ended["cpu_seconds"] >= used["cpu_seconds"]
    assert ended["io_write_bytes"] >= used["io_write_bytes"]
    assert ended["memory_peak_bytes"] >= HELD
    node.remove("of-systemd")


def test_uncounted_usage_is_unknown(node: Node) -> None:
    """A unit that ended by itself loses its cgroup, and is stopped in another of that name."""
    busy = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done"
    node.create("busy", "sh", "-c", busy)
    unit = node.unit("busy")
    node.must("systemctl stop agentd.socket agentd.service", 300)
    show = f"systemctl show {unit} -p SubState --value"
    until_blocking(lambda: node.must(show).strip(), "exited", within_s=120)
    node.must(f"systemctl stop {unit}; systemctl start agentd.socket agentd.service", 300)
    until_ready(node)
    assert node.until("busy", "terminated")["exit_code"] == 0
    assert node.ask("GET", "/v1/kernels/busy/stats")[1]["cpu_seconds"] is None
    node.remove("busy")


def loaded(node: Node, runtime: str, also: str = ":", **options: Any) -> Any:
    """Put the load on a kernel of a runtime; return figures from after it, seen to be its."""
    node.configure(CONFIG.format(runtime=runtime))
    until_ready(node)
    kernel_id = f"of-{runtime}"
    load = LOAD.format(name=kernel_id, also=also)
    node.create(kernel_id, "sh", "-c", load, slots={"cpu": 1, "mem": "128m"}, **options)
    printed = until_blocking(
        lambda: node.logs(kernel_id), lambda printed: printed.endswith("loaded"), within_s=120
    )
    time.sleep(1.1)  # figures are read once a second at most
    used = node.ask("GET", f"/v1/kernels/{kernel_id}/stats")[1]
    own = sum(60 * int(m) + float(s) for m, s in re.findall(r"(\d+)m([\d.]+)s", printed))
    assert own > 1
    assert used["cpu_seconds"] == pytest.approx(own, abs=1), printed
    assert WRITTEN <= used["io_write_bytes"] <= WRITTEN * 1.25, used
    assert HELD <= used["memory_bytes"] <= used["memory_peak_bytes"] <= 128 * MIB
    assert (used["memory_limit_bytes"], used["processes"]) == (128 * MIB, 1)
    return used
