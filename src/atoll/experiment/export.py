"""Export of a run's model for use without Atoll: PyG layers, weights and the encoder."""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch
from torch import Tensor

from atoll.core.errors import ConfigError, check_name
from atoll.core.files import write_atomically
from atoll.core.method import Embedder, Net
from atoll.core.tree import Tree, named_leaves
from atoll.experiment import exported
from atoll.experiment.predict import Trained
from atoll.nn import NETS
from atoll.nn.nets import GAT, GCN, MLP, SGC, GraphSAGE
from atoll.nn.residual import Duo, Residual

FORMS = ("pyg",)
Layer = tuple[str, int, int, int]
"""The arguments of `exported.layer`: kind, input and output width, and heads or hops (else 1)."""
LINEAR = "linear", {"weight": "weight", "bias": "bias"}
LAYERS = {
    GCN: ("gcn", {"weight": "lin.weight", "bias": "bias"}),
    GraphSAGE: (
        "sage",
        {"neighbour": "lin_l.weight", "bias": "lin_l.bias", "self": "lin_r.weight"},
    ),
    GAT: (
        "gat",
        {"weight": "lin.weight", "source": "att_src", "target": "att_dst", "bias": "bias"},
    ),
    SGC: ("sgc", {"weight": "lin.weight", "bias": "lin.bias"}),
    MLP: LINEAR,
    Residual: LINEAR,  # its blocks are layers of GraphSAGE
}
"""The kind of each network's layers, and PyG's names of their parameters."""


def export(
    folder: str | Path, out: Path, *, to: str = "pyg", client: str = "", seed: int | None = None
) -> list[Path]:
    """Write model.py, model.json and weights.pt of the global model, or of a client's model.

    Return the paths of the three files.
    """
    check_name("form of an export", to, FORMS)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"'{out}' exists and is not empty; choose another --out")
    trained = Trained.of(Path(folder), seed, "cpu", None)
    layers, weights = network(trained, client)
    owner = (trained.config.partition or "").removeprefix("column:")
    about = {
        **layers,
        "owner": None if client else owner,  # training excluded edges between owners
        "classes": trained.classes,
        "alert": trained.alert(None),  # the number of the class, and its threshold
        "encoder": None if trained.encoder is None else trained.encoder.of_client(client).plain(),
        "run": {name: trained.about[name] for name in ("method", "data", "round", "versions")},
    }
    content = io.BytesIO()
    torch.save(weights, content)
    files = {
        "model.py": Path(exported.__file__).read_bytes(),
        "model.json": json.dumps(about, indent=1, ensure_ascii=False).encode(),
        "weights.pt": content.getvalue(),
    }
    for name, data in files.items():
        write_atomically(out / name, data)
    return [out / name for name in files]


def network(trained: Trained, client: str) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Return a model's layers with their activation, and its weights by PyG's names.

    Without a client's name it is the global model.
    """
    method, own = trained.method, trained.model.of_client(trained.place(client))
    if (params := method.plain_params(*own)) is None:
        more = "computes more than its network does, which PyG has no layer for"
        raise ConfigError(f"{trained.config.method} {more}; use atoll predict")
    if not isinstance(method.net, Duo):
        return described(method.net, params)
    branches, weights = list[object](), dict[str, Tensor]()
    for number, net in enumerate(method.net.branches):
        about, found = described(net, params[number])
        branches.append(about)
        weights |= {f"branches.{number}.{name}": tensor for name, tensor in found.items()}
    equal = torch.zeros(method.net.classes), torch.ones(len(branches))  # as in `Duo`
    prior, shares = method.mixture(own[1]) or equal
    return {"branches": branches, "prior": prior.tolist(), "shares": shares.tolist()}, weights


def described(net: Net | Embedder, params: Tree) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Return the layers of one network with their activation, and its weights by PyG's names."""
    layers, weights = pyg_layers(net, params)
    activation = "elu" if isinstance(net, GAT) else "relu"
    about: dict[str, object] = {"layers": layers, "activation": activation}
    if isinstance(net, Residual):
        about |= {"residual": True, "norm": net.norm == "layer", "jump": net.jump}
    return about, weights


def module(trained: Trained, client: str = "") -> exported.Network:
    """Return the model as a module on the CPU that computes logits: `net(x, edges, weight)`."""
    about, weights = network(trained, client)
    with torch.random.fork_rng(devices=[]):  # layers draw initial weights, which are replaced
        net = exported.Network(about)
    net.load_state_dict(weights)
    return net.cpu().eval()


def pyg_layers(net: Net | Embedder, params: Tree) -> tuple[list[Layer], dict[str, Tensor]]:
    """Return the layers of a network, and their weights by PyG's names."""
    if type(net) not in LAYERS:
        known = ", ".join(name for name, kind in NETS.items() if kind in (*LAYERS, Duo))
        problem = f"network {type(net).__name__} has no layers of PyG that compute the same"
        raise ConfigError(f"{problem}; networks that do: {known}")
    found, weights = list[Layer](), dict[str, Tensor]()
    for number, part in enumerate(params):
        (kind, names), count, layer = LAYERS[type(net)], 1, part
        if isinstance(net, GAT):
            count = int(layer["source"].shape[0])
        elif isinstance(net, SGC):
            count = net.hops
        elif isinstance(net, GCN) and net.head == "linear" and number == len(params) - 1:
            kind, names = LINEAR
        elif isinstance(net, Residual) and 0 < number < len(params) - 1:
            (kind, names), own = LAYERS[GraphSAGE], layer["weight"].chunk(2, -1)
            layer = {"self": own[0], "neighbour": own[1], "bias": layer["bias"]}
        for name, tensor in named_leaves(layer):
            attention = name in ("source", "target")
            matrix = tensor.unsqueeze(0) if attention else tensor.T if tensor.dim() == 2 else tensor
            weights[f"layers.{number}.{names[name]}"] = matrix.contiguous().clone()
        first = layer["neighbour" if kind == "sage" else "weight"]
        found.append((kind, *first.shape, count))
    return found, weights
