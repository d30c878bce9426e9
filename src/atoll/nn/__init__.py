"""Networks as frozen dataclasses: `init(key)` gives a parameter tree, calling it gives logits."""

from atoll.nn.disengcn import DisenGCN
from atoll.nn.gat import GAT
from atoll.nn.gcn import GCN
from atoll.nn.gin import GIN
from atoll.nn.mlp import MLP
from atoll.nn.sage import GraphSAGE
from atoll.nn.sgc import SGC

NETS = {
    "gcn": GCN,
    "sage": GraphSAGE,
    "gat": GAT,
    "gin": GIN,
    "sgc": SGC,
    "mlp": MLP,
    "disengcn": DisenGCN,
}
"""Every network by the name that a configuration gives it."""
