from __future__ import annotations

from pathlib import Path

import pytest

from agentd_slurm.cores import read_cores


def host(folder: Path, *threads: tuple[int, int, str]) -> Path:
    """Write package, NUMA node and sibling list of each hardware thread as Linux does."""
    for number, (package, node, siblings) in enumerate(threads):
        topology = folder / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (folder / f"cpu{number}" / f"node{node}").mkdir()
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "thread_siblings_list").write_text(f"{siblings}\n")
    for other in ("cpufreq", "cpuidle"):
        (folder / other).mkdir()
    return folder


@pytest.mark.parametrize(
    ("threads", "cores"),
    [
        pytest.param(
            [(n // 2 % 2, n // 2 % 2, f"{n % 4},{n % 4 + 4}") for n in range(8)],
            {0: "0-1", 1: "2-3"},
            id="second threads last",
        ),
        pytest.param(
            [(n % 2, n % 2, f"{n % 4},{n % 4 + 4}") for n in range(8)],
            {0: "0-1", 1: "2-3"},
            id="sockets take turns",
        ),
        pytest.param(
            [(n // 4, n // 4, f"{n // 2 * 2}-{n // 2 * 2 + 1}") for n in range(8)],
            {0: "0-1", 1: "2-3"},
            id="threads of a core side by side",
        ),
        pytest.param(
            [(n % 2, n % 4, str(n)) for n in range(8)],
            {0: "0-1", 1: "4-5", 2: "2-3", 3: "6-7"},
            id="several nodes in a socket",
        ),
        pytest.param([(0, 1, "0"), (0, 0, "1")], {0: "1-1", 1: "0-0"}, id="one core each"),
        pytest.param([(0, 0, "0"), (1, 0, "1")], {}, id="one node"),
        pytest.param([], {}, id="unknown"),
    ],
)
def test_cores_count_socket_by_socket(
    tmp_path: Path, threads: list[tuple[int, int, str]], cores: dict[int, str]
) -> None:
    assert read_cores(host(tmp_path, *threads)) == cores


def test_cores_leave_out_threads_that_are_offline(tmp_path: Path) -> None:
    folder = host(tmp_path, *((n // 2, n // 2, str(n)) for n in range(4)))
    for file in (folder / "cpu1/topology").iterdir():
        file.unlink()
    (folder / "cpu1/topology").rmdir()
    assert read_cores(folder) == {0: "0-0", 1: "1-2"}
