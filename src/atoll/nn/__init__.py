"""Networks as frozen dataclasses: `init(key)` makes a parameter tree, a call returns logits.

`ops` contains the products that all networks use, `views` the matrices that they precompute from a
graph, and `kernels` the Triton kernels for GPUs. A module named after a method contains its parts.

Examples:
    >>> from atoll.core.random import make_key
    >>> from atoll.core.tree import leaves
    >>> from atoll.nn import GCN
    >>> model = GCN(features=10, classes=3, hidden=8).init(make_key(0))
    >>> sum(leaf.numel() for leaf in leaves(model))
    115
"""

from collections.abc import Callable

from atoll.core.method import Net, task_of
from atoll.nn.disengcn import DisenGCN
from atoll.nn.gin import GIN, GraphGIN
from atoll.nn.nets import GAT, GCN, MLP, SGC, GraphSAGE
from atoll.nn.polynomials import GAMLP, ChebNet
from atoll.nn.residual import Duo, Residual

NETS = {
    "gcn": GCN,
    "sage": GraphSAGE,
    "gat": GAT,
    "gin": GIN,
    "sgc": SGC,
    "mlp": MLP,
    "residual": Residual,
    "duo": Duo,
    "gamlp": GAMLP,
    "chebnet": ChebNet,
    "disengcn": DisenGCN,
    "gin-graph": GraphGIN,
}
"""Every network, by its name in a configuration."""


def nets_for(task: str) -> dict[str, Callable[..., Net]]:
    """Return the networks for a task, given its name in `TASKS`."""
    return {name: net for name, net in NETS.items() if task_of(net) == task}


EMBEDDERS = tuple(name for name, net in NETS.items() if hasattr(net, "embed"))
"""Names of the networks with a separate last layer (`core.method.Embedder`)."""
