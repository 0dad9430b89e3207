"""Tables for people; nothing here decides anything.

On a terminal a table is as wide as the terminal and has colours, unless NO_COLOR is set. Elsewhere
its lines are whole, and it has no escape sequences.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentd.core.printable import printable_line

_BYTE_SLOTS = {"mem"}
_UNITS = ("", "K", "M", "G", "T", "P", "E")
_UNBOUNDED = 100_000
_ALWAYS_SHOWN = {"agent", "device", "free", "kernel", "name", "node", "reason", "state", "value"}
_MIN_OF_LAST = 20
_GAP = 3
"""Characters between two columns: rich draws a blank on each side of the divider, itself one."""


_STYLES = {
    **dict.fromkeys(("running", "ready", "available", "ok", "yes"), "green"),
    **dict.fromkeys(("terminated", "absent", "blocked", "stopped"), "dim"),
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
    screen.print(build_table(rows, columns, screen.width))


def build_table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], width: int) -> Table:
    """Return a table with one line for each row, at most `width` characters wide.

    Columns that do not fit are left out, from the right, and named below the table. Those that
    name a row, its state and the reason always stay, and wrap where they must.
    """
    cells = [{column: format_cell(row.get(column)) for column in columns} for row in rows]
    widths = {c: max([len(_head(c)), *(len(row[c]) for row in cells)]) for c in columns}
    widths[columns[-1]] = min(widths[columns[-1]], _MIN_OF_LAST)
    shown_columns = list(columns)
    for column in reversed(columns[1:]):
        if _table_width(widths, shown_columns) <= width:
            break
        if column not in _ALWAYS_SHOWN:
            shown_columns.remove(column)
    fits = _table_width(widths, shown_columns) <= width
    heads = {column: len(_head(column)) for column in shown_columns}
    minimums = widths if fits else heads if _table_width(heads, shown_columns) <= width else {}
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, caption_justify="left")
    for column in shown_columns:
        wraps = column == shown_columns[-1] or not fits
        minimum = minimums.get(column)
        table.add_column(_head(column), overflow="fold", no_wrap=not wraps, min_width=minimum)
    for row in cells:
        table.add_row(*(_styled(column, row[column]) for column in shown_columns))
    if hidden_heads := [_head(column) for column in columns if column not in shown_columns]:
        table.caption = Text(f"too wide to show: {', '.join(hidden_heads)}")
    return table


def _table_width(widths: Mapping[str, int], columns: Sequence[str]) -> int:
    """Return the width of a table with these columns."""
    return sum(widths[column] for column in columns) + _GAP * (len(columns) - 1)


def _head(column: str) -> str:
    return column.replace("_", " ").upper()


def format_age(time: str | None) -> str | None:
    """Return the time since an RFC 3339 time in its largest unit: 45s, 12m, 3h, 9d."""
    if not time:
        return None
    seconds = int((datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds())
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{max(0, seconds)}s"


def format_cell(value: object) -> str:
    """Return a value as a cell: "-" for an empty one, lists with commas."""
    return printable_line(_cell_text(value))


def _cell_text(value: object) -> str:
    if value is None or value in ({}, [], ""):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={human_amount(name, text)}" for name, text in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value) or "-"
    return str(value)


def format_member(member: str, value: object) -> str:
    """Return a member of a kernel: its command quoted for a shell, nested values as JSON."""
    if member == "command" and isinstance(value, list):
        return printable_line(shlex.join(value)) or "-"
    nested = value.values() if isinstance(value, Mapping) else value
    if isinstance(nested, Iterable) and any(isinstance(part, (Mapping, list)) for part in nested):
        return printable_line(json.dumps(value, ensure_ascii=False))
    return format_cell(value)


def human_amount(slot: str, text: object) -> str:
    """Return an amount of a slot, bytes in the largest unit that keeps them short and whole.

    Slots of bytes are `mem`, and those of plugins that are named so after the dot.
    """
    if slot.rpartition(".")[2] not in _BYTE_SLOTS or not str(text).isdigit():
        return str(text)
    size, unit = int(str(text)), 0
    while size and size % 1024 == 0 and unit < len(_UNITS) - 1:
        size, unit = size // 1024, unit + 1
    return f"{size}{_UNITS[unit]}" if size < 10_000 else str(format_bytes(int(str(text))))


def holder_amounts(slot: str, holder: Mapping[str, Any]) -> str:
    """Return the amount that a holder has of a device; of several slots, one of each."""
    amounts = holder["amounts"]
    if len(amounts) < 2:
        return human_amount(slot, holder["amount"])
    return "+".join(human_amount(name, text) for name, text in amounts.items())


def format_bytes(value: float | None) -> str | None:
    """Return bytes with three digits and a binary unit; None for None."""
    if value is None:
        return None
    unit = 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.3g}{_UNITS[unit]}"


def compact_ids(ids: Sequence[str]) -> str:
    """Return ids with consecutive ones as ranges: 0-3, 8."""
    runs: list[tuple[str, str]] = []
    for item in ids:
        stem, number = _split_number(item)
        if runs and number is not None and _split_number(runs[-1][1]) == (stem, number - 1):
            runs[-1] = (runs[-1][0], item)
        else:
            runs.append((item, item))
    return ", ".join(a if a == b else f"{a}-{b}" for a, b in runs) or "-"


def _split_number(item: str) -> tuple[str, int | None]:
    digits = item[len(item.rstrip("0123456789")) :]
    return item.removesuffix(digits), int(digits) if digits else None


def limit_text(name: str, limit: Mapping[str, Any]) -> str:
    """Return a limit in words: its name, its amount, and whether it is guaranteed."""
    promise = "guaranteed" if limit["guaranteed"] else "at most, not guaranteed"
    held_text = f", {human_amount(name, limit['held'])} held" if "held" in limit else ""
    return f"{name} {human_amount(name, limit['limit'])} ({promise}{held_text})"
