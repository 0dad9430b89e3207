"""Whatever strangers put on a package index: what is installed is ours, or nothing is."""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from agentd import __version__

ROOT = Path(__file__).parents[1]
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
STRANGERS = ("agentd", "agentd-cuda", "agentd-rocm", "agentd-generic", "agentd-sim")
"""Names that are somebody else's, or could be."""


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def put_wheel(index: Path, name: str, version: str, requires: Iterable[str] = ()) -> None:
    """Put a distribution without content on an index."""
    stem = name.replace("-", "_")
    needs = "".join(f"Requires-Dist: {item}\n" for item in requires)
    info = f"{stem}-{version}.dist-info"
    with zipfile.ZipFile(index / f"{stem}-{version}-py3-none-any.whl", "w") as wheel:
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """An index with strangers under the old names, and with everybody else's libraries."""
    for name in STRANGERS:
        put_wheel(tmp_path, name, "9.9")
    needed = [item for folder in (ROOT, *PLUGINS) for item in project(folder)["dependencies"]]
    for name in {re.split(r"[<>=]", item)[0] for item in needed} - {"agentd-node"}:
        put_wheel(tmp_path, name, "999")
    return tmp_path


def publish(index: Path, folder: Path, version: str = "0.2.0") -> str:
    found = project(folder)
    put_wheel(index, found["name"], version, found["dependencies"])
    return found["name"]


def resolved(index: Path, *names: str) -> dict[str, str] | None:
    """Return the packages that pip would install, by name; None if it refuses."""
    command = [
        sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed",
        "--no-index", "--find-links", index, "--report", "-", "--isolated", *names,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    found = json.loads(done.stdout)["install"]
    return {item["metadata"]["name"]: item["metadata"]["version"] for item in found}


def test_every_plugin_needs_this_project_s_daemon_within_bounds() -> None:
    assert project(ROOT)["name"] == "agentd-node"
    for folder in PLUGINS:
        found = project(folder)
        assert found["name"] == f"agentd-plugin-{folder.name}"
        assert found["dependencies"][0] == "agentd-node>=0.2,<0.3"
        assert not {re.split(r"[<>=]", item)[0] for item in found["dependencies"]} & {*STRANGERS}


def test_plugin_installs_agentd_node_and_no_foreign_package(index: Path) -> None:
    publish(index, ROOT)
    names = [publish(index, folder) for folder in PLUGINS]
    found = resolved(index, *names)
    assert found is not None
    assert found["agentd-node"] == "0.2.0"
    assert not found.keys() & {*STRANGERS}


def test_plugin_cannot_be_installed_without_agentd_node(index: Path) -> None:
    names = [publish(index, folder) for folder in PLUGINS]
    assert all(resolved(index, name) is None for name in names)


def test_plugin_installs_no_agentd_node_beyond_its_bound(index: Path) -> None:
    publish(index, ROOT)
    publish(index, ROOT, "0.3.0")
    name = publish(index, PLUGINS[0])
    found = resolved(index, name)
    assert found is not None
    assert found["agentd-node"] == "0.2.0"


def test_distributions_have_the_names_that_are_declared(tmp_path: Path) -> None:
    """The metadata of the installed project, which setuptools made of the declaration."""
    from importlib.metadata import distribution

    node = distribution("agentd-node")
    assert node.version == "0.2.0"
    assert {point.name for point in node.entry_points} == {"agentd", "agentctl"}
    for folder in PLUGINS:
        plugin = distribution(f"agentd-plugin-{folder.name}")
        assert "agentd-node<0.3,>=0.2" in [item.replace(" ", "") for item in plugin.requires or ()]


def test_every_distribution_has_the_version_of_one_file() -> None:
    version = (ROOT / "src/agentd/VERSION").read_text().strip()
    assert __version__ == version
    for folder in (*PLUGINS, ROOT / "fleet"):
        assert (folder / "VERSION").resolve() == ROOT / "src/agentd/VERSION"
        content = tomllib.loads((folder / "pyproject.toml").read_text())
        assert content["project"]["dynamic"] == ["version"]
        assert content["tool"]["setuptools"]["dynamic"] == {"version": {"file": "VERSION"}}
        (bounds,) = [
            requirement
            for item in content["project"]["dependencies"]
            if (requirement := Requirement(item)).name == "agentd-node"
        ]
        assert version in bounds.specifier
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert content["project"]["dynamic"] == ["version"]
    assert content["tool"]["setuptools"]["dynamic"]["version"] == {"file": "src/agentd/VERSION"}
