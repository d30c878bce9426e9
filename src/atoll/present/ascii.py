"""Text for terminals and files that can only show ASCII."""

from __future__ import annotations

import codecs
import io
import unicodedata

SIGNS = {"±": "+-", "…": "...", "√": "sqrt", "≠": "!=", "λ": "lambda", "§": "section", "∈": "in"}
SIGNS |= {"∂": "d", "∇": "grad", "∘": "*", "⊗": "x", "∪": "or", "⌊": "floor(", "⌋": ")"}
SIGNS |= {"Σ": "sum", "∑": "sum"} | dict(zip("−–≈×·‖▁▂▃▄▅▆▇█", "--~x*|_.-:=+*#", strict=True))


def plain(letter: str) -> str:
    """Return a letter in ASCII: a known sign, the bare letter, a Greek name, or `?`.

    Accents after a letter vanish, and a superscript gets a `^`.
    """
    if unicodedata.combining(letter):
        return ""
    without_accent = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
    greek = unicodedata.name(letter, "").partition("GREEK")[2].rpartition(" LETTER ")[2]
    raised = unicodedata.normalize("NFKC", letter).replace("−", "-")
    if unicodedata.decomposition(letter).startswith("<super>") and len(raised) == 1:
        return f"^{raised}"
    return SIGNS.get(letter) or without_accent or greek.lower() or "?"


def _replaced(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    letter, after = error.object[error.start], error.object[error.start + 1 : error.start + 2]
    wider = letter == "±" and after == " "  # keeps columns aligned
    return plain(letter), error.start + 1 + wider


codecs.register_error("atoll", _replaced)


def adapt(*streams: object) -> None:
    """Let streams write the result of `plain` for characters that they cannot encode."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="atoll")
