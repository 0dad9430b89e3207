"""Which values options accept, and which daemon a command line addresses."""

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

import click
import pytest
from click.testing import CliRunner

from agentd.cli.agentctl.main import agentctl
from agentd.cli.option_types import fleet_address, moment, node_address, seconds_from
from agentd.client import Client
from agentd.client.calls import Call
from agentd.errors import Unreachable

NOW_S = 1_800_000_000.0
USAGE = 2
Variables = Mapping[str, str]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("90", 90), ("1.5", 1.5), ("90s", 90), ("1h30m", 5400), (".5", None), ("1e3", None),
     ("-1", None), ("nan", None), ("inf", None), ("infinity", None), ("1_0", None), ("", None),
     ("9" * 20, None), ("10 m", None), ("\udcff", None)],
)  # fmt: skip
def test_seconds_are_a_number_or_a_duration(text: str, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(click.BadParameter, match="expected seconds, or 1h30m"):
            seconds_from(0)(text)
    else:
        assert seconds_from(0)(text) == seconds


def test_seconds_have_a_minimum() -> None:
    with pytest.raises(click.BadParameter, match=r"1 is less than 1\.1 seconds"):
        seconds_from(1.1)("1")
    assert seconds_from(1.1)("1.1") == 1.1


@pytest.mark.parametrize(
    ("text", "sent"),
    [("10m", "1799999400.000"), ("0s", "1800000000.000"), ("9999d", "936086400.000"),
     ("9999d999999h", "0.000"), ("1700000000", "1700000000"), ("1700000000.5", "1700000000.5"),
     ("2026-11-21T12:00:00+01:00", "2026-11-21T12:00:00+01:00")],
)  # fmt: skip
def test_moment_is_a_time_or_before_now(
    monkeypatch: pytest.MonkeyPatch, text: str, sent: str
) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW_S)
    assert moment(text) == sent


@pytest.mark.parametrize("text", ["", "later", "10 minutes", "-10m", "2026-11-21", "nan"])
def test_other_moment_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="or a duration before now such as 10m"):
        moment(text)


TCP = ["http://127.0.0.1:6001", "https://node", "HTTP://[::1]:6001/", "https://u:p@host:1/base"]
NOT_TCP = [
    *(
        "",
        "x",
        "127.0.0.1:6001",
        "ftp://host",
        "http://",
        "http://:1",
        "http://h:99999",
        "http://h:0",
    ),
    *(
        "http://h:x",
        "http://[::1",
        "http://a b",
        "http://a\nb",
        "http://\udcff",
        "unix:",
        "/a.sock",
    ),
]


@pytest.mark.parametrize("text", TCP)
def test_address_over_tcp_is_accepted(text: str) -> None:
    assert node_address(text) == fleet_address(text) == text


@pytest.mark.parametrize("text", NOT_TCP)
def test_other_address_is_refused(text: str) -> None:
    for accept in (node_address, fleet_address):
        with pytest.raises(click.BadParameter, match="http://HOST:PORT or https://HOST:PORT"):
            accept(text)


def test_only_a_gateway_has_a_socket_as_address() -> None:
    assert fleet_address("unix:/a.sock") == "unix:/a.sock"
    with pytest.raises(click.BadParameter):
        node_address("unix:/a.sock")


def asked(words: Sequence[str], variables: Variables) -> tuple[int, str]:
    """Return the status, and the address of the daemon that a command asks or its last line."""

    def open_call(client: Client, call: Call[object], timeout_s: float | None = None) -> object:
        raise Unreachable(f"asked {client._url or client._socket_path} with {client._token}")

    with patch.object(Client, "open", open_call):
        done = CliRunner(env=variables).invoke(agentctl, [*words])
    last = done.output.strip().splitlines()[-1]
    address = re.search(r"asked (\S+) with (\S+)", done.output)
    return done.exit_code, " ".join(address.groups()) if address else last


N, G = "http://n:1", "https://g:1"
ADDRESSES: Sequence[tuple[str, str, str]] = (
    # words before the command, variables, and the daemon that is asked
    ("", "", "/run/agentd/agentd.sock None"),
    ("--socket /a", "", "/a None"),
    ("--socket /a", f"AGENTD_URL={N}", "/a None"),
    ("--socket /a", f"AGENTCTL_FLEET={G}", "/a None"),
    (f"--url {N}", "AGENTD_SOCKET=/a", f"{N} None"),
    (f"--url {N}", f"AGENTCTL_FLEET={G}", f"{N} None"),
    ("--config c.toml", "AGENTD_SOCKET=/a", "/c None"),
    ("--config c.toml", f"AGENTD_URL={N}", "/c None"),
    ("--config c.toml", f"AGENTCTL_FLEET={G}", "/c None"),
    (f"--fleet {G}", f"AGENTD_SOCKET=/a AGENTD_URL={N}", f"{G} None"),
    ("--fleet unix:/g", "AGENTD_SOCKET=/a", "/g None"),
    ("", f"AGENTD_SOCKET=/a AGENTCTL_FLEET={G}", "/a None"),
    ("", f"AGENTD_SOCKET=/a AGENTD_URL={N}", f"{N} None"),
    ("", f"AGENTD_URL={N} AGENTD_CONFIG=missing", f"{N} None"),
    (f"--token-file t --url {N}", "", f"{N} secret"),
    (f"--fleet {G}", "AGENTD_TOKEN_FILE=t", f"{G} secret"),
    ("", "AGENTD_TOKEN_FILE=missing", "/run/agentd/agentd.sock None"),
)


@pytest.mark.parametrize(("words", "variables", "expected"), ADDRESSES)
@pytest.mark.usefixtures("in_a_folder")
def test_command_line_precedes_the_environment(words: str, variables: str, expected: str) -> None:
    environ = dict(pair.split("=") for pair in variables.split())
    assert asked([*words.split(), "whoami"], environ) == (1, expected)


CONFLICTS: Sequence[tuple[str, str]] = (
    ("--socket /a --url http://n:1 whoami", "--url and --socket exclude each other"),
    ("--socket /a --config c.toml whoami", "--socket and --config exclude each other"),
    ("--fleet unix:/g --socket /a ls", "--socket and --fleet exclude each other"),
    ("--fleet unix:/g --url http://n:1 --help", "--url and --fleet exclude each other"),
    ("--socket /a fleet ls", "--socket names a node: name the gateway with --fleet"),
    ("--token-file t whoami", "--token-file is for --url, or --fleet over TCP"),
    ("--token-file t --socket /a whoami", "--token-file is for --url, or --fleet over TCP"),
    ("--token-file t --fleet unix:/g ls", "--token-file is for --url, or --fleet over TCP"),
)


@pytest.mark.parametrize(("words", "problem"), CONFLICTS)
@pytest.mark.usefixtures("in_a_folder")
def test_option_without_effect_is_refused(words: str, problem: str) -> None:
    status, line = asked(words.split(), {})
    assert (status, problem in line) == (USAGE, True), line


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder with a configuration and a token."""
    (tmp_path / "c.toml").write_text('[rpc]\nsocket = "/c"\n')
    (tmp_path / "t").write_text("secret\n")
    monkeypatch.chdir(tmp_path)
