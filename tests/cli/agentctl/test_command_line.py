"""Where the options of `agentctl` end, and the words of the caller's command begin."""

from collections.abc import Iterator, Sequence

import click
import pytest
from click.testing import CliRunner

from agentd.cli.agentctl.main import agentctl
from agentd.cli.agentctl.options import CommandLine

WORDS = ["train", "--env", "a=b", "-s", "1", "--label=x", "--id", "--unknown", "-h", "--", "--help"]
"""The words of a command, with options that agentctl has, too."""
PARAMETERS = ("kernel", "command", "tty", "env", "workdir")
Parsed = tuple[str, Sequence[str], bool, Sequence[str], str]


@click.command(cls=CommandLine)
@click.argument("kernel")
@click.argument("command", nargs=-1, required=True)
@click.option("--tty", "-t", is_flag=True)
@click.option("--env", "-e", multiple=True)
@click.option("--workdir", default="")
def with_argument(**values: object) -> None:
    click.echo(repr(tuple(values[name] for name in PARAMETERS)))


@click.command(cls=CommandLine)
@click.argument("command", nargs=-1)
@click.option("--tty", "-t", is_flag=True)
def without_argument(command: Sequence[str], tty: bool) -> None:
    click.echo(repr((command, tty)))


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")


COMMANDS = {
    path: command
    for path, command in commands(agentctl)
    if any(each.name == "command" for each in command.params)
}
"""The commands that end with another one."""


def words(line: str) -> list[str]:
    return line.split()


@pytest.mark.parametrize(
    ("line", "parsed"),
    [
        ("k sh", ("k", ("sh",), False, (), "")),
        ("k grep -t foo", ("k", ("grep", "-t", "foo"), False, (), "")),
        ("k grep -e foo --help", ("k", ("grep", "-e", "foo", "--help"), False, (), "")),
        ("k -t grep -t foo", ("k", ("grep", "-t", "foo"), True, (), "")),
        ("-t k grep -t foo", ("k", ("grep", "-t", "foo"), True, (), "")),
        ("-e a=b k -te c=d grep -e x", ("k", ("grep", "-e", "x"), True, ("a=b", "c=d"), "")),
        ("--workdir=/a k --env=a=b sh", ("k", ("sh",), False, ("a=b",), "/a")),
        ("--workdir k k sh", ("k", ("sh",), False, (), "k")),
        ("k -- -t", ("k", ("-t",), False, (), "")),
        ("k -t -- -t", ("k", ("-t",), True, (), "")),
        ("-- k -t sh", ("k", ("-t", "sh"), False, (), "")),
        ("-t -- k -- sh", ("k", ("--", "sh"), True, (), "")),
        ("k -- -- sh", ("k", ("--", "sh"), False, (), "")),
        ("k echo -- -t", ("k", ("echo", "--", "-t"), False, (), "")),
        ("k - -t", ("k", ("-", "-t"), False, (), "")),
    ],
)
def test_options_end_at_the_command(line: str, parsed: Parsed) -> None:
    done = CliRunner().invoke(with_argument, words(line))
    assert (done.exit_code, done.output) == (0, f"{parsed!r}\n")


@pytest.mark.parametrize(
    ("line", "parsed"),
    [
        ("sh -t", (("sh", "-t"), False)),
        ("-t sh -t", (("sh", "-t"), True)),
        ("-t -- -t", (("-t",), True)),
        ("", ((), False)),
    ],
)
def test_options_end_at_a_command_without_argument(line: str, parsed: object) -> None:
    done = CliRunner().invoke(without_argument, words(line))
    assert (done.exit_code, done.output) == (0, f"{parsed!r}\n")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "Missing argument 'KERNEL'"),
        ("k", "Missing argument 'COMMAND...'"),
        ("k --no-such sh", "No such option '--no-such'"),
        ("k --workdir", "Option '--workdir' requires an argument"),
    ],
)
def test_wrong_words_are_wrong_usage(line: str, problem: str) -> None:
    done = CliRunner().invoke(with_argument, words(line))
    assert done.exit_code == 2
    assert problem.lower().replace(":", "") in done.output.lower().replace(":", "")


@pytest.mark.parametrize("path", COMMANDS)
def test_command_of_the_caller_has_all_its_words(path: str) -> None:
    command = COMMANDS[path]
    first = [each for each in command.params if isinstance(each, click.Argument)][:-1]
    repeatable = next(each for each in command.params if getattr(each, "multiple", False))
    for options in ([], [repeatable.opts[-1], "a=b"]):
        front = [*options, *(str(each.name) for each in first), *options]
        context = command.make_context(path, [*front, *WORDS])
        assert [*context.params["command"]] == WORDS


def test_commands_that_end_with_another_are_known() -> None:
    assert sorted(COMMANDS) == ["claim", "create", "exec", "fleet create", "fleet exec", "run"]


@pytest.mark.parametrize(
    ("line", "completes"),
    [
        ("exec -", True),
        ("exec k1 -", True),
        ("exec k1 -t -", True),
        ("exec k1 grep -", False),
        ("exec k1 -- -", False),
        ("fleet create grep -", False),
        ("create a -s x=1 -", True),
        ("create a train --id -", False),
        ("--socket /a --url http://n:1 ls -", True),
        ("--fleet unix:/a drain -", True),
        ("--url nan ls -", True),
    ],
)
def test_options_are_completed_before_the_command(line: str, completes: bool) -> None:
    environ = {"_AGENTCTL_COMPLETE": "bash_complete", "COMP_WORDS": f"agentctl {line}"}
    environ |= {"COMP_CWORD": str(len(line.split()))}
    done = CliRunner(env=environ).invoke(agentctl, prog_name="agentctl")
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert ("plain,-" in done.output) == completes, done.output
