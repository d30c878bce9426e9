"""Data that a site would send: each field of its replies, with shape, bytes, reason and verdict.

The method runs for a few rounds on this machine, and every client has the site's own graph, so
the shapes are real. Steps that this trial does not reach are listed without sizes.
"""

from __future__ import annotations

import msgspec
import torch
from rich import box
from rich.console import Group
from rich.text import Text

from atoll.core.federation import Federation
from atoll.core.method import Method, Step
from atoll.core.tree import Tree, named_leaves
from atoll.data.own.agree import MODES, Told, in_words
from atoll.deploy.audit import Json
from atoll.deploy.policy import Policy, Refusal
from atoll.deploy.site_data import SiteData
from atoll.engines.fleet import steps_of
from atoll.engines.ledger import SCORE
from atoll.engines.prepare import EngineInputs
from atoll.engines.serial import Serial
from atoll.experiment.build import build_method
from atoll.experiment.config import RunConfig, resolve
from atoll.experiment.history import bins_metric
from atoll.experiment.metrics import SENT
from atoll.experiment.privacy import with_privacy
from atoll.experiment.rounds import Experiment
from atoll.present.terminal import FittedTable

ROUNDS = 2  # rounds of the trial run


class _Recorder(Serial):
    """A serial engine that records the replies of client 0."""

    def __init__(self, inputs: EngineInputs) -> None:
        super().__init__(inputs.graphs())
        self.seen: dict[tuple[str, str], Json] = {}
        self.messages: dict[str, int] = {}
        self.steps: dict[str, Step] = {}

    def run_one(self, step: Step, position: int, message: Tree, key: torch.Tensor) -> Tree:
        reply = super().run_one(step, position, message, key)
        if position == 0:
            self.steps[step.name] = step
            self.messages[step.name] = self.messages.get(step.name, 0) + 1
            for name, leaf in named_leaves(reply):
                self.seen[step.name, name] = {
                    "step": step.name,
                    "field": name,
                    "shape": "x".join(map(str, leaf.shape)) or "1",
                    "type": str(leaf.dtype).removeprefix("torch."),
                    "bytes": leaf.numel() * leaf.element_size(),
                    "declared": step.discloses.get(name.split(".")[0], ""),
                    "meaning": SENT.get(name, "") if step.name == SCORE else "",
                }
        return reply


def disclosure(config: RunConfig, data: SiteData, policy: Policy) -> Json:
    """Return every field that the trial run sends, and the steps that it did not reach."""
    config, _ = resolve(config, data.graph.task.name)
    bare = build_method(config, data.graph.num_features, data.classes, data.graph.task.name)
    method = with_privacy(bare, config.dp)
    # Both clients have this site's data, so the shapes are real and every reply can be stacked.
    federation = Federation((data.graph, data.graph), data.classes, name=data.name)
    metric = bins_metric(config, federation, sparing=True)
    how: Json = {"rounds": ROUNDS, "engine": _Recorder, "metric": metric}
    run = Experiment(method, federation, **how).begin()
    recorder = run.simulation.engine
    assert isinstance(recorder, _Recorder)
    run.start()
    while not run.finished:
        run.one_round()
    fields = list(recorder.seen.values())
    for field in fields:
        field["bytes_per_round"] = field["bytes"] * recorder.messages[field["step"]] // ROUNDS
        top = field["field"].split(".")[0]
        field["verdict"] = _verdict(policy, recorder.steps[field["step"]], top)
    unseen = []
    for step in steps_of(method):
        if step.name not in recorder.steps:
            verdict = _verdict(policy, step, *step.discloses)
            unseen.append({"step": step.name, "declared": dict(step.discloses), "verdict": verdict})
    return {
        "method": config.method,
        "rounds_tried": ROUNDS,
        **_joining(config, data, policy),
        "run": _verdict(policy, config, method=bare),
        "fields": fields,
        "steps_not_seen": unseen,
    }


def _joining(config: RunConfig, data: SiteData, policy: Policy) -> Json:
    """Return the facts that a site sends when it joins, or the reason why it sends nothing."""
    mode = config.encoder or MODES[0]
    try:
        summary, told = data.tell(policy, mode, config.dp)
    except Refusal as error:
        return {"told_when_joining": "nothing", "told_of_columns": f"refused: {error}"}
    columns = [msgspec.to_builtins(one) for one in told] or f"nothing, with --encoder {mode}"
    return {"told_when_joining": summary, "told_of_columns": columns if data.told else []}


def _verdict(
    policy: Policy, subject: Step | RunConfig, *fields: str, method: Method | None = None
) -> str:
    """Return the policy's decision on a run, or on sending fields of a step's reply."""
    try:
        if isinstance(subject, Step):
            policy.check_step(subject, 0)
            policy.check_reply(subject, fields)
        else:
            base = str(subject.set.get("base", ""))
            policy.check_run(subject.method, subject.rounds or 0, base)
            policy.check_privacy(subject.dp)
            if method is not None:
                policy.check_size(method)
    except Refusal as error:
        return f"refused: {error}"
    return "allowed"


def _listed(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def disclosure_table(found: Json) -> Group:
    """Format a disclosure as a table."""
    table = FittedTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("step", "field", "shape", "type", "bytes/round", "verdict"):
        table.add_column(name, justify="right" if name.startswith("bytes") else "left")
    for row in found["fields"]:
        plain = (row[name] for name in ("step", "field", "shape", "type"))
        table.add_row(*plain, str(row["bytes_per_round"]), row["verdict"].partition(":")[0])
    joining = found["told_when_joining"]
    if not isinstance(joining, str):
        joining = "; ".join(f"{key}: {_listed(value)}" for key, value in joining.items())
    notes = [f"run: {found['run']}", f"told when joining: {joining}"]
    columns = found["told_of_columns"]
    if isinstance(columns, str):
        notes.append(f"told of columns: {columns}")
    else:
        every = msgspec.convert(columns, list[Told])
        notes += [f"told of column {one.name}: {in_words(one)}" for one in every]
    meanings = {(row["step"], row["field"]): row["meaning"] for row in found["fields"]}
    notes += [f"{step}.{field} is {why}" for (step, field), why in meanings.items() if why]
    declared = {(r["step"], r["field"].split(".")[0], r["declared"]) for r in found["fields"]}
    notes += [f"{s}.{f} is declared: {why}" for s, f, why in sorted(declared) if why]
    notes += sorted({r["verdict"] for r in found["fields"] if r["verdict"] != "allowed"})
    for row in found["steps_not_seen"]:
        fields = "; ".join(f"{k}: {why}" for k, why in row["declared"].items())
        missing = f"step {row['step']} did not run in {found['rounds_tried']} rounds"
        notes.append(f"{missing}; it declares {fields}" if fields else missing)
    title = Text(f"What {found['method']} would send from here; nothing was sent", style="bold")
    return Group(title, Text(), table, Text(), *(Text(note, style="dim") for note in notes))
