"""Measure the size of `src/` and fail if a limit is exceeded (`make sizes`).

The limits keep the source readable: total lines, lines of a module and of a function, places where
the formatter is off, uses of the name `Any`, and duplicated passages.
"""

from __future__ import annotations

import ast
import io
import keyword
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "atoll"
LIMITS = {
    "lines of source": 48_100,
    "places where the formatter is off": 20,
    "modules above 500 lines": 0,
    "functions above 60 lines": 0,
    "uses of the name Any": 249,
    "pairs of places that share six lines": 40,
}
KERNELS = "kernels"
"""GPU kernels may be long and similar, because Triton compiles one function at a time."""
SHARED = 6
TOKENS = 28
"""Six lines with fewer tokens are punctuation and short arguments, not a passage."""
COMMON = 8
"""A passage in more places than this is an idiom, not a copy."""


def main() -> int:
    """Print every measure and its limit. The exit code is 1 if a limit is exceeded."""
    files = sorted(SOURCE.rglob("*.py"))
    text = {path: path.read_text(encoding="utf-8") for path in files}
    trees = {path: ast.parse(source) for path, source in text.items()}
    found = {
        "lines of source": [str(path) for path in files for _ in text[path].splitlines()],
        "places where the formatter is off": _formatter_off(text),
        "modules above 500 lines": [
            f"{_short(path)} {len(source.splitlines())}"
            for path, source in text.items()
            if len(source.splitlines()) > 500 and KERNELS not in path.parts
        ],
        "functions above 60 lines": _long_functions(trees),
        "uses of the name Any": [
            f"{_short(path)}:{node.lineno}"
            for path, tree in trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and node.id == "Any"
        ],
        "pairs of places that share six lines": _pairs(text),
    }
    exceeded = False
    for name, limit in LIMITS.items():
        count = len(found[name])
        over = count > limit
        exceeded |= over
        print(f"{name:40} {count:7,}   limit {limit:7,}{'   EXCEEDED' if over else ''}")
        if over and name != "lines of source" and "-v" in sys.argv:
            print("".join(f"    {place}\n" for place in found[name]), end="")
    _print_rooms(text)
    return int(exceeded)


def _short(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def _print_rooms(text: dict[Path, str]) -> None:
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for path, source in text.items():
        room = path.relative_to(SOURCE).parts[0] if path.parent != SOURCE else "(top)"
        rooms[room][0] += 1
        rooms[room][1] += len(source.splitlines())
    print("\nroom            modules    lines")
    for room, (modules, lines) in sorted(rooms.items()):
        print(f"{room:15} {modules:7} {lines:8,}")


def _formatter_off(text: dict[Path, str]) -> list[str]:
    return [
        f"{_short(path)}:{number}"
        for path, source in text.items()
        for number, line in enumerate(source.splitlines(), 1)
        if re.search(r"#\s*fmt:\s*(skip|off)", line)
    ]


def _long_functions(trees: dict[Path, ast.Module]) -> list[str]:
    return [
        f"{_short(path)} {node.name} {node.end_lineno - node.lineno + 1}"
        for path, tree in trees.items()
        if KERNELS not in path.parts
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > 60
    ]


def _shapes(source: str) -> list[tuple[int, str]]:
    """Return the shape of each relevant line, in which names, strings and numbers are equal."""
    lines: dict[int, list[str]] = defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING:
            word = "S"
        elif token.type == tokenize.NUMBER:
            word = "0"
        elif token.type == tokenize.NAME:
            word = token.string if keyword.iskeyword(token.string) else "n"
        elif token.type == tokenize.OP:
            word = token.string
        else:
            continue
        lines[token.start[0]].append(word)
    shapes = ((number, " ".join(words)) for number, words in sorted(lines.items()))
    return [(number, shape) for number, shape in shapes if _counts(shape)]


def _counts(shape: str) -> bool:
    """Whether a line is no import, no punctuation and no text of a docstring."""
    return shape != "S" and bool(re.search(r"\w", shape)) and not re.match(r"(from|import) ", shape)


def _pairs(text: dict[Path, str]) -> list[str]:
    """Return pairs of places with the same shape over at least six lines."""
    places: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    numbers: dict[Path, list[int]] = {}
    for path, source in text.items():
        if KERNELS in path.parts:
            continue
        shapes = _shapes(source)
        numbers[path] = [number for number, _ in shapes]
        words = [shape for _, shape in shapes]
        for start in range(len(words) - SHARED + 1):
            window = tuple(words[start : start + SHARED])
            if sum(len(shape.split()) for shape in window) >= TOKENS:
                places[window].append((path, start))
    starts: set[tuple[Path, int, Path, int]] = set()
    for found in places.values():
        if 1 < len(found) <= COMMON:
            starts |= {(*one, *other) for one, other in combinations(found, 2)}
    longest: dict[tuple[Path, Path], str] = {}
    for a, i, b, j in sorted(_runs(starts)):
        longest.setdefault((a, b), f"{_short(a)}:{numbers[a][i]} ~ {_short(b)}:{numbers[b][j]}")
    return list(longest.values())


def _runs(starts: set[tuple[Path, int, Path, int]]) -> Iterator[tuple[Path, int, Path, int]]:
    """Yield the first window of every shared passage. Overlapping passages count as one place."""
    for a, i, b, j in starts:
        overlaps = a == b and abs(i - j) < SHARED
        if not overlaps and (a, i - 1, b, j - 1) not in starts:
            yield a, i, b, j


if __name__ == "__main__":
    sys.exit(main())
