"""Kernels that never run, or not for long: refusals, log lines and places in lists."""

import asyncio
import json
import signal
from collections import Counter

from agentd.client.paths import next_query
from support.daemon import Daemon
from support.daemon_pool import Serving


async def test_each_end_of_a_short_command_is_logged_once(serving: Serving) -> None:
    daemon = await serving()
    names = [f"short-{number}" for number in range(12)]
    await asyncio.gather(
        *(
            daemon.create(kernel_id=name, command=["true"], slots={"cpu": 0, "mem": "16m"})
            for name in names
        )
    )
    for name in names:
        await daemon.until(name, "terminated")
    lines = [line for line in daemon.log.splitlines() if '"kernel.ended"' in line]
    ended = Counter(json.loads(line)["kernel_id"] for line in lines)
    assert ended == Counter(names)


async def test_cursor_of_a_removed_kernel_outlasts_a_restart(plain: Daemon) -> None:
    await plain.start()
    for kernel_id in ("k1", "k2", "k3"):
        await plain.running(kernel_id=kernel_id, slots={"cpu": 0, "mem": "16m"})
    page = await plain.call("GET", "/v1/kernels?limit=1&after=k1")
    assert [kernel["kernel_id"] for kernel in page.json] == ["k2"]
    await plain.call("DELETE", "/v1/kernels/k2?timeout=0")
    await plain.restart(number=signal.SIGKILL)
    cursor = next_query(page.headers["Link"])
    after = await plain.get(f"/v1/kernels?{cursor}")
    assert [kernel["kernel_id"] for kernel in after] == ["k3"]
    for unknown in ("k2", "k4", "1~", "~k1", "-1~k1", "1~../x", "9" * 19 + "~k1", ""):
        answer = await plain.call("GET", f"/v1/kernels?after={unknown}")
        assert (answer.status, answer.json["code"]) == (422, "InvalidRequest"), unknown
