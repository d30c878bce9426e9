"""What a method says of itself: what crosses, what stays, and what it discloses and why."""

from __future__ import annotations

import re
from dataclasses import dataclass

from atoll.core.errors import AtollError
from atoll.engines.fleet import owners_of, steps_of
from atoll.experiment.build import build_method
from atoll.experiment.config import RunConfig
from atoll.present.catalogue import PARAGRAPHS, module_doc


@dataclass(frozen=True)
class Declared:
    """A method's own declarations.

    Attributes:
        about: Its first line.
        paper: Where it comes from.
        wire: What crosses, per client and round.
        private: What stays at the client.
        floats: How much crosses.
        discloses: Step, field and reason of every reply that may have a row per node or edge.
    """

    about: str
    paper: str
    wire: str
    private: str
    floats: str
    discloses: tuple[tuple[str, str, str], ...]


def declared(config: RunConfig, task: str) -> Declared | str:
    """The declarations of a run's method; a sentence where it cannot be asked."""
    if "method" in config.objects:
        return "The method was a Python object, which the folder does not hold."
    try:
        method = build_method(config, features=1, classes=2, task=task)
    except AtollError as error:
        return f"The method cannot be asked any more: {error}."
    words = module_doc(type(method))
    wire, private = paragraph(words, "Wire,"), paragraph(words, "Private state:")
    for name, owner in list(owners_of(method).items())[1:]:
        # A plug on another method: what that one sends is sent, too.
        base = module_doc(type(owner))
        label = f"{type(owner).__name__} ({name.rpartition('.')[2]})"
        wire += f" {label}: {paragraph(base, 'Wire,')}"
        private += f" {label}: {paragraph(base, 'Private state:')}"
    return Declared(
        words.partition("\n")[0],
        type(method).paper,
        wire,
        private,
        paragraph(words, "Floats per client"),
        tuple((s.name, name, why) for s in steps_of(method) for name, why in s.discloses.items()),
    )


def paragraph(words: str, start: str) -> str:
    """What follows a word at the start of a line of a docstring, up to the next such word."""
    ends = (*PARAGRAPHS, "What it tells:", "Compute:", "Ablations")
    lines = words.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith(start)), None)
    if begin is None:
        return ""
    found = [lines[begin]]
    for line in lines[begin + 1 :]:
        if not line.strip() or line.startswith(ends):
            break
        found.append(line)
    text = " ".join(found).partition(":")[2]
    # A wire line is set in columns: "down  model      up  model, num_nodes".
    text = re.sub(r"\bdown {2,}", "down: ", text)
    text = re.sub(r"[;,]? {2,}up {2,}", "; up: ", text)
    return re.sub(r"\s+", " ", text).strip().replace("`", "")
