"""The data of one site: its graph, split into roles, and the names that sites must agree on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll.core.errors import ConfigError, DataError, WireError
from atoll.core.federation import Federation
from atoll.core.graph import Graph
from atoll.data.divide import InducedSubgraphs, check_client
from atoll.data.own.agree import MODES, Agreed, Told, check_declared, check_sums, with_agreed
from atoll.data.own.encoder import Encoder
from atoll.data.own.schema import OwnOptions
from atoll.data.split import growth, time_column
from atoll.data.split import split as assign_roles
from atoll.deploy.policy import Policy, Refusal
from atoll.engines.codec import load_checkpoint, save_checkpoint
from atoll.experiment.fingerprint import graph_fingerprint
from atoll.experiment.privacy import PrivacyConfig, keeps_scores

KIND = "atoll client"
SUFFIX = ".atoll"


@dataclass(frozen=True)
class SiteData:
    """One client's graph, with the number of classes and the data set's name and metric."""

    graph: Graph
    classes: int
    name: str
    metric: str = "accuracy"
    words: tuple[str, ...] = ()  # names of classes and feature columns, equal at every site
    declared: bool = False  # whether the owner listed the classes; else the rows define them
    # How the columns of own tables became features (`data.own.encoder`), as plain values.
    encoder: Mapping[str, object] | None = None
    told: tuple[Told, ...] = ()  # statistics of the columns of own tables, for a common encoder
    read: Callable[..., SiteData] | None = None  # reads the tables again, with an `encoder`

    def tell(
        self, policy: Policy, mode: str, privacy: PrivacyConfig | None
    ) -> tuple[dict[str, object], tuple[Told, ...]]:
        """Return the facts that the server may know before a run: a summary, and column statistics.

        `mode` is one of `MODES`. Refuse statistics that the owner does not allow. A feature's name
        may contain a category value. A server that gets `Told` names the features itself, so the
        summary then contains no feature names.
        """
        found, agrees = self.summary(sizes=not keeps_scores(privacy)), mode == MODES[0]
        features = Encoder.from_plain(self.encoder or {}).features if self.told else ()
        try:
            if privacy is not None:
                check_declared(features, numbers=agrees)
            elif agrees:
                check_sums(features)
        except ConfigError as error:
            raise Refusal(str(error)) from error
        if privacy is not None and not self.declared and self.read is not None:
            why = "a private run tells no class, and no number of classes, that only the rows have"
            raise Refusal(f"{why}; list all classes with --classes when this site starts")
        if not self.told:
            return found, ()
        if agrees:
            if privacy is None:
                policy.check_statistics()
            classes = [word for word in self.words if word.startswith("class ")]
            return {**found, "features": 0, "words": classes}, self.told
        for feature, told in zip(features, self.told, strict=True):
            if set(feature.values) - set(told.values):
                why = f"column '{feature.name}' has values that its policy keeps back"
                hint = "list them in schema.toml, or run with --encoder federated"
                raise Refusal(f"{why} (rare_categories = {policy.rare_categories}); {hint}")
        return found, ()

    def with_encoder(self, agreed: Sequence[Agreed]) -> SiteData:
        """Read the same tables with the common encoder."""
        if self.read is None or self.encoder is None:
            raise WireError("an encoder came, but the data of this site are no tables")
        own = Encoder.from_plain(self.encoder)
        if [f.name for f in own.features] != [a.name for a in agreed]:
            raise WireError("an encoder came for other columns than those of this site")
        return self.read(encoder=replace(own, features=with_agreed(own.features, agreed)))

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of the data, as in model cards."""
        return graph_fingerprint(self.graph)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, or their numbers."""
        known = tuple(w[len("class ") :] for w in self.words if w.startswith("class "))
        return known or tuple(map(str, range(self.classes)))

    def summary(self, *, sizes: bool = True) -> dict[str, object]:
        """Return the summary for the server. Without `sizes`, zeros replace the counts of nodes."""
        graph = self.graph
        masks = torch.stack([graph.train, graph.val, graph.test]).sum(1) * sizes
        return {
            "features": graph.num_features,
            "classes": self.classes,
            "task": graph.task.name,
            "counts": [int(n) for n in masks],
            "nodes": int(graph.size("nodes")) * sizes,
            "metric": self.metric,
            "words": list(self.words),
        }


def write_clients(federation: Federation, folder: Path) -> list[Path]:
    """Write one data file for each client of a federation. Return their paths."""
    shared = {name: getattr(federation, name) for name in ("classes", "name", "metric")}
    paths = [folder / f"client-{i + 1}{SUFFIX}" for i in range(len(federation))]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path, graph in zip(paths, federation.graphs, strict=True):
        # Only its owner may read a client's data.
        save_checkpoint(path, {"kind": KIND, "graph": graph, **shared}, mode=0o600)
    return paths


def read_site_data(
    path: Path,
    *,
    schema: Path | None = None,
    classes: Sequence[str] = (),
    split: str = "stratified",
    seed: int = 0,
    rare: int = 1,
    encoder: Encoder | None = None,
) -> SiteData:
    """Read a site's data: a file of `write_clients`, or anything that `--data PATH` accepts.

    `schema` contains the column roles of tables. `classes` lists all classes of the federation, and
    this site may lack some of them. A split in the data takes precedence over `split` and `seed`.
    A category value in fewer than `rare` rows is not sent. `encoder` is the common encoder.
    """
    if path.suffix == SUFFIX:
        content = load_checkpoint(path)
        if not isinstance(content, dict) or content.get("kind") != KIND:
            hint = "give what `atoll federate split` wrote"
            raise DataError(f"'{path}' is not a client's data; {hint}")
        return SiteData(content["graph"], content["classes"], content["name"], content["metric"])
    from atoll.data.own.reader import load_own

    given: dict[str, Any] = {
        "schema": schema,
        "classes": classes,
        "split": split,
        "seed": seed,
        "rare": rare,
    }
    alone = OwnOptions(time=time_column(split), encoder="pooled", min_classes=1)
    source, report = load_own(path, schema, alone, encoder=encoder, telling=rare)
    source = source.prepared()
    labels, count = source.y, source.classes
    names = tuple(map(str, report.classes))
    if classes:
        if "" in classes or len(set(classes)) < len(classes):
            raise ConfigError("--classes has an empty name or one twice; name each class once")
        lacking = [name for name in names if name not in classes]
        if lacking:
            raise ConfigError(f"'{path}' has class '{lacking[0]}', which --classes does not name")
        place = np.array([list(classes).index(name) for name in names], dtype=np.int64)
        labels = np.where(labels >= 0, place[labels.clip(min=0)], -1)
        names, count = tuple(classes), len(classes)
    if count < 2:
        hint = "list all classes of the federation, two or more, with --classes"
        raise DataError(f"'{path}' has only the class '{names[0]}'; {hint}")
    source = replace(source, y=labels, classes=count)
    everyone = np.arange(source.num_nodes)
    recipe = "given" if source.split is not None else split
    roles = assign_roles(source, [everyone], recipe, seed=seed)[0]
    grows = growth(source, recipe, None)
    graph = InducedSubgraphs(source).graph(everyone, roles, grows)
    check_client(f"'{path}'", graph, labels, ("no-edge", "single-class"))
    words = (*(f"class {n}" for n in names), *(f"column {n}" for n in report.features))
    plain = None if source.encoder is None else replace(source.encoder, classes=names).plain()
    again = partial(read_site_data, path, **given)
    found = SiteData(graph, count, path.resolve().name, words=words, encoder=plain)
    return replace(found, declared=bool(classes), told=report.told, read=again)
