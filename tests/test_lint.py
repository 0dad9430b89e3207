"""`tests/lint.py` finds what it looks for."""

import ast
from pathlib import Path

import pytest

from lint import page_breaches, source_breaches, structure_breaches, unknown_exceptions


@pytest.mark.parametrize(
    ("text", "breaches"),
    [
        ('"""Return it."""\n', 0),
        ('"""What it returns."""\n', 1),
        ('"""A tax is no fun."""\n', 1),
        ('"""It is no longer so, and there is no other."""\n', 0),
        ('"""The word `anew` is quoted."""\n', 0),
        ("x = 1  # for whoever reads it\n", 1),
        ('x = "keeper"\n', 0),
        ('x = "keeper.failed"\n', 1),
        ('x = "start it anew"\n', 1),
        ('X = 1\n"""How many there are."""\n', 1),
    ],
)
def test_forbidden_words_of_a_module_are_found(text: str, breaches: int) -> None:
    assert len(source_breaches(text, ast.parse(text))) == breaches


@pytest.mark.parametrize(
    ("raised", "breaches"),
    [("ValueError", 0), ("Known, web.HTTPError", 1), ("Renamed", 1), ("Renamed, Known", 1)],
)
def test_exceptions_of_docstrings_that_do_not_exist_are_found(raised: str, breaches: int) -> None:
    text = f'def f():\n    """Do it.\n\n    Raises:\n        {raised}: it fails.\n    """\n'
    assert len(list(unknown_exceptions(ast.parse(text), {"Known"}))) == breaches


GOOD = "There is no `keeper` here.\n\n```\n" + "anew " * 30 + "\n```\n\nIt is no longer so.\n"


@pytest.mark.parametrize(
    ("text", "breaches"),
    [
        ("", 0),
        ("It is no device.", 1),
        ("The books agree.", 1),
        ("# What it does", 1),
        ("x" * 101, 1),
        ("Is begun\nanew.", 1),
        (f"| a |\n|---|\n| {'x' * 201} |", 1),
    ],
)
def test_forbidden_words_and_long_lines_of_a_page_are_found(text: str, breaches: int) -> None:
    assert len(list(page_breaches(f"{GOOD}\n{text}\n"))) == breaches


@pytest.mark.parametrize(
    ("folder", "breaches"), [("services", 1), ("services/kernels", 1), ("rpc", 1), ("core", 0)]
)
def test_shared_attributes_of_services_are_found(folder: str, breaches: int) -> None:
    tree = ast.parse('"""A module."""\nself.shared = self._own = 1\n')
    assert len(list(structure_breaches(Path(folder, "module.py"), tree))) == breaches
