"""The model of the selected round: kept while a run trains, written to files, read back.

- `model.toml`: method, network, hyper-parameters, class names, the selected round, versions, and
  the threshold if the run chose one (`experiment.threshold`).
- `deployed.safetensors`: the tensors that the server deploys, for all clients or for each client.
- `private.safetensors`, if predictions need it: tensors that only their owner has, by client.
- `encoder.json`, if the data are the user's tables: how columns become features.
- `MODEL_CARD.md`, after the run has finished: the facts in Markdown (`experiment.card`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tomli_w
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from atoll.core.errors import DataError, WireError
from atoll.core.federation import Federation, LazyGraphs
from atoll.core.files import write_atomically
from atoll.core.graph import Graph, with_views
from atoll.core.message import Message, ToAll
from atoll.core.method import Method
from atoll.core.private_layers import private_names
from atoll.core.tree import Tree, num_bytes, tree_map, unstack
from atoll.engines.codec import decode, encode, pack_states, unpack_states
from atoll.experiment.card import CARD, data_facts, read_about, wire_of
from atoll.experiment.config import RunConfig
from atoll.experiment.hardware import environment
from atoll.experiment.history import History, Improvements, Selection
from atoll.experiment.threshold import Threshold

if TYPE_CHECKING:
    from atoll.data.own.encoder import Encoder

Trees = tuple[Tree, Tree]  # the server's tree and the clients' private states after a round
MOST_COPIED = 1 << 28  # most bytes of copies that wait for the scores of replayed rounds


@dataclass(frozen=True, eq=False)
class SelectedModel:
    """The model of the selected round. With some rules it differs between clients."""

    rounds: np.ndarray  # the selected round of each client, (K,)
    deployed: Sequence[Tree]  # the server's models: one for all clients, or one for each
    private: Sequence[Tree] = ()  # each client's tensors that predictions read, often none
    about: Mapping[str, object] | None = None  # the content of model.toml

    def of_client(self, place: int | None) -> tuple[Tree, Tree]:
        """Return a client's deployed and private tree. `place` is None for an untrained client."""
        deployed = self.deployed[(place or 0) if len(self.deployed) > 1 else 0]
        return deployed, self.private[place] if self.private and place is not None else None

    def predict(
        self, method: Method, graph: Graph, place: int, key: Tensor | None = None
    ) -> Tensor:
        """Return the logits of a client, on a graph with the method's views (`with_views`)."""
        return method.predict(graph, *self.of_client(place), key)

    def merged(self, new: SelectedModel, better: np.ndarray) -> SelectedModel:
        """Replace the models of the clients in `better` by newer ones."""

        def choose(old: Sequence[Tree], other: Sequence[Tree]) -> list[Tree]:
            one, two = (list(t) * (len(better) if len(t) == 1 else 1) for t in (old, other))
            return [b if new else a for a, b, new in zip(one, two, better, strict=True)]

        private = choose(self.private, new.private) if new.private else ()
        rounds = np.where(better, new.rounds, self.rounds)
        return SelectedModel(rounds, choose(self.deployed, new.deployed), private)

    def export(self) -> Tree:
        """Return the model as a tree, for a checkpoint."""
        both = {"deployed": self.deployed, "private": self.private}
        packed = {name: pack_states(list(trees)) for name, trees in both.items()}
        return tree_map(torch.Tensor.cpu, {"rounds": torch.from_numpy(self.rounds), **packed})

    @classmethod
    def of_export(cls, tree: Tree) -> SelectedModel:
        """Restore a model from the result of `export`."""
        trees = (unpack_states(tree[name]) for name in ("deployed", "private"))
        return cls(tree["rounds"].numpy(), *trees)

    def only_read(self, method: Method, federation: Federation) -> SelectedModel:
        """Remove private tensors that no prediction reads, such as optimizer moments."""
        if not self.private:
            return self
        model, found = SelectedModel.of_export(self.export()), list[Tree]()
        for place, own in enumerate(model.private):
            graph = with_views(federation.graphs[place], method.views)
            with torch.no_grad(), _ReadTensors() as watch:
                model.predict(method, graph, place)
            flat, spec = pytree.tree_flatten(own)
            flat = [leaf if id(leaf) in watch.read else None for leaf in flat]
            known = any(leaf is not None for leaf in flat)
            found.append(pytree.tree_unflatten(flat, spec) if known else None)
        return replace(model, private=found if any(own is not None for own in found) else [])


