"""The size of the code: `python tests/code_size.py [ROOT]` prints figures of a checkout as JSON.

Lines are those of `ast.unparse` without docstrings, so that layout and prose do not count.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

SOURCES = ("src", "fleet/src", "plugins/*/src", "engines/*/src")


class _WithoutDocstrings(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [item for item in body if not _is_text(item)]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
        return node


def _is_text(node: ast.AST) -> bool:
    is_expression = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_expression and isinstance(node.value.value, str)  # type: ignore[attr-defined]


def modules_of(root: Path) -> dict[str, str]:
    """Return the text of each module by its dotted name."""
    found = {}
    for pattern in SOURCES:
        for folder in sorted(root.glob(pattern)):
            for path in sorted(folder.rglob("*.py")):
                name = ".".join(path.relative_to(folder).with_suffix("").parts)
                found[name.removesuffix(".__init__")] = path.read_text()
    return found


def class_names(modules: dict[str, str]) -> Counter[str]:
    """Return how often each class name is defined."""
    found = (re.findall(r"^ *class (\w+)[(:]", text, re.MULTILINE) for text in modules.values())
    return Counter(name for names in found for name in names)


def figures(root: Path) -> dict[str, Any]:
    """Return lines, modules, classes, names that stand twice, and dependencies of packages."""
    texts = modules_of(root)
    classes = class_names(texts)
    modules = {name: ast.parse(text) for name, text in texts.items()}
    edges = set()
    for name, tree in modules.items():
        package = name.rpartition(".")[0] or name
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                edges.add((package, node.module.rpartition(".")[0] or node.module))
    lines = 0
    for tree in modules.values():
        lines += ast.unparse(_WithoutDocstrings().visit(tree)).count("\n") + 1
    return {
        "lines": lines,
        "modules": len(modules),
        "classes": sum(classes.values()),
        "names_twice": sorted(name for name, count in classes.items() if count > 1),
        "package_dependencies": len({edge for edge in edges if edge[0] != edge[1]}),
    }


if __name__ == "__main__":
    print(json.dumps(figures(Path(sys.argv[1] if len(sys.argv) > 1 else ".")), indent=1))
