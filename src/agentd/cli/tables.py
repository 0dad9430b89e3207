"""Tables for people; nothing here decides anything.

On a terminal a table is as wide as the terminal and has colours, unless NO_COLOR is set. Elsewhere
its lines are whole, and it has no escape sequences.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentd.cli.output import say
from agentd.core.printable import printable
from agentd.core.slots import device_name_of

_BYTE_SLOTS = {"mem"}
_UNITS = ("", "K", "M", "G", "T", "P", "E")
_UNBOUNDED = 100_000
_NEVER_LEFT_OUT = {"agent", "device", "free", "kernel", "name", "node", "reason", "state", "value"}
_LEAST_OF_LAST = 20
_GAP = 3
"""Characters between two columns: rich draws a blank on each side of the divider, itself one."""


_STYLES = {
    **dict.fromkeys(("running", "ready", "available", "ok", "yes"), "green"),
    **dict.fromkeys(("terminated", "absent", "blocked"), "dim"),
    **dict.fromkeys(
        ("failed", "lost", "unhealthy", "gone", "unavailable", "overcommitted", "NO"), "red"
    ),
}
"""Colours of a state or of a passed check; any other state is yellow."""
_COLOURED = ("state", "passed")


def console(*, is_error: bool = False) -> Console:
    """Return the console of a standard stream, with colours on a terminal without NO_COLOR."""
    is_terminal = (sys.stderr if is_error else sys.stdout).isatty()
    return Console(
        highlight=False,
        markup=False,
        stderr=is_error,
        force_terminal=is_terminal,
        color_system="auto" if is_terminal and not os.environ.get("NO_COLOR") else None,
        width=None if is_terminal else _UNBOUNDED,
    )


def _styled(column: str, text: str) -> Text:
    is_plain = column not in _COLOURED or text == "-"
    return Text(text, "" if is_plain else _STYLES.get(text, "yellow"))


def print_rows(
    rows: Iterable[Mapping[str, Any]], columns: Sequence[str], *, is_error: bool = False
) -> None:
    """Print one line for each row, under the columns' names."""
    screen = console(is_error=is_error)
    screen.print(table_of(rows, columns, screen.width))


def table_of(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], width: int) -> Table:
    """Return a table with one line for each row, at most `width` characters wide.

    Columns that do not fit are left out, from the right, and named below the table. Those that
    name a row, its state and the reason always stay, and wrap where they must.
    """
    cells = [{column: shown(row.get(column)) for column in columns} for row in rows]
    widths = {c: max([len(_head(c)), *(len(row[c]) for row in cells)]) for c in columns}
    widths[columns[-1]] = min(widths[columns[-1]], _LEAST_OF_LAST)
    kept = list(columns)
    for column in reversed(columns[1:]):
        if _together(widths, kept) <= width:
            break
        if column not in _NEVER_LEFT_OUT:
            kept.remove(column)
    fits = _together(widths, kept) <= width
    heads = {column: len(_head(column)) for column in kept}
    least = widths if fits else heads if _together(heads, kept) <= width else {}
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, caption_justify="left")
    for column in kept:
        wraps = column == kept[-1] or not fits
        at_least = least.get(column)
        table.add_column(_head(column), overflow="fold", no_wrap=not wraps, min_width=at_least)
    for row in cells:
        table.add_row(*(_styled(column, row[column]) for column in kept))
    if left_out := [_head(column) for column in columns if column not in kept]:
        table.caption = Text(f"too wide to show: {', '.join(left_out)}")
    return table


def _together(widths: Mapping[str, int], columns: Sequence[str]) -> int:
    """Return the width of a table with these columns."""
    return sum(widths[column] for column in columns) + _GAP * (len(columns) - 1)


def _head(column: str) -> str:
    return column.replace("_", " ").upper()


