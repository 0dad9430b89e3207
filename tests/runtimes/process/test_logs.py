"""Logs of process kernels: bounded, whole, and never in anybody's way."""

import asyncio
import itertools
from pathlib import Path

import pytest

from agentd.runtimes.process.logs import LogReader, read_log
from agentd.services.protocols import LogQuery
from contracts.test_runtime import process_runtime
from runtimes.process.rig import K1, bundle, create

CONTENT = b"".join(b"%d %s\n" % (n, b"x" * (n % 90)) for n in range(6000)) + b"no newline"


def written(folder: Path, *sizes: int) -> Path:
    """A log in files of these sizes, the oldest first; the rest stands in the newest."""
    path = folder / "output.log"
    cuts = [0, *itertools.accumulate(sizes), len(CONTENT)]
    pieces = [CONTENT[a:b] for a, b in itertools.pairwise(cuts)]
    for number, piece in enumerate(reversed(pieces)):
        (path if not number else folder / f"output.log.{number}").write_bytes(piece)
    return path


def read_all(path: Path, tail: int | None) -> bytes:
    reader = LogReader(path)
    reader.open(tail)
    chunks = iter(reader.read, b"")
    content = b"".join(chunks)
    reader.close()
    return content


@pytest.mark.parametrize("sizes", [(), (1000,), (100_000, 50_000), (1, 1, 1), (14, 200_000)])
@pytest.mark.parametrize("lines", [None, 0, 1, 2, 3, 5000, 6000, 6001, 99999])
def test_the_last_lines_are_found_from_the_end(tmp_path: Path, lines, sizes) -> None:
    path = written(tmp_path, *sizes)
    everything = CONTENT.splitlines(keepends=True)
    wanted = everything if lines is None else everything[max(0, 6001 - lines) :]
    assert read_all(path, lines) == b"".join(wanted if lines != 0 else [])


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_file_that_ends_with_a_line_is_the_end_of_that_line(tmp_path: Path, end) -> None:
    (tmp_path / "output.log.1").write_bytes(b"one\ntwo\n")
    (tmp_path / "output.log").write_bytes(b"three\nfour" + end)
    path = tmp_path / "output.log"
    assert read_all(path, 2) == b"three\nfour" + end
    assert read_all(path, 3) == b"two\nthree\nfour" + end
    (tmp_path / "output.log").write_bytes(b"")
    assert read_all(path, 1) in (b"two\n", b"")  # nothing is printed into the newest yet


def test_no_more_than_a_bound_is_looked_at_for_the_last_lines(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("agentd.runtimes.process.logs.TAIL_BYTES", 1000)
    (tmp_path / "output.log").write_bytes(b"x" * 5000)
    assert read_all(tmp_path / "output.log", 10) == b"x" * 1000


async def test_a_follower_loses_nothing_over_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_bytes(b"first")
    rounds = iter(range(6))

    def goes_on() -> bool:
        """While nobody looks the file is rotated, several times between two looks."""
        number = next(rounds, None)
        if number is None:
            return False
        for _ in range(number):
            for older in (2, 1):
                source = path.with_name(f"output.log.{older}")
                if source.exists():
                    source.rename(path.with_name(f"output.log.{older + 1}"))
            path.rename(path.with_name("output.log.1"))
            path.write_bytes(b"%d" % number)
        return True

    content = [c async for c in read_log(path, None, goes_on)]
    assert b"".join(content)[:10] == b"first1223" + b"3"


async def test_follow_misses_nothing_if_kernel_ends_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_bytes(b"first ")

    def ends() -> bool:
        with path.open("ab") as file:
            file.write(b"last")
        return False

    content = [chunk async for chunk in read_log(path, None, ends)]
    assert b"".join(content) == b"first last"


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
    logs = b"".join([chunk async for chunk in runtime.logs(K1, LogQuery())])
    assert logs.endswith(b"the end\n")
    assert len(logs) > (files - 1) * 8192
    await runtime.remove(K1)
    await runtime.close()
