"""Check the English of the lines that a change adds: `make check` runs it.

A line counts as added if its text stands nowhere in the commit that `tools/english-base` names: a
line
that only moved, or was only indented, is not checked. Each phrase below has a plainer form.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASE = Path(__file__).with_name("english-base")
KINDS = (".py", ".md", ".toml", ".css", ".js", ".yaml")
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


def git(*words: str) -> str:
    """The output of a git command."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def base_lines(commit: str) -> set[str]:
    """Every line of text in a commit, without its indentation."""
    listing = git("grep", "-hI", "-e", "", commit, "--", *(f"*{kind}" for kind in KINDS))
    return {line.strip() for line in listing.splitlines()}


def findings(known: set[str]) -> list[str]:
    """Phrases in added lines, each with its place and a plainer form."""
    found = []
    names = git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    skipped = ("tests/compat/old/", "tools/english.py", "tests/tools/test_english.py")
    for name in names:
        path = ROOT / name
        if path.suffix not in KINDS or name.startswith(skipped) or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip() in known:
                continue
            found += [
                f"{name}:{number}: '{match.group()}': write '{better}'"
                for pattern, better in PLAINER.items()
                for match in re.finditer(pattern, line, re.IGNORECASE)
            ]
    return found


def main() -> int:
    """Print what to rewrite; the exit code says whether there is anything."""
    commit = BASE.read_text().strip()
    try:
        known = base_lines(commit)
    except subprocess.CalledProcessError:
        print(
            f"english: commit {commit} is not in this clone, so added lines are not known; skipped"
        )
        return 0
    found = findings(known)
    print("\n".join(found) or "english: no phrase to rewrite in added lines")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
