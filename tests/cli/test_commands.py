"""The commands as a person types them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentd.cli.agentctl.options import event_line
from support import fork_server
from support.daemon import AGENTS, Daemon, gpus

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]


def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = fork_server.run(*words)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def ctl(daemon: Daemon, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    return run("agentctl", "--socket", str(daemon.folder / "agentd.sock"), *words, code=code)


async def test_a_day_with_agentctl(up: Daemon) -> None:
    assert "runtime process: available" in ctl(up, "status").stdout
    made = ctl(up, "create", "agent-1", "--id", "k1", "-s", "cuda.device=1", "-e", "A=b", "--json",
               "--", "sh", "-c", "echo $A; exec sleep 1000")  # fmt: skip
    assert json.loads(made.stdout)["state"] == "running"
    assert "cuda cuda0" in ctl(up, "ls").stdout
    assert "k1" in ctl(up, "ls", "--agent", "agent-1").stdout
    assert "k1" not in ctl(up, "ls", "--agent", "agent-2").stdout
    assert "k1=1" in ctl(up, "devices").stdout
    assert "cuda cuda0-cuda1" in ctl(up, "agents").stdout
    assert "cuda.device" in ctl(up, "slots").stdout
    assert "agent-1" in ctl(up, "inspect", "k1").stdout
    assert ctl(up, "logs", "k1").stdout == "b\n"
    assert "given" in ctl(up, "create", "agent-1", "--dry-run", "--", "true").stdout.lower()
    assert "not needed" in ctl(up, "explain", "agent-1", "-s", "cpu=1").stdout
    again = ["create", "agent-1", "--id", "k1", "-s", "cuda.device=1", "-e", "A=b", "--dry-run"]
    assert "k1" in ctl(up, *again, "--", "sh", "-c", "echo $A; exec sleep 1000").stdout
    refused = ctl(up, "explain", "agent-1", "-s", "cuda.device=2", code=1)
    assert "held by k1" in refused.stdout
    assert "InsufficientResource" in refused.stderr
    assert "drained" in ctl(up, "drain", "cuda1").stdout
    assert "ok" in ctl(up, "undrain", "cuda/cuda1").stdout
    assert "terminated" in ctl(up, "stop", "k1", "--timeout", "0").stdout
    assert ctl(up, "rm", "k1").stdout == "k1\n"
    for words in (["status"], ["devices"], ["agents"], ["slots"], ["ls"]):
        json.loads(ctl(up, *words, "--json").stdout)


async def test_an_error_is_one_line_with_the_problem_s_detail(up: Daemon) -> None:
    done = ctl(up, "create", "agent-1", "-s", "tpu.chip=1", "--", "true", code=1)
    assert done.stderr.startswith("agentctl: UnsupportedResource: unknown slots: tpu.chip")
    assert done.stderr.count("\n") == 1
    as_json = ctl(up, "inspect", "nobody", "--json", code=1)
    assert json.loads(as_json.stderr)["code"] == "UnknownKernel"
    ctl(up, "forget", "nothing", code=1)
    ctl(up, "create", "agent-1", "-s", "cpu", "--", "true", code=2)


def test_no_daemon_is_one_line(tmp_path: Path) -> None:
    done = run("agentctl", "--socket", str(tmp_path / "none"), "status", code=1)
    assert "No such file or directory" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture
def config(folder: Path) -> Path:
    daemon = Daemon(folder, "process")
    daemon.configure(
        '[resource]\nallocation-mode = "auto-split"\nreserved-cpu = 1\nreserved-mem = "1g"\n'
        + AGENTS + '[[agents]]\nid = "agent-3"\n' + gpus(5)
    )  # fmt: skip
    return daemon.config_file


def test_the_plan_is_printed_as_the_design_says(config: Path) -> None:
    plan = json.loads(run("agentd", "plan", "--config", str(config), "--json").stdout)
    assert plan["allocation_mode"] == "auto-split"
    assert plan["agents"]["agent-1"] == {
        "devices": {"cpu": ["1", "2", "3"], "cuda": ["cuda0", "cuda1"]},
        "slots": {"cpu": "3", "mem": str(150 * 2**24), "cuda.device": "2"},
        "scaling_factors": {"cpu": "0.428571", "mem": "0.334821", "cuda.device": "0.4"},
    }
    assert plan["agents"]["agent-3"]["devices"]["cuda"] == ["cuda4"]
    assert plan["reserved"] == {"cpu": ["0"], "mem": str(2**30)}
    assert plan["unassigned"] == {}
    assert plan["warnings"] == []
    assert "cuda0-cuda1" in run("agentd", "plan", "--config", str(config)).stdout


def test_plan_exits_78_with_all_reasons_when_impossible(config: Path) -> None:
    text = config.read_text().replace('"auto-split"', '"manual"')
    config.write_text(text)
    for command in ("plan", "check-config", "run"):
        done = run("agentd", command, "--config", str(config), code=78)
        lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
        assert len([line for line in lines if "has no [agents.resource]" in line]) == 3
        assert all(str(config) in line for line in lines)


async def test_a_plan_tells_what_running_kernels_would_leave_held(up: Daemon) -> None:
    await up.running(kernel_id="k1", slots={"cuda.device": 1})
    up.config_file.write_text(up.config_file.read_text().replace('"device"', '"shares"'))
    done = run("agentd", "plan", "--config", str(up.config_file), "--live", "--json")
    (row,) = json.loads(done.stdout)["held"]
    assert (row["device"], row["kernel_id"], row["slot"]) == ("cuda/cuda0", "k1", "cuda.device")
    assert "would offer cuda.shares" in row["reason"]


def test_a_live_plan_without_a_daemon_is_still_a_plan(config: Path) -> None:
    plan = json.loads(run("agentd", "plan", "--config", str(config), "--live", "--json").stdout)
    assert plan["agents"]
    assert "what kernels hold is not known" in plan["warnings"][-1]


def test_plugins_are_listed_with_their_state(config: Path) -> None:
    rows = json.loads(run("agentd", "plugins", "--config", str(config), "--json").stdout)
    states = {row["name"]: row["state"] for row in rows}
    assert (states["cuda"], states["sim"], states["generic"]) == ("ready", "blocked", "blocked")
    assert "needs a table" in run("agentd", "plugins", "--config", str(config)).stdout


def test_the_configuration_is_written_shown_and_changed(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    run("agentd", "config", "init", str(path))
    schema = run("agentd", "config", "schema", "--path").stdout
    default = (ROOT / "configs" / "agent.toml").read_text()
    assert path.read_text() == f"#:schema {schema}{default}"
    assert json.loads(Path(schema.strip()).read_text())["title"] == "agent.toml"
    printed = json.loads(run("agentd", "config", "schema").stdout)
    assert "count" in printed["definitions"]["plugin-sim"]["properties"]
    run("agentd", "config", "init", str(path), code=1)
    run("agentd", "config", "set", "--config", str(path), "node.id", "node-7")
    shown = json.loads(run("agentd", "config", "show", "--config", str(path), "--json").stdout)
    assert shown["node.id"] == {"value": "node-7", "origin": str(path)}
    assert shown["host.cpus"] == {"value": None, "origin": "default"}
    before = path.read_text()
    bad = run("agentd", "config", "set", "--config", str(path), "node.runtime", "x", code=78)
    assert "node.runtime" in bad.stderr
    assert path.read_text() == before


def test_a_missing_configuration_is_one_line(tmp_path: Path) -> None:
    done = run("agentd", "run", "--config", str(tmp_path / "none.toml"), code=78)
    assert (
        done.stderr == f"agentd: {tmp_path}/none.toml: cannot be read: No such file or directory\n"
    )


async def test_each_kernel_is_seen_to_and_what_fails_is_said(up: Daemon) -> None:
    for kernel in ("a", "b"):
        ctl(up, "create", "agent-1", "--id", kernel, "--", "sleep", "1000")
    inspected = ctl(up, "inspect", "nosuch", "a", "b", "--json", code=1)
    assert [kernel["kernel_id"] for kernel in json.loads(inspected.stdout)] == ["a", "b"]
    stopped = ctl(up, "stop", "a", "nosuch", "--timeout", "0", code=1)
    assert "terminated" in stopped.stdout
    assert "nosuch" in stopped.stderr
    waited = ctl(up, "wait", "nosuch", "a", code=1)
    assert (waited.stdout, waited.stderr.count("nosuch")) == ("a\n", 1)
    removed = ctl(up, "rm", "a", "nosuch", "b", code=1)
    assert removed.stdout == "a\nb\n"
    assert "UnknownKernel" in removed.stderr
    assert json.loads(ctl(up, "ls", "--json").stdout) == []


async def test_a_refused_create_says_why_of_each_device(up: Daemon) -> None:
    refused = ctl(up, "create", "agent-1", "-s", "cuda.device=5", "--", "true", code=1)
    assert "cuda0" in refused.stderr
    assert "has 1 of the 5" in refused.stderr
    assert "in total); this can never fit" in refused.stderr
    other = ctl(up, "create", "agent-1", "--device", "cuda=cuda0", "--", "true", code=1)
    assert "no slot of cuda is requested" in other.stderr


def test_an_event_is_a_line_with_agent_exit_code_and_caller() -> None:
    kernel = {"kernel_id": "k1", "agent_id": "a", "state": "terminated", "exit_code": 0}
    assert event_line("kernel", kernel) == "kernel k1 of a terminated exit code 0"
    audit = {"kernel_id": "k1", "agent_id": "a", "action": "create_kernel", "caller": "alice"}
    line = event_line("audit", {**audit, "outcome": "201"})
    assert line == "audit k1 of a create_kernel by alice 201"
    refusal = {"kernel_id": "k1", "agent_id": "a", "caller": "alice", "code": "UnknownImage"}
    line = event_line("refusal", {**refusal, "detail": "no such image"})
    assert line == "refusal k1 of a by alice UnknownImage no such image"
    condition = {"about": "device/cuda/cuda3", "reason": "cuda3 is gone", "remedy": "", "since": ""}
    line = event_line("condition", condition)
    assert line == "condition device/cuda/cuda3 cuda3 is gone"


async def test_daemon_starts_without_a_service_manager(folder: Path) -> None:
    daemon = Daemon(folder, "process")
    daemon.configure()
    daemon.process = daemon.spawn(NOTIFY_SOCKET="")
    await daemon.until_logged("daemon.ready")
    assert (await daemon.get("/v1/node"))["warnings"] == []
    assert await daemon.stop() == 0
    assert '"level": "error"' not in daemon.log


@pytest.mark.parametrize(
    ("words", "status", "exit_code"),
    [(["k1"], 0, 15), (["k1", "usr1"], 0, 10), (["k1", "STOP"], 2, None), (["none"], 1, None)],
    ids=["default", "by-name", "not-allowed", "unknown-kernel"],
)
async def test_signal_goes_to_the_named_kernel(
    up: Daemon, words: list[str], status: int, exit_code: int | None
) -> None:
    script = "trap 'exit 15' TERM; trap 'exit 10' USR1"
    await up.trapping(script, kernel_id="k1")
    assert ctl(up, "signal", *words, code=status).stdout == ""
    if exit_code is None:
        assert (await up.get("/v1/kernels/k1"))["state"] == "running"
        return
    ctl(up, "wait", "k1")
    assert (await up.get("/v1/kernels/k1"))["exit_code"] == exit_code
    assert "k1 is terminated, expected running" in ctl(up, "signal", "k1", code=1).stderr


async def test_top_lists_what_runs_and_stats_what_has_run(up: Daemon) -> None:
    await up.running(kernel_id="runs")
    await up.running(kernel_id="ended")
    await up.call("POST", "/v1/kernels/ended/stop", {"timeout": 0})
    shown = ctl(up, "top", "--count", "1", "--interval", "1.1").stdout
    assert "runs" in shown
    assert "ended" not in shown
    assert "ended" in ctl(up, "stats").stdout


def test_a_plan_with_limits_shows_each_agent_what_it_may_have(tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(
        f"""[node]
