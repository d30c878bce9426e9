"""The page as a file: well-formed, readable, small, and with nothing to load."""

from __future__ import annotations

import base64
import io
import re
import struct
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from atoll.cli import main
from atoll.core.errors import AtollError
from atoll.report import collect, write_report
from atoll.report.page import DARK, LIGHT, page


class Outline(HTMLParser):
    """Balanced tags, headings in order, tables with captions."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.levels: list[int] = []
        self.ids: list[str] = []
        self.captions = self.tables = 0

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link", "br", "input"):
            self.open.append(tag)
        if re.fullmatch("h[1-6]", tag):
            self.levels.append(int(tag[1]))
        self.ids += [value for name, value in attrs if name == "id"]
        self.tables += tag == "table"
        self.captions += tag == "caption"

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_its_headings_are_in_order(html):
    outline = Outline()
    outline.feed(html)
    assert outline.open == []
    assert outline.levels[0] == 1
    assert outline.levels.count(1) == 1
    steps = np.diff(outline.levels)
    assert steps.max() == 1  # no level is left out on the way down
    assert outline.tables == outline.captions > 10
    assert len(set(outline.ids)) == len(outline.ids)


def test_every_section_has_something_to_say(html):
    for text in (
        "the highest mean test accuracy: <b>", "band: lowest to highest seed", "fedpub: similarity",
        "fedgta: mixture", "gcfl: clusters of clients", "connect two clients",
        "evaluation (separate)", "Data that stay private", "MB / round", "torch",
        "atoll run <span>--config</span> config.toml",
        "masks, and the optimizer", "Divergence of structure",
    ):  # fmt: skip
        assert text in html, text
    assert "atoll compare &lt;all&gt; &amp; more" in html  # text of others cannot become markup


def test_nothing_is_loaded_from_anywhere(html):
    assert not re.findall(r'(?:src|href)="(?!#|data:)', html)
    assert "url(" not in html
    assert "default-src 'none'" in html


def test_a_title_cannot_become_markup(found):
    assert "<h1>&lt;b&gt;x</h1>" in page(found, "<b>x")


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK])
def test_text_and_lines_can_be_read(colours):
    for name in ("text", "soft", "link", *(f"c{i}" for i in range(8))):
        assert contrast(colours[name], colours["bg"]) >= 4.5, name
        if not name.startswith("c"):
            assert contrast(colours[name], colours["panel"]) >= 4.5, name
    for name in ("edge", "focus", "warn"):
        assert contrast(colours[name], colours["bg"]) >= 3, name
    # Numbers on the darkest shade of a matrix: 0.62 of the heat colour over the background.
    heat = np.array([int(part) for part in colours["heat"].split()])
    ground = np.array([int(colours["bg"][i : i + 2], 16) for i in (1, 3, 5)])
    mixed = np.round(0.62 * heat + 0.38 * ground).astype(int)
    assert contrast(colours["text"], "#" + "".join(f"{part:02x}" for part in mixed)) >= 4.5


def test_many_federations_stay_far_below_five_megabytes(found):
    """The parts that grow, drawn for 30 federations of ten methods with 120 rounds."""
    ours = list(found.shown)
    first = ours[0].run.result.seeds[0].history
    try:
        for seed in (s for one in ours for s in one.run.result.seeds):
            for name, rounds in seed.history.scores.items():
                seed.history.scores[name] = rounds * 40
        many = [
            type(one)(one.run, one.labels, f"method {r}", f"set {c}", r)
            for c in range(30) for r, one in enumerate((ours * 2)[:10])
        ]  # fmt: skip
        text = page(type(found)(many, [], {}))
        assert first.array("deployed", "accuracy", "test").shape[0] == 120
        assert len(text) < 2.5e6
    finally:
        for seed in (s for one in ours for s in one.run.result.seeds):
            for name, rounds in seed.history.scores.items():
                seed.history.scores[name] = rounds[:3]


def test_the_command_writes_page_and_tables(study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        main, ["report", str(study), "--md", "t.md", "--tex", "t.tex", "--csv", "t.csv"]
    )
    assert done.exit_code == 0, done.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.csv", "t.md", "t.tex"]
    assert "the report lacks 2 of 10 runs: gcfl-8 (not finished), lost (failed)" in done.stderr
    assert "| fedgta |" in (tmp_path / "t.md").read_text()
    done = CliRunner().invoke(main, ["report", str(study)])
    assert done.exit_code == 0
    assert (tmp_path / "report.html").stat().st_size < 5e6


def test_an_output_that_is_a_folder_is_refused_before_the_work(study, tmp_path):
    with pytest.raises(AtollError, match="is a folder"):
        write_report([study], tmp_path)


def section(html: str, name: str) -> str:
    return html.partition(f'<section id="{name}"')[2].partition("</section>")[0]


def test_every_look_has_its_command(reproduced: Path) -> None:
    text = section(page(collect([reproduced])), "again")
    assert text.count("atoll reproduce gcfl table") == 2


def test_the_command_reports_both(reproduced: Path, tuned: Path, tmp_path: Path) -> None:
    out = tmp_path / "both.html"
    done = CliRunner().invoke(main, ["report", str(reproduced), str(tuned), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert "<h1>gcfl, table 3 and gcfl, table 4, again</h1>" in out.read_text()


@pytest.fixture(scope="module")
def path(study, tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "report.html"
    write_report([study], out)
    return out


WIDTHS = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
BACKGROUND = "return getComputedStyle(document.body).backgroundColor"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("section", ["answer", "results"])
@pytest.mark.parametrize("width", [1440, 768, 390, 375])
def test_no_horizontal_overflow_and_no_errors(browser, path, width, section, dark):
    browser.size(width, dark=dark)
    browser.open(path, section)
    content, window = browser.run(WIDTHS)
    assert content <= window == width
    assert browser.log("browser") == []
    # Whatever sticks out of the window lies in a region that scrolls on its own.
    outside = browser.run(
        """return [...document.querySelectorAll("main *, header *, nav *")].filter(e =>
             e.getBoundingClientRect().right > innerWidth + 1 && e.offsetParent !== null
             && !e.closest(".scroll, pre, nav ul, .hidden")).map(e => e.className || e.tagName)"""
    )
    assert outside == []
    cut = browser.run(
        """return [...document.querySelectorAll("pre, caption:not(.hidden)")].filter(e =>
             e.checkVisibility() && (e.scrollWidth > e.clientWidth
             || e.offsetWidth > e.parentElement.parentElement.clientWidth))
             .map(e => e.textContent)"""
    )
    assert cut == []
    assert browser.run(CONTRAST) == []


CONTRAST = """
  const lum = c => { const [r, g, b] = c.map(v => (v /= 255) <= 0.03928 ? v / 12.92
    : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const rgb = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const ground = e => { for (; e; e = e.parentElement) {
    const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] === 1) return c.slice(0, 3); } return [255, 255, 255]; };
  const found = new Set();
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.checkVisibility() || e.closest(".cells, .hidden, script, .skip")) continue;
    const [a, b] = [lum(rgb(getComputedStyle(e).color)), lum(ground(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) found.add(`${e.tagName}.${e.className}: ${e.textContent}`);
  }
  return [...found].slice(0, 5)"""
"""Texts with less contrast than 4.5 to what is behind them; matrices have a test of their own."""


SHOWN = """return [...document.querySelectorAll("main > section")].filter(e =>
  e.checkVisibility()).map(e => e.id)"""


def test_two_pages_in_one_file(browser, path):
    browser.size(1440)
    browser.open(path)
    assert browser.run(SHOWN) == ["answer"]
    headings = "return [...document.querySelectorAll('h1,h2,h3,h4')].filter(e => "
    headings += "e.checkVisibility()).map(e => Number(e.tagName[1]))"
    for page_name in ("summary", "technical"):
        browser.run(f"document.querySelector('[for={page_name}-page]').click()")
        levels = browser.run(headings)
        assert levels[:2] == [1, 2]
        assert np.diff(levels).max() == 1
    shown = browser.run(SHOWN)
    assert shown[:2] == ["overview", "results"]
    assert "answer" not in shown
    browser.run("document.documentElement.style.scrollBehavior = 'auto'")
    browser.run("document.querySelector('nav a[href=\"#cost\"]').click()")
    top = browser.run("return document.getElementById('cost').getBoundingClientRect().top")
    assert 0 <= top < 500
    browser.run("location.hash = 'answer'")
    assert browser.run("return document.getElementById('summary-page').checked")


def test_the_metric_can_be_switched_by_pointer_and_keyboard(browser, path):
    browser.size(390)
    browser.open(path)
    visible = """return [...document.querySelectorAll(".by-metric")].filter(e =>
      e.checkVisibility()).map(e => e.querySelector(".answer").textContent)"""
    (text,) = browser.run(visible)
    assert "highest mean test accuracy" in text
    browser.run("document.querySelector('[for=m1]').click()")
    (text,) = browser.run(visible)
    assert "highest mean test macro F1" in text
    browser.run("document.getElementById('m1').focus()")
    browser.cdp("Input.dispatchKeyEvent", type="rawKeyDown", key="ArrowRight", code="ArrowRight",
                windowsVirtualKeyCode=39)  # fmt: skip
    (text,) = browser.run(visible)
    assert "highest mean test weighted F1" in text
    ring = "return getComputedStyle(document.querySelector('#m2 + label')).outlineWidth"
    assert browser.run(ring) == "3px"
    assert browser.log("browser") == []


def test_a_table_that_scrolls_shows_a_shade_at_its_edge(browser, path):
    browser.size(390)
    browser.open(path, "overview")
    table = "document.querySelector('#overview .scroll')"
    assert browser.run(f"const e = {table}; return e.scrollWidth > e.clientWidth + 20")

    def edge() -> int:
        """How dark the last columns of the table's region are, from 0 to 255."""
        box = browser.run(f"const b = {table}.getBoundingClientRect(); "
                          "return [b.right - 6 + scrollX, b.bottom - 6 + scrollY]")  # fmt: skip
        clip = {"x": box[0], "y": box[1], "width": 4, "height": 4, "scale": 1}
        shot = browser.cdp("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("L"))
        return 255 - int(pixels.mean())

    shaded = edge()
    browser.run(f"{table}.scrollLeft = 1e4")
    assert shaded > edge() + 20


def test_nothing_is_fetched(browser, path):
    browser.log("performance")
    browser.open(path)
    text = "\n".join(str(entry["message"]) for entry in browser.log("performance"))
    assert "file:///" in text
    assert "http://" not in text
    assert "https://" not in text


def test_charts_are_drawn_and_read_by_pointer_and_keyboard(browser, path):
    browser.size(1440)
    browser.open(path, "convergence")  # a link to the technical page shows it
    assert browser.run(
        """return [...document.querySelectorAll(".area .line")].filter(
             e => e.getBoundingClientRect().width < 50).length"""
    ) == 0  # fmt: skip
    tip = browser.run(
        """const area = document.querySelector("#convergence .area"); area.focus();
           area.dispatchEvent(new KeyboardEvent("keydown", {key: "Home", bubbles: true}));
           return area.querySelector(".tip").textContent"""
    )
    assert tip.startswith("round 1")
    assert "fedavg" in tip
    tip = browser.run(
        """const area = document.querySelector("#convergence .area");
           const box = area.getBoundingClientRect();
           area.dispatchEvent(new PointerEvent("pointermove",
             {clientX: box.right - 1, clientY: box.top + 9, bubbles: true}));
           const text = area.querySelector(".tip").textContent;
           area.dispatchEvent(new PointerEvent("pointerleave"));
           return [text, area.querySelector(".tip")]"""
    )
    assert tip[0].startswith("round 3")
    assert tip[1] is None
    assert browser.log("browser") == []


def test_light_and_dark_follow_the_system_and_the_button(browser, path):
    browser.size(1440)
    browser.open(path)
    browser.run("try { localStorage.clear() } catch {}")
    browser.open(path)
    assert browser.run(BACKGROUND) == "rgb(255, 255, 255)"
    browser.size(1440, dark=True)
    assert browser.run(BACKGROUND) == "rgb(18, 22, 26)"
    press = f"document.getElementById('theme').click(); {BACKGROUND}"
    assert browser.run(press) == "rgb(255, 255, 255)"
    assert browser.run("return document.getElementById('theme').textContent") == "Dark"
    assert browser.run(press) == "rgb(18, 22, 26)"


def test_it_can_be_read_without_scripts(browser, path, tmp_path):
    plain = tmp_path / "plain.html"
    text = path.read_text()
    plain.write_text(text[: text.rindex("<script>")] + "</body></html>")
    browser.size(1440)
    browser.open(plain)
    assert browser.run("return document.querySelectorAll('.area .line').length") == 8
    assert browser.run(SHOWN) == ["answer"]  # both switches need no script
    browser.run("document.querySelector('[for=technical-page]').click()")
    assert browser.run(SHOWN)[:2] == ["overview", "results"]
    assert browser.run("return document.getElementById('theme').offsetParent") is None


def test_everything_that_can_be_reached_has_a_name_and_a_visible_focus(browser, path):
    browser.size(1440)
    browser.open(path)
    nameless = browser.run(
        """return [...document.querySelectorAll("[tabindex='0'], button, a, summary")].filter(e =>
             !e.getAttribute("aria-label") && !e.textContent.trim()).length"""
    )
    assert nameless == 0
    assert browser.run("return document.querySelectorAll('main, nav, header, footer').length") == 4
    pictures = "[...document.querySelectorAll('svg[role=img]')]"
    assert browser.run(f"return {pictures}.every(e => e.getAttribute('aria-label').length > 20)")
    bare = browser.run(
        """return [...document.querySelectorAll("svg")].filter(e => !e.closest("[role=img]") &&
             e.getAttribute("aria-hidden") !== "true").length"""
    )
    assert bare == 0
    width = browser.run(
        """const e = document.querySelector("#theme"); e.focus({focusVisible: true});
           return getComputedStyle(e).outlineWidth"""
    )
    assert width == "3px"


def test_the_keyboard_reaches_all_that_scrolls(browser, path):
    browser.size(390)
    browser.open(path)
    for name in ("summary", "technical"):
        faults = browser.run(
            f"""document.getElementById("{name}-page").checked = true;
                return [...document.querySelectorAll("body *")].filter(e => e.tabIndex < 0 &&
                  /auto|scroll/.test(getComputedStyle(e).overflowX) &&
                  e.scrollWidth > e.clientWidth + 1 && !e.querySelector("a, [tabindex='0']"))
                  .map(e => e.outerHTML.slice(0, 80))"""
        )
        assert faults == []


def test_it_prints_on_white_paper_with_everything_unfolded(browser, path):
    browser.size(1440, dark=True)
    browser.open(path)
    browser.cdp("Emulation.setEmulatedMedia", media="print")
    try:
        assert browser.run(BACKGROUND) == "rgb(255, 255, 255)"
        assert browser.run("return getComputedStyle(document.querySelector('nav')).display") == (
            "none"
        )
        opened = browser.run(
            """dispatchEvent(new Event("beforeprint"));
               const open = [...document.querySelectorAll("details")].every(d => d.open);
               dispatchEvent(new Event("afterprint"));
               return [open, [...document.querySelectorAll("details")].some(d => d.open)]"""
        )
        assert opened == [True, False]
        whole = len(browser.cdp("Page.printToPDF")["data"])
        assert browser.run(SHOWN) == ["answer"]
        assert whole > 20_000
        browser.run("document.getElementById('technical-page').checked = true")
        assert browser.run(SHOWN)[0] == "overview"
        assert len(browser.cdp("Page.printToPDF")["data"]) > 1.5 * whole
        browser.cdp("Emulation.setDeviceMetricsOverride", width=700, height=1000,
                    deviceScaleFactor=1, mobile=False)  # fmt: skip
        content, _ = browser.run(WIDTHS)
        assert content <= 705  # A4 with margins: tables wrap, and no column is cut
        switches = "[...document.querySelectorAll('.switch')].some(e => e.checkVisibility())"
        assert not browser.run(f"return {switches}")
    finally:
        browser.cdp("Emulation.setEmulatedMedia", media="")


def test_it_is_one_small_file(browser, path):
    assert path.stat().st_size < 5e6
    browser.size(375)
    browser.open(path, "results")
    width, height = struct.unpack(">II", browser.picture()[16:24])
    assert width == 375
    assert height > 3000


@pytest.mark.parametrize("width", [1440, 375])
def test_in_a_browser_nothing_overflows_and_all_is_named(
    browser, reproduced: Path, tuned: Path, tmp_path: Path, width: int
) -> None:
    out = tmp_path / "both.html"
    write_report([reproduced, tuned], out)
    for dark in (False, True):
        browser.size(width, dark=dark)
        browser.open(out)
        sizes = "const e = document.documentElement; return [e.scrollWidth, e.clientWidth]"
        assert browser.run(sizes) == [width, width]
        assert browser.log("browser") == []
    outside = browser.run(
        """return [...document.querySelectorAll("#printed *, #tuning *")].filter(e =>
             e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".scroll, pre"))
             .map(e => e.outerHTML.slice(0, 80))"""
    )
    assert outside == []
    # Marks lie in their charts, and their colours are those of the scheme.
    far = browser.run(
        """return [...document.querySelectorAll(".field .mark")].filter(e => {
             const m = e.getBoundingClientRect(), f = e.closest(".field").getBoundingClientRect();
             return m.left < f.left - 6 || m.right > f.right + 6 || m.bottom > f.bottom + 6;
           }).length"""
    )
    assert far == 0
    assert browser.run("return document.querySelectorAll('.field .mark').length") > 20
    named = """return [...document.querySelectorAll("#printed svg, #tuning svg")].every(e =>
      e.closest("[aria-hidden=true]") || e.closest("svg[role=img]").getAttribute("aria-label"))"""
    assert browser.run(named)
    captions = "#printed table:not(:has(caption)), #tuning table:not(:has(caption))"
    assert browser.run(f"return document.querySelectorAll('{captions}').length") == 0
