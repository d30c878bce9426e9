"""The model card, `MODEL_CARD.md`, generated from the other files of the model's folder.

`model.toml` contains the facts. A site that receives a model adds `own.toml`, with facts from its
own configuration, method, data and account. Readers then use it instead of the server's model.toml.
"""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tomli_w

from atoll.core.files import side_by_side, write_atomically
from atoll.core.graph import Graph
from atoll.core.method import Method
from atoll.data.own.agree import TELLS
from atoll.experiment.fingerprint import graph_fingerprint
from atoll.experiment.metrics import ONE_IN_A_BIN, SENT, find_metric, label_of
from atoll.experiment.threshold import Threshold

if TYPE_CHECKING:
    from atoll.experiment.result import Result

CARD, ABOUT, OWN = "MODEL_CARD.md", "model.toml", "own.toml"
MOST_ROWS = 50  # clients in the table of a card
PARAGRAPHS = ("Wire,", "Private state:", "Floats per client", "Departures from")
"""Labels of the sections in every method's docstring."""
SELECTED = {
    "best-val": "the best mean {metric} on validation {items}",
    "best-val-per-client": "each client's best {metric} on its validation {items}",
    "last": "the last round",
}
KEPT = (
    "The scores stayed at the sites. So the model is from the last round, and each site chooses "
    "its own threshold on its own validation {items}."
)
EXPOSED = (
    "There was no differential privacy. The updates that clients sent, and this model itself, may "
    "reveal training data."
)


def data_facts(graph: Graph, client: str) -> dict[str, object]:
    """Return a client's name, and the counts and the fingerprint of its data."""
    counts = {role: int(getattr(graph, role).sum()) for role in ("train", "val", "test")}
    sizes = {graph.task.plural: int(graph.size("nodes")), "edges": graph.edges.shape[1]}
    return {"client": client, **sizes, **counts, "sha256": graph_fingerprint(graph)}


def wire_of(method: Method) -> str:
    """Return the fields that a method sends, from its module's docstring, or "" if not listed."""
    return paragraph(inspect.getdoc(sys.modules[type(method).__module__]) or "", "Wire,")


def paragraph(words: str, start: str) -> str:
    """Return the text after a label in a docstring, up to an empty line or the next label."""
    ends = (*PARAGRAPHS, "What it tells:", "Compute:", "Ablations")
    found: list[str] = []
    for line in words.splitlines():
        if found and (not line.strip() or line.startswith(ends)):
            break
        if found or line.startswith(start):
            found.append(line)
    text = " ".join(found).partition(":")[2]
    # A wire line has columns: "down  model      up  model, num_nodes".
    text = re.sub(r"\bdown {2,}", "down: ", text)
    text = re.sub(r"[;,]? {2,}up {2,}", "; up: ", text)
    return re.sub(r"\s+", " ", text).strip().replace("`", "")


def write_cards(result: Result, folder: Path) -> None:
    """Add scores and privacy to the model.toml of each seed, and write the cards."""
    means, by_client = result.metrics(), result.of_clients(result.metric)

    def complete(number: int, place: Path) -> None:
        seed = result.seeds[number]
        about = _toml(place / ABOUT)
        by, here = result.metric, result.seed_metrics(seed.history)
        own = by_client[number].tolist()
        if np.isnan(own).all():  # a server pools the counts of sites
            by, own = "accuracy", result.of_clients("accuracy")[number].tolist()
        scores = dict[str, dict[str, float]]()
        for name, value in here.items():
            if name.startswith("test_") and "_by_" not in name:
                found = means[name]
                seeds = {} if found["std"] is None else {"mean": found["mean"], "std": found["std"]}
                scores[name[5:]] = {"value": value, **seeds}
        about |= {
            "rounds": seed.history.rounds,
            "seeds": len(result.seeds),
            "select": result.select,
            "federated": result.engine == "flare",
            "scores": scores,
            "scoring": sent_for_scoring(about["classes"], bins=seed.history.bins_known),
            "alerts": {name[10:]: v for name, v in here.items() if name.startswith("threshold_")},
            "client_metric": by,
            "client_scores": [] if np.isnan(own).all() else own,
            "privacy": privacy_facts(result.privacy),
        }
        write_atomically(place / ABOUT, tomli_w.dumps(about).encode())
        write_card(place)

    places = [folder / "model" / f"seed-{seed.seed}" for seed in result.seeds]
    side_by_side(
        partial(complete, number, place)
        for number, place in enumerate(places)
        if (place / ABOUT).exists()
    )


def sent_for_scoring(classes: int, *, bins: bool) -> list[str]:
    """Return the fields of `Scores` that each client sends."""
    unsent = {*(() if bins else ("bins",)), *(() if classes == 2 else ("auc",))}
    return [name for name in SENT if name not in unsent]


