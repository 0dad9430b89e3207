"""fleet.toml: the example, the environment, and what is refused in which words."""

import errno
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from agentd.errors import ConfigRefused, StartRefused
from agentd.http.credentials import build_endpoint, read_tokens
from agentd.http.settings import TokenSettings
from agentd_fleet.credentials import etcd_credentials, rpc_settings
from agentd_fleet.placement.choice import PlacementPolicy
from agentd_fleet.settings import FleetFile, load

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "configs" / "fleet.toml"
WRITTEN = re.compile(r"# ([a-z-]+ = [^#]*?)(  # .*)?")


def read(folder: Path, text: str, **environ: str) -> FleetFile:
    path = folder / "fleet.toml"
    path.write_text(text)
    return load(str(path), environ)


def refusal(folder: Path, text: str, **environ: str) -> list[str]:
    with pytest.raises(ConfigRefused) as caught:
        read(folder, text, **environ)
    return [line.removeprefix(f"{folder}/fleet.toml: ") for line in caught.value.lines()]


def keys(model: type[BaseModel]) -> set[str]:
    return {name.replace("_", "-") for name in model.model_fields}


def shown(text: str) -> Iterator[tuple[str, str, str]]:
    """The settings that a file shows without setting them: table, line and its remark."""
    table = ""
    for line in text.splitlines():
        if heading := re.fullmatch(r"(?:# )?\[+([a-z.]+)\]+", line):
            table = heading[1]
        elif found := WRITTEN.fullmatch(line):
            yield table, found[1], found[2] or ""


def test_the_example_sets_nothing_and_names_every_setting() -> None:
    assert load(str(EXAMPLE), {}) == FleetFile()
    named: dict[str, set[str]] = {}
    for table, line, _ in shown(EXAMPLE.read_text()):
        named.setdefault(table, set()).add(line.partition(" ")[0])
    tables = {name: keys(field.annotation) for name, field in FleetFile.model_fields.items()}
    assert tables.pop("rpc") == named.pop("rpc") | {"tokens"}
    assert named.pop("rpc.tokens") == keys(TokenSettings)
    assert named == tables


def test_what_the_example_shows_without_saying_so_is_the_default() -> None:
    defaults = FleetFile().model_dump(mode="json")
    for table, line, remark in shown(EXAMPLE.read_text()):
        if table in defaults and not remark.startswith("  # Example:"):
            ((key, value),) = tomllib.loads(line).items()
            assert defaults[table][key.replace("-", "_")] == value, line


def test_every_setting_of_the_example_is_one_that_can_be_made(tmp_path: Path) -> None:
    text = re.sub(r"(?m)^# (\[\[|[a-z-]+ = )", r"\1", EXAMPLE.read_text())
    settings = read(tmp_path, text)
    assert settings.gateway.listen == "127.0.0.1:7001"
    assert [token.name for token in rpc_settings(settings).tokens] == ["team-a"]


@pytest.mark.parametrize("written", re.findall(r'Example: ([\["{].*)\n', EXAMPLE.read_text()))
def test_an_example_in_a_remark_is_one_that_can_be_made(tmp_path: Path, written: str) -> None:
    line = next(line for line in EXAMPLE.read_text().splitlines() if line.endswith(written))
    key = line.split()[1]
    table = "join" if key in keys(FleetFile.model_fields["join"].annotation) else "fleet"
    value = tomllib.loads(f"value = {written}")["value"]
    made = getattr(read(tmp_path, f"[{table}]\n{key} = {written}\n"), table)
    assert made.model_dump(mode="json")[key] == value


