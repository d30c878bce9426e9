"""The site builds without a network and without a warning, and has every page in its navigation."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT

CONFIG = ROOT / "zensical.toml"


def entries(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        yield from entries([*nav.values()])
    else:
        for part in nav:
            yield from entries(part)


def test_every_page_is_in_the_navigation_once() -> None:
    shown = [*entries(tomllib.loads(CONFIG.read_text())["project"]["nav"])]
    there = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert len(shown) == len(set(shown))
    assert there <= {*shown}, "pages that nav of zensical.toml does not show"
    assert {*shown} <= there, "nav of zensical.toml shows pages that are not there"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built in a copy, so that tests that run at once do not meet."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "src/atoll"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("zensical.toml", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, folder)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_the_site_builds_without_a_warning(site: Path) -> None:
    assert (site / "index.html").is_file()
    assert "Atoll" in (site / "search.js").read_text()  # the index of a site that is read from disk


def test_pages_ask_nobody_for_anything(site: Path) -> None:
    """No fonts, scripts, styles or pictures from elsewhere; links are the reader's own business."""
    asked = re.compile(
        r'(?:src="|<link[^>]*href="|@import[^;]*|url\()["\']?(?:https?:)?//[^"\')\s>]+'
    )
    for path in (*site.rglob("*.html"), *site.rglob("*.css")):
        assert not asked.findall(path.read_text()), path.name


def test_everything_that_pages_point_to_is_there(site: Path) -> None:
    """Also in text that comes from other files, which the strict build does not look at."""
    for page in site.rglob("*.html"):
        targets = re.findall(r'(?:src|href)="([^"#?:]+)[^":]*"', page.read_text())
        for target in {target for target in targets if not target.startswith("//")}:
            home = site if target.startswith("/") else page.parent
            path = (home / target.lstrip("/")).resolve()
            assert path.exists(), f"{page.relative_to(site)}: {target}"


def test_the_api_has_what_the_docstrings_say(site: Path) -> None:
    page = (site / "api.html").read_text()
    for name in ("atoll.load", "atoll.Result.metrics", "atoll.testing.check_method"):
        assert f'id="{name}"' in page
    assert "louvain" in page
