"""ASCII for terminals without Unicode."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

import atoll
from atoll.present.ascii import adapt, plain


@pytest.mark.parametrize(
    ("letter", "shown"),
    [
        ("±", "+-"),
        ("−", "-"),
        ("é", "e"),
        ("ε", "epsilon"),
        ("Σ", "sum"),
        ("∑", "sum"),
        ("²", "^2"),
        ("⁻", "^-"),
        ("ᵀ", "^T"),
        ("\u0304", ""),  # a bar above the letter before
        ("≠", "!="),
        ("中", "?"),
    ],
)
def test_letters_have_a_plain_form(letter: str, shown: str) -> None:
    assert plain(letter) == shown


@pytest.mark.parametrize(
    ("encoding", "same"), [("ascii", False), ("latin-1", False), ("utf-8", True)]
)
def test_a_stream_writes_what_it_can(encoding: str, same: bool) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    adapt(stream, None)
    stream.write("81.7 ± 1.6, ε ▁█ Zürich")
    stream.flush()
    text = raw.getvalue().decode(encoding)
    assert (text == "81.7 ± 1.6, ε ▁█ Zürich") == same
    if encoding == "ascii":
        assert text == "81.7 +-1.6, epsilon _# Zurich"  # a column keeps its width
    if encoding == "latin-1":
        assert text == "81.7 ± 1.6, epsilon _# Zürich"


def test_every_sign_of_the_source_has_a_plain_form() -> None:
    files = Path(atoll.__file__).parent.rglob("*.py")
    signs = {letter for file in files for letter in file.read_text(encoding="utf-8")}
    assert not [letter for letter in signs if not letter.isascii() and plain(letter) == "?"]


def test_errors_of_reading_stay_errors() -> None:
    with pytest.raises(AssertionError):
        b"\xff".decode("ascii", errors="atoll")
