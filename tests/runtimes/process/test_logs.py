"""Logs of process kernels: bounded, whole, and never in anybody's way."""

import asyncio
import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agentd.errors import RuntimeUnavailable
from agentd.runtimes.process import logs
from agentd.runtimes.process.logs import LogReader, open_log
from agentd.runtimes.process.shim_output import MAX_GAPS, KernelOutput
from agentd.services.protocols import KernelLog, LogQuery
from contracts.test_runtime import process_runtime
from runtimes.process.rig import K1, bundle, create

CONTENT = b"".join(b"%d %s\n" % (n, b"x" * (n % 90)) for n in range(6000)) + b"no newline"


def write_files(bundle: Path, files: dict[int, bytes]) -> Path:
    """Write a log in files that begin at these positions."""
    bundle.chmod(0o700)
    for position, content in files.items():
        (bundle / f"output.log.{position}").write_bytes(content)
    return bundle


def written(folder: Path, *sizes: int) -> Path:
    """A log in files of these sizes, the oldest first; the rest stands in the newest."""
    cuts = [0, *itertools.accumulate(sizes), len(CONTENT)]
    return write_files(folder, {a: CONTENT[a:b] for a, b in itertools.pairwise(cuts)})


def read_all(bundle: Path, query: LogQuery) -> tuple[int, bytes]:
    """The position of a log's first byte, and its bytes."""
    reader = LogReader(bundle)
    reader.open(query)
    position = reader.position
    content = b"".join(iter(reader.read, b""))
    reader.close()
    return position, content


@pytest.mark.parametrize("sizes", [(), (1000,), (100_000, 50_000), (1, 1, 1), (14, 200_000)])
@pytest.mark.parametrize("lines", [None, 0, 1, 2, 3, 5000, 6000, 6001, 99999])
def test_the_last_lines_are_found_from_the_end(tmp_path: Path, lines, sizes) -> None:
    bundle = written(tmp_path, *sizes)
    everything = CONTENT.splitlines(keepends=True)
    wanted = everything if lines is None else everything[max(0, 6001 - lines) :]
    expected = b"".join(wanted if lines != 0 else [])
    assert read_all(bundle, LogQuery(tail=lines)) == (len(CONTENT) - len(expected), expected)


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_file_that_ends_with_a_line_is_the_end_of_that_line(tmp_path: Path, end) -> None:
    bundle = write_files(tmp_path, {0: b"one\ntwo\n", 8: b"three\nfour" + end})
    assert read_all(bundle, LogQuery(tail=2)) == (8, b"three\nfour" + end)
    assert read_all(bundle, LogQuery(tail=3)) == (4, b"two\nthree\nfour" + end)
    write_files(tmp_path, {8: b""})
    assert read_all(bundle, LogQuery(tail=1))[1] in (b"two\n", b"")  # the newest is empty yet


