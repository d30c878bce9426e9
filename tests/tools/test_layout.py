"""Tests mirror the source: `tests/room/test_module.py` tests `src/atoll/room/module.py`."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE, TESTS = ROOT / "src" / "atoll", ROOT / "tests"
WHOLE = {"compat", "contract", "docs", "e2e", "fuzz", "gpu", "invariant", "tools"}
"""Folders of tests that are about no single module."""
PACKAGE = {"__main__.py", "test_public_names.py", "deploy/test_lying_site.py"}
"""`python -m atoll`, which tests in a separate process run, the names of the package, and a site
that lies to the server in many ways."""


def homes(path: Path) -> set[Path]:
    """The test files of a source file. Tests of a package are inside or next to its folder."""
    place = path.relative_to(SOURCE)
    if place.name == "__init__.py":
        package = place.parent
        return {package / "test_init.py", package.parent / f"test_{package.name}.py"}
    return {place.with_name(f"test_{place.name}")}


def layout() -> tuple[set[str], set[str]]:
    """Modules without a test file, and test files without a module."""
    files = {path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    files = {path for path in files if path.parts[0] not in WHOLE}
    modules = [path for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]
    untested = {path.relative_to(SOURCE) for path in modules if not homes(path) & files}
    named = {test for path in SOURCE.rglob("*.py") for test in homes(path)}
    return {str(path) for path in untested}, {str(path) for path in files - named}


def test_every_module_has_its_tests_and_every_test_its_module() -> None:
    untested, homeless = layout()
    assert untested - PACKAGE == set(), "give each module a test file of its name"
    assert homeless - PACKAGE == set(), "put these tests into the file of the module they test"


def test_a_module_without_tests_is_found(tmp_path, monkeypatch) -> None:
    for name in ("a/__init__.py", "a/one.py", "b/__init__.py", "b/two.py"):
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).touch()
    for name in ("a/test_one.py", "a/test_init.py", "test_b.py", "a/test_two.py", "e2e/test_x.py"):
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).touch()
    monkeypatch.setattr(f"{__name__}.SOURCE", tmp_path / "src")
    monkeypatch.setattr(f"{__name__}.TESTS", tmp_path / "tests")
    assert layout() == ({"b/two.py"}, {"a/test_two.py"})