state-dir = "{tmp_path}/state"
runtime = "process"
[plugins.npu]
plugin = "sim"
count = 1
mode = "shares"
[[agents]]
id = "team-a"
resource.limits = {{ npu = "0.25", mem = "1g" }}
[[agents]]
id = "team-b"
resource.limits = {{ npu = "0.75" }}
"""
    )
    lines = run("agentd", "plan", "--config", str(config)).stdout.splitlines()
    assert any(
        "team-a" in line and "npu.shares=0.25" in line and "mem=1G" in line for line in lines
    )
    assert any("team-b" in line and "npu.shares=0.75" in line for line in lines)


async def test_what_others_write_is_shown_and_not_obeyed(up: Daemon) -> None:
    """Input from other teams, or mistyped: escape codes, and bytes that are not UTF-8."""
    red = "\x1b[31mred\x9b"
    await up.running(kernel_id="k1", labels={"a": red}, env={red: "x"})
    for words in (["inspect", "k1"], ["ls", "-o", "wide"], ["ls", "-o", "json"]):
        printed = ctl(up, *words).stdout
        assert "red" in printed
        assert printed.replace("\n", "").isprintable()
    assert ctl(up, "ls", "--label", "a=\udc9b").stdout.count("\n") == 2, "no kernel has it"
    for words in (
        ["explain", "agent-1", "-s", f"{red}=1"],
        ["inspect", "\udc9b"],
        ["create", "agent-1", "-e", "A=\udc9b", "--", "x"],
    ):
        said = ctl(up, *words, code=1).stderr
        assert said.startswith("agentctl: ")
        assert "\n" not in said.rstrip("\n")
        assert said.replace("\n", "").isprintable()