def test_no_more_than_a_bound_is_looked_at_for_the_last_lines(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("agentd.runtimes.process.logs.TAIL_BYTES", 1000)
    bundle = write_files(tmp_path, {0: b"x" * 5000})
    assert read_all(bundle, LogQuery(tail=10)) == (4000, b"x" * 1000)


KEPT = {100: b"a" * 50, 150: b"b" * 50, 300: b"c" * 50, 350: b""}
"""A log whose head was dropped, and whose bytes from 200 to 300 could not be written."""


@pytest.mark.parametrize(
    ("asked", "position", "content"),
    [
        pytest.param(0, 100, b"a" * 50 + b"b" * 50, id="the head was dropped"),
        pytest.param(100, 100, b"a" * 50 + b"b" * 50, id="the oldest byte"),
        pytest.param(149, 149, b"a" + b"b" * 50, id="the last byte of a file"),
        pytest.param(150, 150, b"b" * 50, id="the first byte of a file"),
        pytest.param(200, 300, b"c" * 50, id="the first byte of a gap"),
        pytest.param(250, 300, b"c" * 50, id="in a gap"),
        pytest.param(349, 349, b"c", id="the last byte"),
        pytest.param(350, 350, b"", id="the end"),
        pytest.param(10**30, 350, b"", id="beyond the end"),
    ],
)
async def test_a_log_begins_at_its_position(
    tmp_path: Path, asked: int, position: int, content: bytes
) -> None:
    query = LogQuery(from_position=asked)
    async with open_log(write_files(tmp_path, KEPT), query, lambda: False) as log:
        assert log.position == position
        is_broken = position < 200
        assert await read_until_gap(log) == (content, GAP if is_broken else "")


GAP = "output lost from 200 to 300"


async def read_until_gap(log: KernelLog) -> tuple[bytes, str]:
    """The bytes of a log, and the error that it ends with."""
    content = b""
    try:
        async for chunk in log.chunks:
            content += chunk
    except RuntimeUnavailable as error:
        return content, str(error)
    return content, ""


@pytest.mark.parametrize("files", [{}, None], ids=["no files", "no bundle"])
async def test_a_log_without_files_is_empty(tmp_path: Path, files: dict[int, bytes] | None) -> None:
    bundle = tmp_path if files is None else write_files(tmp_path, files)
    bundle = bundle / "removed" if files is None else bundle
    async with open_log(bundle, LogQuery(from_position=7), lambda: False) as log:
        assert (log.position, [chunk async for chunk in log.chunks]) == (0, [])


class Printing(KernelOutput):
    """A shim's output in a test, without a kernel."""

    def __init__(self, size: int, files: int) -> None:
        super().__init__(
            {"user": None, "log_prefix": "output.log.", "log_max_size": size,
             "log_max_files": files}
        )  # fmt: skip

    def print(self, text: bytes) -> None:
        self._retry_at = 0.0
        os.write(self.writer, text)
        assert self.copy_chunk() == len(text)


@pytest.fixture
def printing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Printing]:
    tmp_path.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    return Printing


async def test_a_follower_loses_nothing_over_rotations(printing, tmp_path: Path) -> None:
    output, rounds = printing(10, 3), iter(range(6))
    output.print(b"first")

    def goes_on() -> bool:
        """While nobody looks the file is rotated, several times between two looks."""
        number = next(rounds, None)
        for _ in range(number or 0):
            output.print(b"%d" % (number or 0) * 5)
        return number is not None

    async with open_log(tmp_path, LogQuery(follow=True), goes_on) as log:
        content = b"".join([chunk async for chunk in log.chunks])
    assert content == b"first" + b"".join(b"%d" % n * 5 * n for n in range(6))


async def test_a_follower_that_is_overtaken_hears_of_it(printing, tmp_path: Path) -> None:
    output = printing(10, 2)
    output.print(b"first")
    async with open_log(tmp_path, LogQuery(follow=True), lambda: True) as log:
        assert await anext(log.chunks) == b"first"
        for _ in range(10):
            output.print(b"0123456789")
        assert await anext(log.chunks) == b"01234"  # the rest of the file that it has open
        with pytest.raises(RuntimeUnavailable, match="output lost from 10 to 90"):
            await anext(log.chunks)
    assert read_all(tmp_path, LogQuery(from_position=10))[0] == 90


def test_files_that_are_rotated_away_meanwhile_are_listed_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundle = write_files(tmp_path, {0: b"one\n", 4: b"two\n"})
    list_all, rotations = logs.list_names, [(4, 8), (8, 12)]

    def list_and_rotate(folder: Path) -> list[str]:
        names = list(list_all(folder))
        if rotations:
            gone, new = rotations.pop(0)
            (bundle / f"output.log.{gone}").unlink()
            write_files(bundle, {new: b"new\n"})
        return names

    reader = LogReader(bundle)
    monkeypatch.setattr(logs, "list_names", list_and_rotate)
    reader.open(LogQuery(from_position=9, follow=True))
    assert (reader.position, reader.read()) == (12, b"new\n")
    reader.close()