REFUSED: dict[str, tuple[str, list[str]]] = {
    "an unknown key, with the one that may be meant": (
        '[gateway]\npolciy = "pack"\nlisten = "127.0.0.1:7001"',
        ["gateway.polciy: unknown key; did you mean policy? allowed: socket, socket-group,"],
    ),
    "a key in snake case": (
        '[fleet]\netcd_user = "x"',
        ["fleet.etcd_user: unknown key; did you mean etcd-user? allowed: name, etcd, etcd-user,"],
    ),
    "an unknown table": (
        "[jion]\nlease = 5",
        ["jion: unknown key; did you mean join? allowed: fleet, join, gateway, rpc"],
    ),
    "etcd and nodes together": (
        '[fleet]\netcd = ["http://e:2379"]\nnodes = ["unix:/run/a.sock"]',
        ["fleet: etcd and nodes exclude each other: with etcd, nodes join by themselves"],
    ),
    "etcd's address without a scheme": (
        '[fleet]\netcd = ["etcd-1:2379"]',
        ["fleet.etcd: invalid address 'etcd-1:2379': expected https://host:port or http://"],
    ),
    "etcd behind a unix socket": (
        '[fleet]\netcd = ["unix:/run/etcd.sock"]',
        ["fleet.etcd: invalid address 'unix:/run/etcd.sock': expected https://host:port or"],
    ),
    "a node's socket with a relative path": (
        '[fleet]\nnodes = ["unix:agentd.sock"]',
        ["fleet.nodes: invalid address 'unix:agentd.sock': expected https://host:port or"],
    ),
    "an address with a path": (
        '[join]\nurl = "https://node-1:6001/v1"',
        ["join.url: invalid address 'https://node-1:6001/v1': expected https://host:port"],
    ),
    "a node that is named twice": (
        '[fleet]\nnodes = ["https://a:1", "https://a:1/"]',
        ["fleet.nodes: duplicate address https://a:1"],
    ),
    "a list that is none": ('[fleet]\nnodes = "unix:/a"', ["fleet.nodes: expected a list, not"]),
    "a file without a key": ("# lost\n", ["has no keys; a failed write may have emptied it"]),
    "a relative state folder": (
        '[gateway]\nstate-dir = "fleet"',
        ["gateway.state-dir: invalid path 'fleet': expected an absolute path"],
    ),
    "an empty state folder": (
        '[join]\nstate-dir = ""',
        ["join.state-dir: invalid path '': expected an absolute path"],
    ),
    "a certificate without its key": (
        '[fleet]\ncert = "/x"',
        ["fleet: cert and key must be set together"],
    ),
    "a user without a password": (
        '[fleet]\netcd-user = "node"',
        ["fleet: etcd-user and etcd-password-file must be set together"],
    ),
    "a fleet whose name is a path": (
        '[fleet]\nname = "a/b"',
        ["fleet.name: invalid name 'a/b': expected 1 to 63 letters, digits"],
    ),
    "a lease that ends at once": (
        "[join]\nlease = 1",
        ["join.lease: Input should be greater than or equal to 2, not 1"],
    ),
    "a label that is not text": (
        "[join]\nlabels = { rack = 7 }",
        ["join.labels.rack: expected text, not 7"],
    ),
    "a policy that there is not": ('[gateway]\npolicy = "spread"', ["gateway.policy: "]),
    "a socket's path that is too long": (
        f'[gateway]\nsocket = "/{"x" * 107}"',
        ["gateway.socket: longer than 107 bytes, the limit for a socket path"],
    ),
    "a role without its agents": (
        '[[rpc.tokens]]\nname = "a"\nfile = "/a"\nrole = "agent"',
        ['rpc.tokens.0: role "agent" requires agents = ["…"], the agents in scope'],
    ),
    "a token for a gateway without role admin": (
        '[[rpc.tokens]]\nname = "a"\nfile = "/a"\nrole = "read"\ngateway = true',
        ['rpc.tokens.0: gateway = true requires role = "admin": it may act for any caller'],
    ),
    "several things at once, each of them": (
        '[fleet]\nnodes = ["a"]\n[join]\nlease = 0\n[gateway]\nx = 1',
        ["fleet.nodes: ", "join.lease: ", "gateway.x: unknown key; allowed: "],
    ),
    "text that is not TOML": ("[fleet", ["invalid TOML: "]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_contradicting_settings_are_refused(tmp_path: Path, case: str) -> None:
    text, wanted = REFUSED[case]
    lines = refusal(tmp_path, text)
    assert len(lines) == len(wanted), lines
    for line, start in zip(lines, wanted, strict=True):
        assert line.startswith(start), line


def test_missing_named_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentd_fleet.settings.SYSTEM_FILE", tmp_path / "none")
    assert load(None, {}) == FleetFile()
    for option, environ in (("none", {}), (None, {"AGENTD_FLEET_CONFIG": "none"})):
        with pytest.raises(ConfigRefused, match="No such file"):
            load(option, environ)
    (tmp_path / "fleet.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigRefused, match="is not UTF-8"):
        load(str(tmp_path / "fleet.toml"), {})


def test_a_variable_comes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTD_FLEET__GATEWAY__POLICY", "pack")
    monkeypatch.setenv("AGENTD_FLEET__FLEET__NODES", '["unix:/run/agentd/agentd.sock"]')
    monkeypatch.setenv("AGENTD_FLEET__JOIN__LABELS", '{"zone": "a"}')
    settings = read(tmp_path, '[gateway]\npolicy = "random"\nlisten = "127.0.0.1:1"\n')
    assert settings.gateway.policy is PlacementPolicy.PACK
    assert settings.gateway.listen == "127.0.0.1:1"
    assert settings.fleet.nodes == ("unix:/run/agentd/agentd.sock",)
    assert settings.join.labels == {"zone": "a"}


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("AGENTD_FLEET__JOIN__LEASE", "soon", "expected a whole number, not 'soon'"),
        ("AGENTD_FLEET__FLEET__ETCD", '["etcd-1:2379"]', "invalid address 'etcd-1:2379'"),
        ("AGENTD_FLEET__FLEET__NODES", "https://a:1,https://b:1", "expected a list, not"),
        ("AGENTD_FLEET__GATEWAY__POLCIY", "pack", "unknown key; did you mean policy?"),
    ],
)
def test_a_variable_that_is_refused_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, why: str
) -> None:
    monkeypatch.setenv(name, value)
    (line,) = refusal(tmp_path, "[fleet]\n", **{name: value})
    assert line.startswith(f"{name}: {why}"), line


