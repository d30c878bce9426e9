"""The page in a real browser: no errors, no overflow, nothing fetched, light and dark."""

import struct

import pytest

from atoll.report import write_report


@pytest.fixture(scope="module")
def path(study, tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "report.html"
    write_report([study], out)
    return out


WIDTHS = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
BACKGROUND = "return getComputedStyle(document.body).backgroundColor"


@pytest.mark.parametrize("width", [1440, 768, 375])
def test_no_horizontal_overflow_and_no_errors(browser, path, width):
    browser.size(width)
    browser.open(path)
    content, window = browser.run(WIDTHS)
    assert content <= window == width
    assert browser.log("browser") == []
    # Whatever sticks out of the window lies in a region that scrolls on its own.
    outside = browser.run(
        """return [...document.querySelectorAll("main *, header *")].filter(e =>
             e.getBoundingClientRect().right > innerWidth + 1 && e.offsetParent !== null
             && !e.closest(".scroll, pre, nav ul, .hidden")).map(e => e.className || e.tagName)"""
    )
    assert outside == []


def test_nothing_is_fetched(browser, path):
    browser.log("performance")
    browser.open(path)
    text = "\n".join(str(entry["message"]) for entry in browser.log("performance"))
    assert "file:///" in text
    assert "http://" not in text
    assert "https://" not in text


def test_charts_are_drawn_and_read_by_pointer_and_keyboard(browser, path):
    browser.size(1440)
    browser.open(path)
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
        assert len(browser.cdp("Page.printToPDF")["data"]) > 20_000
    finally:
        browser.cdp("Emulation.setEmulatedMedia", media="")


def test_it_is_one_small_file(browser, path):
    assert path.stat().st_size < 5e6
    browser.size(375)
    browser.open(path)
    width, height = struct.unpack(">II", browser.picture()[16:24])
    assert width == 375
    assert height > 3000
