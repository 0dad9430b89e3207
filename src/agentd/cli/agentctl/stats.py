"""The commands `agentctl stats` and `agentctl top`: the usage of kernels."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import click

from agentd.cli.agentctl import completion
from agentd.cli.agentctl.follow import ENDED_STATES
from agentd.cli.agentctl.options import print_outage
from agentd.cli.option_types import seconds_from
from agentd.cli.output import client_command, is_table, print_answer
from agentd.client import Client
from agentd.client.following import Outages
from agentd.errors import Unavailable
from agentd.views import DeviceUseView, KernelUseView

_T = TypeVar("_T")
COLUMNS = [
    *("kernel", "agent", "cpu", "cpu_seconds", "memory", "peak", "limit", "read", "written"),
]
WIDE = ["processes", "received", "sent", "throttled", "devices"]
TOP = ["kernel", "agent", "cpu", "memory", "limit", "processes", "read_s", "written_s", "devices"]


SAMPLE_S = 1.1
"""Seconds between two reads that differ: a daemon reads counters once a second."""


@click.command()
@click.argument("kernels", nargs=-1, shell_complete=completion.kernels)
@client_command
def stats(client: Client, kernels: Sequence[str]) -> None:
    """Show the usage of kernels.

    CPU is measured over one second; 100% is one core. "-" stands for an unknown value.

    \b
    agentctl stats
    agentctl stats train-1 -o json
    """

    def read_usage() -> list[KernelUseView]:
        return [client.stats(kernel) for kernel in kernels] if kernels else client.stats()

    print_usage(read_usage)


def print_usage(read_usage: Callable[[], list[KernelUseView]]) -> None:
    """Print the usage of kernels; for a table of live ones, look twice."""
    rows, before = read_usage(), dict[str, KernelUseView]()
    if is_table() and any(map(_is_live, rows)):
        before = _by_kernel(rows)
        time.sleep(SAMPLE_S)
        rows = read_usage()
    columns = COLUMNS + (["devices"] if any(row["devices"] for row in rows) else [])
    wide = [column for column in WIDE if column not in columns]
    print_answer(
        rows, columns, lambda row: _usage_row(before.get(row["kernel_id"]), row), wide=wide
    )


def _is_live(row: KernelUseView) -> bool:
    return row.get("state") not in ENDED_STATES


def _by_kernel(rows: Sequence[KernelUseView]) -> dict[str, KernelUseView]:
    return {row["kernel_id"]: row for row in rows if _is_live(row)}


def _usage_row(before: KernelUseView | None, now: KernelUseView) -> dict[str, Any]:
    """Return the cells of a kernel's usage; rates are those since an earlier look."""
    from agentd.cli.tables import format_bytes

    load = _rate(before, now, "cpu_seconds") if _is_live(now) else None
    return {
        "kernel": now["kernel_id"],
        "agent": now["agent_id"],
        "load": load,
        "cpu": None if load is None else f"{100 * load:.0f}%",
        "cpu_seconds": _decimals(now["cpu_seconds"]),
        "throttled": _decimals(now["cpu_throttled_seconds"]),
        "memory": format_bytes(now["memory_bytes"]),
        "peak": format_bytes(now["memory_peak_bytes"]),
        "limit": format_bytes(now["memory_limit_bytes"]),
        "read": format_bytes(now["io_read_bytes"]),
        "written": format_bytes(now["io_write_bytes"]),
        "read_s": format_bytes(_rate(before, now, "io_read_bytes")),
        "written_s": format_bytes(_rate(before, now, "io_write_bytes")),
        "received": format_bytes(now["network_rx_bytes"]),
        "sent": format_bytes(now["network_tx_bytes"]),
        "processes": now["processes"],
        "devices": [_device_text(device) for device in now["devices"]],
    }


def watch_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a live table."""
    for option in (
        click.option(
            "--agent", help="Only kernels of this agent.", shell_complete=completion.agents
        ),
        click.option(
            "--interval",
            type=seconds_from(SAMPLE_S),
            default=2.0,
            show_default=True,
            help="Seconds between two updates.",
        ),
        click.option(
            "--count",
            type=click.IntRange(min=1),
            help="Updates to show. Default: until Ctrl-C.",
        ),
    ):
        command = option(command)
    return command


@click.command()
@watch_options
@click.pass_obj
def top(client: Client, agent: str | None, interval: float, count: int | None) -> None:
    """Show current usage, the busiest first.

    Prints one table after another if the output is not a terminal. An agentd that restarts is
    waited for.
    """
    print_live_usage(client.stats, agent, interval, count)


def print_live_usage(
    read_usage: Callable[[], Sequence[KernelUseView]],
    agent: str | None,
    interval: float,
    count: int | None,
) -> None:
    """Show the usage between every two looks, until the count or Ctrl-C."""
    from rich.live import Live

    from agentd.cli.tables import build_table, console

    before: dict[str, KernelUseView] | None = None
    screen, outages = console(), Outages(print_outage)
    updates = itertools.count() if count is None else range(count + 1)  # a rate takes two looks
    live = Live(console=screen, auto_refresh=False) if screen.is_terminal else None
    with live or nullcontext():
        for number in updates:
            if number:
                time.sleep(interval)
            now = _by_kernel(_read_repeatedly(read_usage, outages))
            if before is not None:
                rows = [
                    _usage_row(before.get(name), row)
                    for name, row in now.items()
                    if agent in (None, row["agent_id"])
                ]
                rows.sort(key=lambda row: -(row["load"] or 0))
                table = build_table(rows, TOP, screen.width)
                live.update(table, refresh=True) if live else screen.print(table)
            before = now


def _read_repeatedly(read: Callable[[], _T], outages: Outages) -> _T:
    """Return an answer; wait for a daemon that was there before."""
    while True:
        try:
            answer = read()
        except Unavailable as error:
            pause_s = outages.pause_s(error)
        else:
            outages.on_answer()
            return answer
        time.sleep(pause_s)


def _rate(before: KernelUseView | None, now: KernelUseView, member: str) -> float | None:
    earlier: Mapping[str, Any] = before or {}
    first, last = earlier.get(member), now.get(member)
    seconds = _seconds(now["at"]) - _seconds(earlier["at"]) if before else 0.0
    if first is None or not isinstance(last, (int, float)) or seconds <= 0:
        return None
    return max(0.0, float(last - first)) / seconds


def _seconds(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


def _decimals(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _device_text(device: DeviceUseView) -> str:
    from agentd.cli.tables import format_bytes

    words = [device["id"]]
    if device["utilization"] is not None:
        words.append(f"{100 * device['utilization']:.0f}%")
    memory = device["used_by_kernel_bytes"]
    if memory is not None:
        words.append(str(format_bytes(memory)))
    return " ".join(words)
