"""Check the English of the repository, as part of `make check`.

Each phrase below has a plainer form. In Markdown pages a line has at most 120 characters, and a
sentence at most 25 words. The first line of a docstring is one statement that starts with a noun or
a verb, and a sentence of a docstring has at most 30 words. The phrases of pages also count in
comments and texts of Python files (help, errors, tables), and in files such as SVG and HTML.

`python tools/english.py PATH ...` checks only these paths.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = (".py", ".md", ".toml", ".css", ".js", ".yaml", ".html", ".svg", ".ipynb", ".cff", ".sh")
KINDS += (".service", ".txt", "Makefile", "Dockerfile")
SKIPPED = (
    "docs/commands.md",  # generated from the commands, whose text is checked in the source
    "tests/compat/old/",
    "tools/english.py",
    "tests/tools/test_english.py",
)
LINE, WORDS, DOCSTRING_WORDS = 120, 25, 30
PLAINER = {
    r"\bgo(es)? on\b": "continue",
    r"\bhears? (of|about)\b": "is notified of",
    r"\bsays? so\b": "report",
    r"\bof its own\b": "separate, or its own",
    r"\bas it is\b": "unchanged",
    r"\bwhat became of\b": "the state of",
    r"\b(is|are) told\b": "is reported",
    r"\btold from\b": "distinguishable from",
    r"\ba clear word\b": "a clear error",
    r"\bfor people\b": "human-readable",
    r"\b(nobody|somebody)\b": "name the party",
    r"\bwho is alike\b": "which clients are alike",
    r"\bwhat (it|they|is|are|was|were) [a-z]+ (is|are|was|were)\b": "a noun",
}
IN_PAGES = {
    r"\balone\b": "only, or by itself",
    r"\bin place of\b": "instead of",
    r"\b(whoever|everybody)\b": "name the party",
    r"\bof (yours|ours|theirs|hers)\b": "your, our, their",
    r"\bwithin the noise\b": "too few seeds to tell",
    r"^(What|Who|Whose) [^?]* (is|are|was|were) [^?]*\.$": "the thing that acts as the subject",
}

SUMMARY = {
    r"^(What|Who|Whose|Which)\b": "a noun or a verb",
    r";": "two sentences",
}


def git(*words: str) -> str:
    """The output of a git command."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def findings(*paths: str) -> list[str]:
    """Return every fault with its place, in `paths` only if any are given."""
    found = []
    listed = git("ls-files", "--cached", "--others", "--exclude-standard", *paths).splitlines()
    for name in dict.fromkeys(listed):  # a file in conflict is listed several times
        path = ROOT / name
        if not name.endswith(KINDS) or name.startswith(SKIPPED) or not path.is_file():
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            found += [f"{name}:{number}: {fault}" for fault in phrases(line, PLAINER)]
        for check in CHECKS.get(path.suffix, [other_faults]):
            found += [f"{name}:{number}: {fault}" for number, fault in check(lines)]
    return found


def phrases(text: str, plainer: dict[str, str]) -> list[str]:
    """Return the phrases of a text that have a plainer form."""
    return [
        f"'{match.group()[:60]}': write '{better}'"
        for pattern, better in plainer.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]


def page_faults(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield long lines, long sentences and bad phrases of a page, outside blocks and tables."""
    for number, line in text_lines(lines):
        if len(line) > LINE:
            yield number, f"{len(line)} characters; break the line where a sentence or clause ends"
    for number, sentence in sentences(lines):
        if (count := len(sentence.split())) > WORDS:
            yield number, f"a sentence of {count} words: '{sentence[:50]} ...'"
        for fault in phrases(sentence, IN_PAGES):
            yield number, fault


def docstring_faults(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield bad first lines, long sentences and bad phrases in the docstrings of a module."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(ast.parse("\n".join(lines))):
        if not isinstance(node, kinds) or ast.get_docstring(node) is None:
            continue
        text, first = node.body[0].value.value.splitlines(), node.body[0].lineno
        for fault in phrases(re.sub(r"`[^`]*`", "`", text[0]), SUMMARY):
            yield first, fault
        for number, sentence in sentences(text):
            if (count := len(sentence.split())) > DOCSTRING_WORDS:
                yield first + number - 1, f"a sentence of {count} words: '{sentence[:50]} ...'"
            for fault in phrases(sentence, IN_PAGES):
                yield first + number - 1, fault


def text_faults(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield bad phrases in the comments and texts of a module, except docstrings and `code`.

    A single word may be a name, so it is no text.
    """
    tree, texts = ast.parse("\n".join(lines)), list[tuple[int, str]]()
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and " " in node.value and id(node) not in docstrings:
            texts.append((node.lineno, node.value))
    source = iter([f"{line}\n" for line in lines])
    for token in tokenize.generate_tokens(lambda: next(source, "")):
        if token.type == tokenize.COMMENT:
            texts.append((token.start[0], token.string.lstrip("# ")))
    for number, text in texts:
        for fault in phrases(re.sub(r"`[^`]*`", "`", text), IN_PAGES):
            yield number, fault


def other_faults(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield bad phrases in the lines of a file of another kind."""
    for number, line in enumerate(lines, 1):
        for fault in phrases(line, IN_PAGES):
            yield number, fault


def text_lines(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page outside fenced blocks, tables, comments and directives."""
    fenced, other = False, re.compile(r"\s*(\||<|>>>|:::|--8<--|options:|members:)")
    for number, line in enumerate(lines, 1):
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        if not (fence or fenced or other.match(line)):
            yield number, line


def sentences(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield each sentence with its first line. Code and link targets do not count as words."""
    begin, text, last = 0, "", 0
    for number, line in [*text_lines(lines), (0, "")]:
        new = not line.strip() or number != last + 1 or re.match(r"\s*([-#!]|\d+\.) ?", line)
        last = number
        if new and text:
            yield begin, text
            text = ""
        begin = begin if text else number
        plain = re.sub(r"`[^`]*`", "`", re.sub(r"^\s*([-#]+|\d+[.])\s", "", line))
        plain = re.sub(r"!?\[([^]]*)\]\([^)]*\)(\{[^}]*\})?", r"\1", plain)
        *ended, text = re.split(r"(?<=[.?!:])\**\s+", f"{text} {plain.strip()}".strip())
        for sentence in ended:
            yield begin, sentence
            begin = number


CHECKS = {
    ".md": [page_faults],
    ".py": [docstring_faults, text_faults],
    **dict.fromkeys((".toml", ".css", ".js", ".yaml"), ()),
}
"""The checks of each kind of file, besides PLAINER."""


def main() -> int:
    """Print the faults. The exit code is 1 if there are any."""
    found = findings(*sys.argv[1:])
    print("\n".join(found) or "english: nothing to rewrite")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
