from __future__ import annotations

from pathlib import Path

import pytest

from agentd_slurm.settings import (
    SETTINGS_VARIABLE,
    InvalidSettings,
    PlaceholderSettings,
    SlurmSettings,
    parse_settings,
    read_settings,
)


def test_settings_are_defaults_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTINGS_VARIABLE, str(tmp_path / "absent"))
    assert read_settings() == SlurmSettings()
    assert SlurmSettings().placeholder.nice == -10000


def test_settings_are_read_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "slurm.toml"
    file.write_text(
        '[slurm]\nbin = "/opt/slurm/bin"\n'
        '[placeholder]\npartition = "gpu"\naccount = "ops"\nqos = "low"\nreservation = "r"\n'
        'time = "02:00:00"\nnice = 5\n'
    )
    monkeypatch.setenv(SETTINGS_VARIABLE, str(file))
    placeholder = PlaceholderSettings("gpu", "ops", "low", "r", "02:00:00", 5)
    assert read_settings() == SlurmSettings("/opt/slurm/bin", placeholder)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1", r"unknown key x, expected \[slurm\] or \[placeholder\]"),
        ("[slurm]\nbins = 1", r"unknown key slurm.bins \(known: bin\)"),
        ("slurm = 1", "unknown key slurm, expected"),
        ("[slurm]\nbin = 1", "invalid slurm.bin: got 1, expected a text"),
        ('[slurm]\nbin = "bin"', "expected an absolute path"),
        ("[placeholder]\nnice = true", "invalid placeholder.nice: got True"),
        ('[placeholder]\nqos = "a\\nb"', "invalid placeholder.qos"),
    ],
)
def test_settings_refuse(text: str, reason: str) -> None:
    with pytest.raises(InvalidSettings, match=reason):
        parse_settings(text)


def test_settings_name_the_file_in_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "slurm.toml"
    monkeypatch.setenv(SETTINGS_VARIABLE, str(file))
    for content in (b"\xff", b"=", b"x = 1"):
        file.write_bytes(content)
        with pytest.raises(InvalidSettings, match=str(file)):
            read_settings()
