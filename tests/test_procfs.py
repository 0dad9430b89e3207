"""Names in /proc, cgroups and mount tables are bytes that users choose."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentd.procfs import read_lines

ROOT = Path(__file__).parent.parent
SOURCES = [
    file
    for folder in ("src", "fleet/src", "engines", "plugins")
    for file in sorted((ROOT / folder).rglob("*.py"))
]
NAMED = re.compile(r"\bproc\b|cgroup|mountinfo|/mounts\b|\bcomm\b|cmdline|environ\b")
"""A function with one of these words reads such a file."""
CODECS = re.compile(r"json|msgpack|Decoder|_LINE|LIST")
"""Receivers whose `decode` is not that of bytes."""


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"one\n", ["one"]),
        (b"0::/a\n1:x:/b\n", ["0::/a", "1:x:/b"]),
        (b"cut \xc3\n\xff\n", ["cut \udcc3", "\udcff"]),
        ("a\r0::/b\x85\u2028\x0cc\n".encode(), ["a\r0::/b\x85\u2028\x0cc"]),
    ],
)
def test_lines_end_at_newlines_alone(tmp_path: Path, content: bytes, lines: list[str]) -> None:
    (tmp_path / "file").write_bytes(content)
    assert read_lines(tmp_path / "file") == lines


def decodes_strictly(call: ast.Call) -> bool:
    """Return whether a call reads text without saying what to do with other bytes than UTF-8."""
    if any(keyword.arg == "errors" for keyword in call.keywords):
        return False
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    receiver = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    match name:
        case "read_text" if receiver:
            return len(call.args) < 2
        case "decode":
            return len(call.args) < 2 and not CODECS.search(receiver)
        case "open" if receiver != "os":
            first = call.args[1:2] if not receiver else call.args[:1]
            mode = ast.unparse(first[0]) if first else "'r'"
            return re.fullmatch(r"'r?\+?t?'", mode) is not None
    return False


def returns_text(call: ast.Call) -> bool:
    """Return whether a call starts a program whose output is decoded strictly."""
    given = {keyword.arg for keyword in call.keywords}
    return bool({"text", "encoding", "universal_newlines"} & given) and "errors" not in given


def strict_reads(source: str) -> Iterator[str]:
    """Yield the strict reads of names that users choose, and of the output of programs."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call) and "subprocess" in ast.unparse(node.func)
        if is_call and returns_text(node):
            yield ast.unparse(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
            if NAMED.search(ast.unparse(node)):
                yield from (ast.unparse(call) for call in calls if decodes_strictly(call))


@pytest.mark.parametrize(
    "line",
    [
        "(folder / 'comm').read_text('utf-8')",
        "Path('/proc/self/cgroup').read_text(encoding='ascii')",
        "open(f'/proc/{pid}/status')",
        "(folder / 'cgroup.events').open()",
        "Path('/proc/self/mountinfo').read_bytes().decode()",
        "subprocess.run(['squeue'], capture_output=True, text=True)",
    ],
)
def test_strict_read_is_found(line: str) -> None:
    assert [*strict_reads(f"def f():\n    return {line}")]


@pytest.mark.parametrize(
    "line",
    [
        "(folder / 'comm').read_text(errors='replace')",
        "open(f'/proc/{pid}/stat', 'rb')",
        "open('/proc/self/oom_score_adj', 'w')",
        "read_bytes('/proc/1/comm').decode('ascii', 'replace')",
        "Path('/etc/hostname').read_text()",
        "subprocess.run(['squeue'], text=True, errors='replace')",
    ],
)
def test_tolerant_read_is_not_found(line: str) -> None:
    assert not [*strict_reads(f"def f():\n    return {line}")]


def test_reader_of_proc_needs_the_standard_library_alone() -> None:
    tree = ast.parse((ROOT / "src/agentd/procfs.py").read_text())
    modules = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    }
    assert modules <= sys.stdlib_module_names


def test_names_of_users_are_never_decoded_strictly() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {c}" for file in SOURCES for c in strict_reads(file.read_text())
    ]
    assert found == []
