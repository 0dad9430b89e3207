"""The commands `agentctl stats` and `agentctl top`: what kernels use."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from agentd.cli.agentctl import completion
from agentd.cli.agentctl.follow import ENDED
from agentd.cli.agentctl.options import json_option, print_answer
from agentd.client import Client
from agentd.views import DeviceUseView, KernelUseView

COLUMNS = ["kernel", "agent", "cpu_seconds", "memory", "peak", "limit", "read", "written"]
WIDE = ["processes", "received", "sent", "throttled", "devices"]
TOP = ["kernel", "agent", "cpu", "memory", "limit", "processes", "read_s", "written_s", "devices"]


@click.command()
@click.argument("kernels", nargs=-1, shell_complete=completion.kernels)
@json_option
@click.pass_obj
def stats(client: Client, kernels: Sequence[str]) -> None:
    """Show the usage of kernels.

    `-` stands for a figure that is not known.

    \b
    agentctl stats
    agentctl stats train-1 -o json
    """
    rows = [client.stats(kernel) for kernel in kernels] if kernels else client.stats()
    print_usage(rows)


def print_usage(rows: Sequence[KernelUseView]) -> None:
    """Print the usage of kernels."""
    columns = COLUMNS + (["devices"] if any(row["devices"] for row in rows) else [])
    print_answer([*rows], columns, _usage_row, wide=[c for c in WIDE if c not in columns])


def _usage_row(row: KernelUseView) -> dict[str, Any]:
    from agentd.cli.tables import byte_size

    return {
        "kernel": row["kernel_id"],
        "agent": row["agent_id"],
        "cpu_seconds": _decimals(row["cpu_seconds"]),
        "throttled": _decimals(row["cpu_throttled_seconds"]),
        "memory": byte_size(row["memory_bytes"]),
        "peak": byte_size(row["memory_peak_bytes"]),
        "limit": byte_size(row["memory_limit_bytes"]),
        "read": byte_size(row["io_read_bytes"]),
        "written": byte_size(row["io_write_bytes"]),
        "received": byte_size(row["network_rx_bytes"]),
        "sent": byte_size(row["network_tx_bytes"]),
        "processes": row["processes"],
        "devices": [_device(device) for device in row["devices"]],
    }


def watching(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of looking again and again."""
    for option in (
        click.option("--agent", help="Of this agent only.", shell_complete=completion.agents),
        click.option("--interval", type=click.FloatRange(min=1.1), default=2.0, show_default=True,
                     help="Seconds between two looks."),
        click.option("--count", type=click.IntRange(min=1),
                     help="Looks to take; default: until ^C."),
    ):  # fmt: skip
        command = option(command)
    return command


@click.command()
@watching
@click.pass_obj
def top(client: Client, agent: str | None, interval: float, count: int | None) -> None:
    """Show current usage, the busiest first."""
    watch(client.stats, agent, interval, count)


def watch(
    look: Callable[[], Sequence[KernelUseView]],
    agent: str | None,
    interval: float,
    count: int | None,
) -> None:
    """Show what was used between each look and the one before it."""
    from rich.live import Live

    from agentd.cli.tables import console, table_of

    before: dict[str, KernelUseView] | None = None
    left = count
    screen = console()
    with Live(console=screen, auto_refresh=False) as live:
        while left is None or left >= 0:  # what is used in a while takes two looks
            now = {row["kernel_id"]: row for row in look() if row.get("state") not in ENDED}
            if before is not None:
                rows = [_rates(before.get(name), row) for name, row in now.items()
                        if agent in (None, row["agent_id"])]  # fmt: skip
                rows.sort(key=lambda row: -(row["load"] or 0))
                live.update(table_of(rows, TOP, screen.width), refresh=True)
            before = now
            left = None if left is None else left - 1
            if left is None or left >= 0:
                _pause(interval)


def _pause(seconds: float) -> None:
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        sys.exit(0)


def _rates(before: KernelUseView | None, now: KernelUseView) -> dict[str, Any]:
    """Return a row of what a kernel used between two looks."""
    from agentd.cli.tables import byte_size

    load = _rate(before, now, "cpu_seconds")
    read, written = (_rate(before, now, f"io_{name}_bytes") for name in ("read", "write"))
    return {
        "kernel": now["kernel_id"],
        "agent": now["agent_id"],
        "load": load,
        "cpu": None if load is None else f"{100 * load:.0f}%",
        "memory": byte_size(now["memory_bytes"]),
        "limit": byte_size(now["memory_limit_bytes"]),
        "processes": now["processes"],
        "read_s": byte_size(read),
        "written_s": byte_size(written),
        "devices": [_device(device) for device in now["devices"]],
    }


def _rate(before: KernelUseView | None, now: KernelUseView, member: str) -> float | None:
    was: Mapping[str, Any] = before or {}
    first, last = was.get(member), now.get(member)
    seconds = _seconds(now["at"]) - _seconds(was["at"]) if before else 0.0
    if first is None or not isinstance(last, (int, float)) or seconds <= 0:
        return None
    return max(0.0, float(last - first)) / seconds


def _seconds(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


def _decimals(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _device(device: DeviceUseView) -> str:
    from agentd.cli.tables import byte_size

    words = [device["id"]]
    if device["utilization"] is not None:
        words.append(f"{100 * device['utilization']:.0f}%")
    memory = device["used_by_kernel_bytes"]
    if memory is not None:
        words.append(str(byte_size(memory)))
    return " ".join(words)
