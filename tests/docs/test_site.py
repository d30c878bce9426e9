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

from atoll.present.tables import html, make_table
from tests.docs.pages import ROOT
from tests.report.conftest import Browser

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
    records = (ROOT / "docs" / "adr" / "index.md").read_text()
    shown += [f"adr/{name}" for name in re.findall(r"\((\d{4}-[\w-]+\.md)\)", records)]
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
    """Pages load no fonts, scripts, styles or pictures from other hosts. Links may go there."""
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


LAYOUT = """
const width = document.documentElement.clientWidth, faults = [];
if (document.documentElement.scrollWidth > width) faults.push("the page scrolls sideways");
for (const code of document.querySelectorAll(".md-content pre > code"))
  if (!code.closest(".language-text") && code.scrollWidth > code.clientWidth + 2)
    faults.push("cut: " + code.textContent.slice(0, 60));
const content = document.querySelector(".md-content");
const texts = document.createTreeWalker(content, NodeFilter.SHOW_TEXT);
for (let text; text = texts.nextNode();) {
  if (text.parentElement.closest("pre, script, style")) continue;
  const words = /(?<![\\w-])--?[a-z][\\w-]*|\\S+ ± \\S+|[\\p{L}\\d_]+/gu;
  for (const word of text.data.matchAll(words)) {
    const range = document.createRange();
    range.setStart(text, word.index);
    range.setEnd(text, word.index + word[0].length);
    if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1)
      faults.push("a broken word: " + word[0]);
  }
}
for (const region of document.querySelectorAll(".md-content *"))
  if (/auto|scroll/.test(getComputedStyle(region).overflowX) && region.tabIndex < 0
      && region.scrollWidth > region.clientWidth + 1)
    faults.push("no key reaches: " + region.textContent.trim().slice(0, 60));
const levels = [...document.querySelectorAll(".md-content :is(h1, h2, h3, h4)")];
levels.map((one) => +one.tagName[1]).forEach((level, place, all) => {
  if (level > (all[place - 1] ?? 0) + 1) faults.push("a level of headings is skipped");
});
for (const image of document.querySelectorAll(".md-content img"))
  if (!image.alt || (image.complete && !image.naturalWidth)) faults.push("picture " + image.src);
for (const label of document.querySelectorAll("label[tabindex]"))
  if (!label.textContent.trim() && !label.ariaLabel) faults.push("no name: " + label.id);
const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
const light = (rgb) => rgb.map((v) => ((v / 255 + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0.05);
for (const label of document.querySelectorAll(".doc-label code")) {
  const style = getComputedStyle(label), [r, g, b, alpha = 1] = numbers(style.color);
  const part = alpha * getComputedStyle(label.parentElement).opacity;
  const ground = numbers(getComputedStyle(document.body).backgroundColor).slice(0, 3);
  const text = [r, g, b].map((v, at) => part * v + (1 - part) * ground[at]);
  const [low, high] = [light(text), light(ground)].sort((x, y) => x - y);
  if (high / low < 4.5) faults.push("pale: " + label.textContent);
}
return faults;
"""
IN_BROWSER = ("index", "methods", "commands", "own-graph", "api", "gallery", "results/tables")


@pytest.mark.parametrize(
    ("width", "dark"), [(1440, False), (1440, True), (390, False), (390, True)]
)
def test_pages_fit_the_screen(site: Path, browser: Browser, width: int, dark: bool) -> None:
    browser.size(width, dark=dark)
    for name in IN_BROWSER:
        browser.open(site / f"{name}.html")
        browser.run("localStorage.clear()")
        browser.open(site / f"{name}.html")
        scheme = browser.run("return document.body.dataset.mdColorScheme")
        assert scheme == ("slate" if dark else "default")
        assert browser.run(LAYOUT) == [], (name, width)
        assert browser.log("browser") == [], name


def test_pages_follow_the_system_after_the_first_visit(site: Path, browser: Browser) -> None:
    scheme = "return document.body.dataset.mdColorScheme"
    browser.size(1440)
    browser.open(site / "index.html")
    browser.run("localStorage.clear()")
    for name, dark in (("index", False), ("methods", True), ("index", False)):
        browser.size(1440, dark=dark)
        browser.open(site / f"{name}.html")
        assert browser.run(scheme) == ("slate" if dark else "default"), (name, dark)


def test_a_click_or_enter_on_a_heading_sorts_a_table(
    browser: Browser,
    tmp_path: Path,
) -> None:
    rows = [["a", "−2.5 ± 1.0"], ["b", "10.0"], ["c", "diverged"], ["d", "< 0.001"]]
    script = (ROOT / "docs/assets/sort-tables.js").read_text()
    table = html(make_table(["method", "points"], rows))
    page = tmp_path / "page.html"
    page.write_text(
        f'<meta charset="utf-8"><div class="sortable">{table}</div><script>{script}</script>'
    )
    browser.open(page)
    names = "[...document.querySelectorAll('tbody tr')].map(row => row.cells[0].textContent)"
    order = f"return {names}.join('')"
    head = "const head = document.querySelectorAll('thead th')[1];"
    assert browser.run(f"{head} head.click(); {order}") == "adbc"
    enter = "head.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}));"
    assert browser.run(f"{head} {enter} {order}") == "bdac"  # a word stays below the numbers
    assert browser.run(f"{head} return head.ariaSort") == "descending"