def reads_states(method: Method) -> bool:
    """Return whether predictions may read private states. The default reads private layers."""
    overrides = type(method).predict is not Method.predict
    return overrides or bool(private_names(method.net))


class ModelKeeper:
    """Keep a copy of the best model so far while a run trains."""

    def __init__(self, selection: Selection, method: Method, rounds: int) -> None:
        self.method, self.rule = method, selection
        self.improvements = Improvements(selection, rounds)
        self.reads_states = reads_states(method)
        self.model: SelectedModel | None = None

    def copied(self, trees: Trees) -> Trees:
        """Return a copy, because the replay of the next round overwrites the trees."""
        server, states = trees
        return tree_map(torch.clone, (server, states if self.reads_states else None))

    def rounds_ahead(self, trees: Trees, wanted: int) -> int:
        """Return how many rounds may be replayed before their scores are read."""
        size = num_bytes([trees[0], trees[1] if self.reads_states else None])
        return max(1, min(wanted, MOST_COPIED // max(size, 1)))

    def offer(self, history: History, number: int, trees: Callable[[], Trees]) -> None:
        """Check the newest round, and keep its model for the clients whose best round it is."""
        better = self.improvements.of(history, number)
        if not better.any():
            return
        server, states = trees()
        message: Message = self.method.deploy(server)
        tree, clients = tree_map(torch.clone, message.tree), len(history.nodes)
        new = SelectedModel(
            np.full(clients, number),
            [tree] if isinstance(message, ToAll) else unstack(tree, clients),
            # Real sites keep their states. An engine on this machine returns a list.
            tree_map(_kept, states) if self.reads_states and isinstance(states, list) else (),
        )
        if better.all():
            self.model = new
        elif self.model is not None:
            self.model = self.model.merged(new, better)

    def restore(self, history: History, exported: Tree) -> None:
        """Continue from a checkpoint. Checkpoints of earlier versions contain no model."""
        for number in range(history.rounds):
            self.improvements.of(history, number)
        self.model = None if exported is None else SelectedModel.of_export(exported)

    def selected(self, history: History) -> SelectedModel | None:
        """Return the model of the selected round, or None if it was not kept."""
        if self.model is None or (self.model.rounds != self.rule.rounds(history)).any():
            return None
        return self.model


def _kept(leaf: Tensor) -> Tensor:
    """Copy a tensor of a private state if it is on a GPU. In main memory no step overwrites it."""
    return leaf.clone() if leaf.is_cuda else leaf


class _ReadTensors(TorchFunctionMode):
    """Record the tensors that are passed to any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Tree = (), kwargs: Tree = None
    ) -> object:
        leaves = pytree.tree_leaves((args, kwargs))
        self.read |= {id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        return func(*args, **(kwargs or {}))


def write_model(
    folder: Path,
    model: SelectedModel,
    config: RunConfig,
    method: Method,
    federation: Federation,
    threshold: Threshold | None = None,
) -> None:
    """Write the files of a model (see the module), except its card."""
    each = len(model.deployed) > 1
    content = encode(_named(model.deployed) if each else model.deployed[0])
    (folder / CARD).unlink(missing_ok=True)  # left over if the run was extended
    write_atomically(folder / "deployed.safetensors", content)
    if model.private:
        write_atomically(folder / "private.safetensors", encode_private(model.private))
    rounds: list[int] = model.rounds.tolist()
    made: Mapping[str, object] = federation.about
    if names := getattr(federation, "names", ()):  # a roster of sites
        made = {**made, "client_names": list(names)}
    encoder = getattr(federation, "encoder", None)
    if encoder is not None:
        write_encoder(folder, encoder)
    about = {
        "round": rounds[0] if len(set(rounds)) == 1 else rounds,
        "clients": len(rounds),
        "one_per_client": each,
        "private_parts": bool(model.private),
        **described(config, method, federation),
        "encoder": encoder is not None,
        "measured": _measured(config) if encoder else "",
        **{name: made[name] for name in ("class_names", "client_names") if name in made},
        **({} if threshold is None else {"threshold": threshold.plain()}),
        "files": {"deployed.safetensors": hashlib.sha256(content).hexdigest()},
        "fingerprints": _data_facts(federation),
    }
    write_atomically(folder / "model.toml", tomli_w.dumps(about).encode())


def described(config: RunConfig, method: Method, federation: Federation) -> dict[str, object]:
    """Return the facts of a model that follow from configuration, method and data sizes."""
    evaluate, deployed = config.evaluate or "deployed", method.scored_as()
    text = json.dumps(asdict(method), default=str)
    return {
        **{name: getattr(config, name) for name in ("method", "data", "protocol")},
        "task": federation.task.name,
        "metric": config.metric or federation.metric,
        "deployed": deployed,
        "scored": deployed if evaluate == "deployed" else evaluate,
        "net": type(method.net).__name__,
        "features": federation.features,
        "classes": federation.classes,
        # TOML has no None, so such keys are omitted.
        "hyperparameters": json.loads(text, object_hook=_without_none),
        "versions": environment(),
        "wire": wire_of(method),
        "bound": method.why_bound(),
    }


def _measured(config: RunConfig) -> str:
    """Return how columns were measured: `encoder` if a column names owners, else "pooled"."""
    by_owner = (config.partition or "").startswith("column:")
    return (config.encoder or "federated") if by_owner else "pooled"


def _data_facts(federation: Federation) -> list[dict[str, object]]:
    """Return counts and fingerprints of the clients' data, or [] for a server or lazy graphs."""
    graphs = getattr(federation, "graphs", ())
    if isinstance(graphs, LazyGraphs) or not graphs:
        return []
    return list(map(data_facts, graphs, federation.client_names))


def write_encoder(folder: Path, encoder: Mapping[str, object]) -> None:
    """Write `encoder.json` into the folder of a model."""
    content = json.dumps(encoder, indent=1, ensure_ascii=False).encode()
    write_atomically(folder / "encoder.json", content)


def _without_none(found: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in found.items() if value is not None}


def _named(trees: Sequence[Tree]) -> dict[str, Tree]:
    return {f"client-{position}": tree for position, tree in enumerate(trees)}


def encode_private(private: Sequence[Tree]) -> bytes:
    """Return the content of `private.safetensors`."""
    return encode(_named(private))


def read_model(folder: Path) -> SelectedModel:
    """Read a model that `write_model` wrote."""

    def read(name: str, needed: bool) -> Tree:
        path = folder / f"{name}.safetensors"
        if not needed and not path.exists():
            return None
        return decode(path.read_bytes(), limit=1 << 40, finite=False)

    try:
        about = read_about(folder)
        deployed, picked = read("deployed", needed=True), about["round"]
        each = [deployed] if not about["one_per_client"] else list(deployed.values())
        rounds = [picked] * int(about["clients"]) if isinstance(picked, int) else picked
        # A site adds its own private part to a model that was delivered without one.
        private = read("private", needed=about["private_parts"])
        own = () if private is None else list(private.values())
    except (OSError, KeyError, ValueError, AttributeError, WireError) as error:
        problem = f"cannot be read ({type(error).__name__}: {error})"
        raise DataError(f"the model in '{folder}' {problem}; copy the folder whole") from error
    return SelectedModel(np.array(rounds), each, own, about)


def read_encoder(folder: Path) -> Encoder | None:
    """Read the encoder of the training tables, or None if the folder contains none.

    Models of graphs, of a federation's server and of earlier versions have none.
    """
    try:
        about = read_about(folder)
        file = folder / "encoder.json"  # a site may add one to a model without encoder
        if not about.get("encoder", False) and not file.exists():
            return None
        from atoll.data.own.encoder import Encoder

        return Encoder.from_plain(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        problem = f"has an encoder that cannot be read ({type(error).__name__}: {error})"
        raise DataError(f"the model in '{folder}' {problem}; copy the folder whole") from error
