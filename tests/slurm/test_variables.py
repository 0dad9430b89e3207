"""Variables of the environment that Slurm's hooks read."""

from pathlib import Path

import pytest

from agentd.client.defaults import DEFAULT_SOCKET
from agentd_slurm.commands.job_environment import RUN_FOLDER, JobEnvironment
from agentd_slurm.gres_map import DEFAULT_MAP, map_path
from agentd_slurm.node_client import socket_path

JOB = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}


@pytest.mark.parametrize(
    ("value", "socket", "gres_map", "folder"),
    [("", DEFAULT_SOCKET, DEFAULT_MAP, RUN_FOLDER), ("/x", "/x", "/x", "/x")],
)
def test_empty_variable_counts_as_not_set(
    monkeypatch: pytest.MonkeyPatch, value: str, socket: str, gres_map: str, folder: str
) -> None:
    monkeypatch.setenv("AGENTD_SOCKET", value)
    monkeypatch.setenv("AGENTD_SLURM_MAP", value)
    assert (socket_path(), map_path()) == (socket, Path(gres_map))
    assert JobEnvironment.of(JOB | {"AGENTD_SLURM_RUN": value}).mark == Path(folder, "7")