async def test_log_that_is_not_followed_outlives_rotations(printing, tmp_path: Path) -> None:
    output = printing(10, 3)
    for _ in range(3):
        output.print(b"0123456789")
    async with open_log(tmp_path, LogQuery(), lambda: False) as log:
        for _ in range(10):
            output.print(b"later     ")
        assert b"".join([chunk async for chunk in log.chunks]) == b"0123456789" * 3


@pytest.mark.parametrize(("follow", "files"), [(True, 1), (False, 33)])
async def test_reader_that_follows_holds_one_file(
    printing, tmp_path: Path, files: int, *, follow: bool
):
    output = printing(10, 40)
    for _ in range(40):
        output.print(b"0123456789")
    before = open_logs()
    async with open_log(tmp_path, LogQuery(follow=follow), lambda: follow):
        assert open_logs() - before == files


def open_logs() -> int:
    links = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return sum("/output.log" in link for link in links)


async def test_follow_misses_nothing_if_kernel_ends_meanwhile(tmp_path: Path) -> None:
    bundle = write_files(tmp_path, {0: b"first "})

    def ends() -> bool:
        with (bundle / "output.log.0").open("ab") as file:
            file.write(b"last")
        return False

    async with open_log(bundle, LogQuery(follow=True), ends) as log:
        assert b"".join([chunk async for chunk in log.chunks]) == b"first last"


@pytest.mark.parametrize("files", [3, 1])
async def test_a_log_is_bounded_and_its_end_is_kept(folder: Path, files: int) -> None:
    (folder / "kernels").mkdir()
    runtime = process_runtime(folder / "kernels", log_max_size=8192, log_max_files=files)
    await create(runtime, "sh", "-c", "yes 0123456789abcde | head -c 1000000; echo the end")
    async with asyncio.timeout(20):
        await runtime._bundles.kernel_processes("k1").wait_ended()
    sizes = [path.stat().st_size for path in bundle(folder).glob("output.log*")]
    assert len(sizes) == files
    assert max(sizes) <= 8192
    async with runtime.logs(K1, LogQuery()) as log:
        content = b"".join([chunk async for chunk in log.chunks])
    assert content.endswith(b"the end\n")
    assert len(content) > (files - 1) * 8192
    assert log.position + len(content) == 1_000_000 + len(b"the end\n")
    await runtime.remove(K1)
    await runtime.close()


def failing_writes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Refuse data ("write") or files ("open"), as a full disk does."""

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(f"agentd.runtimes.process.shim_output.os.{name}", refuse)


@pytest.mark.parametrize("files", [3, 1])
@pytest.mark.parametrize("name", ["write", "open"])
def test_output_on_a_full_disk_counts(printing, tmp_path: Path, name, files) -> None:
    output = printing(10, files)
    output.print(b"0123456789")
    for number in range(30):
        os.write(output.writer, b"lost!")
        with pytest.MonkeyPatch.context() as patched:
            failing_writes(patched, name)
            output._retry_at = 0.0
            assert output.copy_chunk() == 5
        if number == 0:
            assert read_all(tmp_path, LogQuery(from_position=10))[0] in (10, 15)
    output.print(b"after")
    position, content = read_all(tmp_path, LogQuery(from_position=10))
    assert (position, content) == (160, b"after")
    names = [path.name for path in tmp_path.iterdir()]
    assert sorted(names) == sorted(
        ["output.log.160"] if files == 1 else ["output.log.0", "output.log.160"]
    )


def test_gaps_bound_the_number_of_files(printing, tmp_path: Path) -> None:
    output = printing(1000, 3)
    for _ in range(100):
        output.print(b"ab")
        output._position += 1  # a byte that could not be written
    assert len(list(tmp_path.iterdir())) == 3 + MAX_GAPS
    assert read_all(tmp_path, LogQuery(from_position=298)) == (298, b"b")