def served(folder: Path, text: str) -> Any:
    return rpc_settings(read(folder, text))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            '[gateway]\nlisten = "127.0.0.1:7001"',
            "gateway: listen requires token-file or [[rpc.tokens]]: TCP callers must send a bearer",
        ),
        (
            '[gateway]\nlisten = "0.0.0.0:7001"\n[rpc]\ntoken-file = "/t"',
            "gateway: listen beyond loopback requires tls-cert and tls-key",
        ),
        (
            '[gateway]\nlisten = "[::]:7001"\n[rpc]\ntoken-file = "/t"',
            "gateway: listen beyond loopback requires tls-cert and tls-key",
        ),
        (
            '[gateway]\nlisten = "127.0.0.1:1"\ntls-cert = "/c"\n[rpc]\ntoken-file = "/t"',
            "gateway: tls-cert and tls-key must be set together",
        ),
        ('[gateway]\nlisten = "here"', "gateway.listen: invalid address 'here': expected IP:PORT"),
        (
            '[[rpc.tokens]]\nname = "gateway"\nfile = "/t"\nrole = "admin"',
            "gateway: duplicate name gateway of tokens and sockets",
        ),
    ],
)
def test_where_a_gateway_answers_is_protected(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigRefused) as caught:
        served(tmp_path, text)
    (line,) = caught.value.lines()
    assert line.removeprefix("configuration: ").startswith(why), line


def test_exposed_or_equal_tokens_are_refused(tmp_path: Path) -> None:
    text = '[gateway]\nlisten = "127.0.0.1:7001"\n'
    for name in ("a", "b", "c"):
        file = tmp_path / name
        file.write_text("same\n")
        file.chmod(0o644 if name == "c" else 0o640)
        text += f'[[rpc.tokens]]\nname = "{name}"\nfile = "{file}"\nrole = "admin"\n'
    with pytest.raises(ConfigRefused) as caught:
        read_tokens(served(tmp_path, text))
    lines = caught.value.lines()
    assert f"rpc.tokens.2.file: {tmp_path}/c has mode 0644: accessible by others" in lines[0]
    assert "rpc.tokens: two callers have the same token" in lines[1]


def test_files_on_a_dead_mount_end_a_gateway_for_the_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exit status is 1, after which systemd tries again; after 78 it does not."""
    dead, genuine = tmp_path / "dead", os.open
    cert = f'tls-cert = "{dead}"\ntls-key = "{dead}"\n'
    listening = '[gateway]\nlisten = "127.0.0.1:7001"\n'
    token = f'[[rpc.tokens]]\nname = "a"\nfile = "{dead}"\nrole = "admin"\n'
    reads: dict[str, tuple[Callable[[FleetFile], object], str]] = {
        "rpc.tokens.0.file": (lambda s: read_tokens(rpc_settings(s)), listening + token),
        "gateway.tls-cert": (
            lambda s: build_endpoint(rpc_settings(s), "gateway"),
            listening + cert + token,
        ),
        "etcd-password-file": (
            lambda s: etcd_credentials(s.fleet),
            f'[fleet]\netcd-user = "n"\netcd-password-file = "{dead}"',
        ),
        "dead": (lambda s: etcd_credentials(s.fleet), f'[fleet]\nca = "{dead}"'),
    }

    def fail(path: Any, *arguments: Any, **options: Any) -> int:
        if path == dead:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(path))
        return genuine(path, *arguments, **options)

    monkeypatch.setattr(os, "open", fail)
    for where, (use, text) in reads.items():
        with pytest.raises(StartRefused, match=f"{where}.* cannot be read: Transport endpoint"):
            use(read(tmp_path, text))


def test_missing_etcd_credentials_are_refused(tmp_path: Path) -> None:
    login = f'[fleet]\netcd-user = "n"\netcd-password-file = "{tmp_path}/none"'
    with pytest.raises(ConfigRefused, match=r"etcd-password-file: .*cannot be read: No such file"):
        etcd_credentials(read(tmp_path, login).fleet)
    with pytest.raises(ConfigRefused, match=r"fleet\.ca: .*No such file"):
        etcd_credentials(read(tmp_path, f'[fleet]\nca = "{tmp_path}/none"').fleet)


def test_a_fifo_is_refused_wherever_a_file_is_named(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    why = f"{fifo} is a FIFO, expected a regular file"
    for text in (f'ca = "{fifo}"\n', f'cert = "{fifo}"\nkey = "{fifo}"\n'):
        with pytest.raises(ConfigRefused, match=re.escape(why)):
            etcd_credentials(read(tmp_path, f"[fleet]\n{text}").fleet)
    with pytest.raises(ConfigRefused, match="is a FIFO, expected a regular file"):
        load(str(fifo), {})