def privacy_facts(report: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the privacy statement as plain values without None, which TOML lacks."""
    if report is None:
        return {"differential": False, "says": EXPOSED}
    known = {name: value for name, value in report.items() if value is not None}
    return {"differential": True, "unit": "client", **known}


def write_card(folder: Path) -> None:
    """Write the card of the model in a folder."""
    write_atomically(folder / CARD, card_text(read_about(folder)).encode())


def read_about(folder: Path) -> dict[str, Any]:
    """Read the facts of a model from own.toml at a site, otherwise from model.toml."""
    own = folder / OWN
    mine = _toml(own) if own.exists() else {}
    if "round" in mine:
        return mine
    # Earlier versions wrote only the names and the fingerprints to own.toml.
    return _toml(folder / ABOUT) | mine


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:  # any other error in the text is a ValueError
        raise ValueError("it is nested too deeply") from error


def card_text(about: Mapping[str, Any]) -> str:
    """Return the card of a model with these facts."""
    return "\n".join(map(_harmless, _lines(_plain(about)))) + "\n"


def _plain(value: Any) -> Any:
    """Reduce texts to one line without backticks: another party may have written them."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else " " for c in value).replace("`", "'")
    if isinstance(value, Mapping):
        return {_plain(key): _plain(one) for key, one in value.items()}
    return list(map(_plain, value)) if isinstance(value, list) else value


def _harmless(text: str) -> str:
    """Remove HTML, pictures and links from Markdown, except in code."""
    parts = text.split("`")
    for place in range(0, len(parts), 2):
        part = re.sub(r"\\(?!\|)", r"\\\\", parts[place])  # except the ones of `_row`
        part = part.replace("<", "&lt;").replace("[", "\\[")
        # Some Markdown readers turn bare addresses into links.
        part = re.sub(r"(?i)(:)(?=//)|(www|@)(?=\.|[\w-]+\.\w)", r"\g<0> ", part)
        parts[place] = part
    return "`".join(parts)


def _lines(about: Mapping[str, Any]) -> Iterator[str]:
    yield f"# Model card: {about['method']} on {about['data']}"
    yield "\nAtoll made this card from the other files of this folder."
    parts = {"Model": _model, "Data and scores": _data, "Threshold": _threshold}
    parts |= {"Privacy": _privacy_lines, "Limits of use": _limits, "Use": _use}
    for title, write in parts.items():
        yield f"\n## {title}\n"
        yield from write(about)


def _model(about: Mapping[str, Any]) -> Iterator[str]:
    picked, items = about["round"], f"{about['task']}s"
    rounds = [picked] if isinstance(picked, int) else picked
    number = " to ".join(str(n + 1) for n in sorted({min(rounds), max(rounds)}))
    metric = label_of(about["metric"])
    select = "last" if _scores_stayed(about) else about.get("select", "")
    rule = SELECTED.get(select, "the rule of the protocol").format(metric=metric, items=items)
    models = "one for each client" if about["one_per_client"] else "one for all clients"
    hyper = {k: v for k, v in about["hyperparameters"].items() if not isinstance(v, dict)}
    yield f"- Task: classify {items} as {_listed(_classes(about))}."
    yield f"- Method: {about['method']} ({_settings(hyper)}); protocol {about['protocol']}."
    net = {k: v for k, v in about["hyperparameters"].get("net", {}).items() if k != "classes"}
    yield f"- Network: {about['net']} ({_settings(net)})."
    private = ", with private parts that only their client has" if about["private_parts"] else ""
    yield f"- Models: {models}{private}."
    # A site knows the rule and its own rounds, but not the server's choice.
    chosen = "selected, according to the server:" if about.get("site") else "selected:"
    yield f"- Rounds: {about.get('rounds', 'unknown')}; {chosen} round {number}, by {rule}."
    yield f"- Made with: {_settings(about['versions'])}."


def _data(about: Mapping[str, Any]) -> Iterator[str]:
    rows = {str(row["client"]): row for row in about.get("fingerprints", ())}
    names = list(map(str, about.get("client_names", range(about["clients"]))))
    scores = dict(zip(names, about.get("client_scores", ()), strict=False))
    metric = label_of(about.get("client_metric", "accuracy"))
    if about["encoder"]:
        yield "The data were tables; `encoder.json` describes how their columns became features.\n"
    if not rows:
        yield "No fingerprints: the data were not on the machine that wrote this file.\n"
    if rows or scores:
        counted = [k for row in rows.values() for k in row if k not in ("client", "sha256")]
        columns = [*dict.fromkeys(counted), *([f"test {metric}"] if scores else [])]
        yield _row(["client", *columns, *(["SHA-256"] if rows else [])])
        yield "|".join(["", *["---"] * (1 + len(columns) + bool(rows)), ""])
        for name in names[:MOST_ROWS]:
            row = dict(rows.get(name, {}))
            row |= {f"test {metric}": f"{scores[name]:.4f}"} if name in scores else {}
            digest = [f"`{row['sha256']}`" if "sha256" in row else ""] if rows else []
            yield _row([name, *(row.get(column, "") for column in columns), *digest])
        if len(names) > MOST_ROWS:
            yield f"\n{len(names) - MOST_ROWS} more clients are in `{ABOUT}`."
    else:
        yield f"Clients: {_listed(names)}."
    if about.get("site") and scores:
        yield "\nThe server reported this score. This site did not compute it again."
    if about.get("scores"):
        seeds = "1 seed" if about["seeds"] == 1 else f"{about['seeds']} seeds"
        yield f"\n| test score | this model | {seeds} |\n|---|---|---|"
    scored = about.get("scores", {})
    for name, found in sorted(scored.items(), key=lambda item: item[0] != about["metric"]):
        spread = f"{found['mean']:.4f} ± {found['std']:.4f}" if "std" in found else "no spread"
        yield _row([label_of(name), f"{found['value']:.4f}", spread])


def _threshold(about: Mapping[str, Any]) -> Iterator[str]:
    if (found := Threshold.of(about)) is None:
        yield "No threshold was chosen: a prediction is the most likely class."
        return
    name, items = _classes(about)[found.positive], f"{about['task']}s"
    text = (
        f"A prediction is an alert where the probability of `{name}` is at least "
        f"{found.value:.6g}. Rule `{found.rule}` chose it on validation {items}."
    )
    if found.alerts is not None:
        text += (
            f" There its precision was {found.precision:.4f}, its recall {found.recall:.4f}, and "
            f"{100 * found.alerts:.2f} % of the {items} were alerts."
        )
    if on_test := about.get("alerts"):
        scores = f"precision {on_test['precision']:.4f}, recall {on_test['recall']:.4f}"
        text += f" On test {items}: {scores}."
    if about.get("site") and found.alerts is None:
        text += " The server applied the rule, to the counts of all sites."
    yield text


def _privacy_lines(about: Mapping[str, Any]) -> Iterator[str]:
    found = about.get("privacy", {})
    if found.get("differential"):
        yield f"Differential privacy; the unit of protection is a {found['unit']}."
        yield f"{found['says'][:1].upper()}{found['says'][1:]}."
        yield f"Adjacency: {found['adjacency']}. Sampling: {found['sampling']}."
        if _scores_stayed(about):
            yield KEPT.format(items=f"{about['task']}s")
    else:
        yield found.get("says", EXPOSED)
    if found.get("differential") and about.get("wire"):
        # The noised update replaces the fields of the method (`core.dp.Noised`).
        yield "Sent in each round, for each client: a clipped and noised update, and the weight 1."
    elif about.get("wire"):
        yield f"Sent in each round, for each client: {about['wire']}."
    if about.get("measured") == "federated":
        yield f"Sent once, for the encoder: {TELLS}."
    sent = [SENT[name] for name in about.get("scoring", ())]
    sent = sent if "scoring" in about else [find_metric(about["metric"]).sends]
    if sent and not _scores_stayed(about):
        text = "; ".join(sent)
        shows = f"; {ONE_IN_A_BIN}" if SENT["bins"] in text else ""
        yield f"Sent for scoring, for each client, part and round: {text}{shows}."
    if not about.get("federated"):
        yield "This run was a simulation: all clients' data were on one machine, and none left it."


def _limits(about: Mapping[str, Any]) -> Iterator[str]:
    yield "- Scores hold for data like the test data above. Nothing was measured on other data."
    if why := about.get("bound"):
        yield f"- It cannot predict new nodes: {why}."
    elif about["encoder"]:
        yield "- New tables need the same columns. A new category counts as `other`, or is refused."
    if about["deployed"] != "global" or about["one_per_client"]:
        yield "- A client that never trained has no model here."
    yield "- Atoll does not check fairness between groups of people, or causes. Check them first."


def _use(about: Mapping[str, Any]) -> Iterator[str]:
    if about.get("site"):
        yield "- Predict: `atoll federate predict MODEL --kit KIT --data NEW --out scores.csv`"
        yield "- Verify the server's signature: `atoll federate verify MODEL --kit KIT`"
    else:
        yield "- Predict: `atoll predict RUN --data NEW --out scores.csv`"
        yield "- Without Atoll: `atoll export RUN --to pyg`"
        yield "- Verify: train again with `atoll run --config RUN/config.toml`, and compare scores."
    for name, digest in about.get("files", {}).items():
        yield f"- SHA-256 of `{name}`: `{digest}`"


def _scores_stayed(about: Mapping[str, Any]) -> bool:
    """Return whether the sites of a private run kept their scores."""
    return bool(about.get("federated")) and about["privacy"].get("scores") == "kept"


def _classes(about: Mapping[str, Any]) -> list[str]:
    return list(map(str, about.get("class_names", range(about["classes"]))))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_ROWS} more" if len(names) > MOST_ROWS else ""
    return ", ".join(f"`{name}`" for name in names[:MOST_ROWS]) + more


def _settings(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in found.items())


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