def age(time: str | None) -> str | None:
    """Return the time since an RFC 3339 time in its largest unit: 45s, 12m, 3h, 9d."""
    if not time:
        return None
    seconds = int((datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds())
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{max(0, seconds)}s"


def shown(value: object) -> str:
    """Return a value as a cell: "-" for an empty one, lists with commas."""
    return printable(_text(value))


def _text(value: object) -> str:
    if value is None or value in ({}, [], ""):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={amount(name, text)}" for name, text in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value) or "-"
    return str(value)


def shown_whole(member: str, value: object) -> str:
    """Return a member of a kernel: its command quoted for a shell, nested values as JSON."""
    if member == "command" and isinstance(value, list):
        return printable(shlex.join(value)) or "-"
    parts = value.values() if isinstance(value, Mapping) else value
    if isinstance(parts, Iterable) and any(isinstance(part, (Mapping, list)) for part in parts):
        return printable(json.dumps(value, ensure_ascii=False))
    return shown(value)


def amount(slot: str, text: object) -> str:
    """Return an amount of a slot, bytes in the largest unit that keeps them short and whole.

    Slots of bytes are `mem`, and those of plugins that are named so after the dot.
    """
    if slot.rpartition(".")[2] not in _BYTE_SLOTS or not str(text).isdigit():
        return str(text)
    size, unit = int(str(text)), 0
    while size and size % 1024 == 0 and unit < len(_UNITS) - 1:
        size, unit = size // 1024, unit + 1
    return f"{size}{_UNITS[unit]}" if size < 10_000 else str(byte_size(int(str(text))))


def held_amounts(slot: str, holder: Mapping[str, Any]) -> str:
    """Return what a kernel holds of a device: its amount, or one of each slot if it has several."""
    amounts = holder["amounts"]
    if len(amounts) < 2:
        return amount(slot, holder["amount"])
    return "+".join(amount(name, text) for name, text in amounts.items())


def byte_size(value: float | None) -> str | None:
    """Return bytes with three digits and a binary unit; None for None."""
    if value is None:
        return None
    unit = 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.3g}{_UNITS[unit]}"


def compact(ids: Sequence[str]) -> str:
    """Return ids with consecutive ones as ranges: 0-3, 8."""
    runs: list[tuple[str, str]] = []
    for item in ids:
        stem, number = _stem(item)
        if runs and number is not None and _stem(runs[-1][1]) == (stem, number - 1):
            runs[-1] = (runs[-1][0], item)
        else:
            runs.append((item, item))
    return ", ".join(a if a == b else f"{a}-{b}" for a, b in runs) or "-"


def _stem(item: str) -> tuple[str, int | None]:
    digits = item[len(item.rstrip("0123456789")) :]
    return item.removesuffix(digits), int(digits) if digits else None


def limit_line(name: str, limit: Mapping[str, Any]) -> str:
    """Return a limit in words: its name, its amount, and whether it is guaranteed."""
    promise = "guaranteed" if limit["guaranteed"] else "at most, not guaranteed"
    held = f", {amount(name, limit['held'])} held" if "held" in limit else ""
    return f"{name} {amount(name, limit['limit'])} ({promise}{held})"


def _within_limits(part: Mapping[str, Any]) -> dict[str, str]:
    """Return the slots of a planned agent, at most its limits.

    A limit has a device name. It is left out where several slots have that device name.
    """
    limits = {name: limit["limit"] for name, limit in part.get("limits", {}).items()}
    slots = Counter(map(device_name_of, part["slots"]))
    return {
        slot: min(total, limits[name], key=Decimal)
        if (name := device_name_of(slot)) in limits and slots[name] == 1
        else total
        for slot, total in part["slots"].items()
    }


def print_plan(plan: Mapping[str, Any]) -> None:
    """Print a partition: the devices and slots of each agent, and the unassigned rest."""
    say(f"allocation mode: {plan['allocation_mode']}")
    names = list(next(iter(plan["agents"].values()))["devices"])
    rows = [
        {
            "agent": agent,
            **{name: compact(part["devices"][name]) for name in names},
            "slots": _within_limits(part),
            "scaling_factors": part["scaling_factors"],
        }
        for agent, part in plan["agents"].items()
    ]
    print_rows(rows, ["agent", *names, "slots", "scaling_factors"])
    reserved = plan["reserved"]
    say(f"reserved: cpu {compact(reserved['cpu'])}, mem {amount('mem', reserved['mem'])}")
    for name, left in plan["unassigned"].items():
        rest = amount(name, left) if isinstance(left, str) else compact(left)  # of memory, or ids
        say(f"unassigned: {name} {rest}")
    for agent, part in plan["agents"].items():
        for name, limit in part.get("limits", {}).items():
            say(f"limit: {agent} {limit_line(name, limit)}")
    for warning in plan["warnings"]:
        say(f"warning: {warning}")
    for row in plan.get("held", ()):
        holder = row.get("kernel_id") or f"claim {row['claim_id']}"
        say(f"held: {row['device']} by {holder} of {row['agent_id']}: {row['reason']}")
