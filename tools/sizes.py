"""Sizes: the largest files, functions and classes of the package. To look at, not a gate."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

SHOWN = 12


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "naught")
    files: list[tuple[int, str]] = []
    functions: list[tuple[int, str]] = []
    classes: list[tuple[int, str]] = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        files.append((text.count("\n"), str(path)))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append((_lines(node), f"{path}:{node.lineno} {node.name}"))
            elif isinstance(node, ast.ClassDef):
                methods = sum(isinstance(member, ast.FunctionDef) for member in node.body)
                classes.append((_lines(node), f"{path}:{node.lineno} {node.name} ({methods} methods)"))
    _show(f"files ({len(files)}, {sum(lines for lines, _ in files)} lines)", files, len(files))
    _show(f"functions ({len(functions)})", functions, SHOWN)
    _show(f"classes ({len(classes)})", classes, SHOWN)


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """Source lines less the docstring."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def _show(title: str, found: list[tuple[int, str]], most: int) -> None:
    print(title)
    for lines, name in sorted(found, reverse=True)[:most]:
        print(f"  {lines:5}  {name}")


if __name__ == "__main__":
    main()
