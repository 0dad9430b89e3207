"""Tables on a terminal: what a row is about, how it is and why is never lost."""

from io import StringIO

import pytest
from rich.console import Console

from agentd.cli.agentctl.options import KERNEL_COLUMNS
from agentd.cli.tables import build_table, format_age, format_cell, format_member
from agentd.core.printable import printable

DEVICES = [
    *("device", "state", "slot", "capacity", "allocated", "free", "agents", "holders", "reason")
]
KERNEL = {
    "kernel": "train-2026-11-25-resnet",
    "agent": "research-team-a",
    "state": "running",
    "slots": {"cpu": "4", "mem": "8589934592", "cuda.device": "2"},
    "devices": ["cpu cpu0-cpu3", "cuda cuda0, cuda1"],
    "exit_code": None,
    "age": "12m",
    "reason": "the engine says that the container is paused, which nobody asked for",
}
DEVICE = {
    "device": "cuda/cuda0",
    "state": "unhealthy",
    "slot": "cuda.device",
    "capacity": "1",
    "allocated": "1",
    "free": "0",
    "agents": ["research-team-a", "research-team-b"],
    "holders": ["train-2026-11-25-resnet 1"],
    "reason": "Xid 79: the GPU has fallen off the bus",
}


def printed(row: dict[str, object], columns: list[str], width: int) -> str:
    out = StringIO()
    console = Console(file=out, width=width, highlight=False, markup=False)
    console.print(build_table([row], columns, width))
    return out.getvalue()


def without_breaks(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize(
    ("row", "columns", "kept"),
    [
        (KERNEL, KERNEL_COLUMNS, ("kernel", "agent", "state", "reason")),
        (DEVICE, DEVICES, ("device", "state", "free", "reason")),
    ],
    ids=["kernel", "device"],
)
def test_name_state_and_reason_stay_at_any_width(row, columns, kept, width: int) -> None:
    text = printed(row, columns, width)
    assert all(len(line) <= width for line in text.splitlines())
    table, _, said = text.partition("too wide to show:")
    assert all(column.upper() not in said for column in kept)
    if width >= 80:
        assert all(str(row[column]) in table for column in kept if column != "reason")
        assert all(word in table for word in str(row["reason"]).split())


@pytest.mark.parametrize("length", [1, 2, 12, 15, 24, 33, 50, 63])
@pytest.mark.parametrize("is_bare", [True, False])
def test_columns_are_whole_or_named_as_left_out(length: int, is_bare: bool) -> None:
    """No header is broken and no cell is cropped from the width at which all headers fit."""
    row = {**KERNEL, "kernel": "k" * length}
    if is_bare:
        row |= {"agent": "agent-1", "slots": {"cpu": "1"}, "devices": ["cpu 0"], "reason": ""}
    for width in range(60, 200):
        text = printed(row, KERNEL_COLUMNS, width)
        table, _, left_out = text.partition("too wide to show:")
        heads = table.splitlines()[0]
        for column in KERNEL_COLUMNS:
            head = column.replace("_", " ").upper()
            assert head in heads or head in left_out, (width, text)
        assert without_breaks(str(row["kernel"])) in without_breaks_of_column(table), (width, text)
        assert "…" not in table


def without_breaks_of_column(table: str) -> str:
    """The first column, read downwards."""
    return "".join(line.split(" ", 1)[0] for line in table.splitlines())


def test_table_that_fits_says_nothing_of_its_width() -> None:
    assert "too wide" not in printed(KERNEL, KERNEL_COLUMNS, 200)


def test_age_is_in_its_largest_unit() -> None:
    assert format_age(None) is None
    assert str(format_age("2020-01-01T00:00:00.000Z")).endswith("d")


@pytest.mark.parametrize(
    ("member", "value", "text"),
    [
        ("command", ["sh", "-c", "echo a, b"], "sh -c 'echo a, b'"),
        ("allocation", {"cuda": {"cuda.device": {"cuda0": "1"}}},
         '{"cuda": {"cuda.device": {"cuda0": "1"}}}'),
        ("mounts", [{"source": "/a", "target": "/b"}], '[{"source": "/a", "target": "/b"}]'),
        ("slots", {"cpu": "1", "mem": "1073741824"}, "cpu=1 mem=1G"),
        ("detached", True, "yes"),
        ("reason", "", "-"),
    ],
)  # fmt: skip
def test_member_of_a_kernel_is_no_python_text(member: str, value: object, text: str) -> None:
    assert format_member(member, value) == text


OBEYED = "\x1b]0;title\x07\x1b[31m\x9b2J\r\u202e\udc9b"
CELL = f"{OBEYED}\n\t"


def test_nothing_that_a_terminal_obeys_is_printed() -> None:
    kernel = {"command": ["sh", "-c", CELL], "labels": {"a": CELL}, OBEYED: CELL}
    cells = [format_cell(CELL), format_cell([CELL]), format_cell(kernel)]
    cells += [format_member(member, value) for member, value in kernel.items()]
    for text in (*cells, printable(OBEYED)):
        assert text.isprintable(), text
    assert printable(OBEYED).startswith("\\x1b]0;title\\x07")
    assert printable("two\n\tlines") == "two\n\tlines"
