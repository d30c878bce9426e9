"""FedGNN: FedAvg on graphs that are extended by twin nodes of other clients (Wu et al., 2021).

    k_v = hash of the set of v's neighbours, computed once; v and u are twins if k_v = k_u.
    e_u = relu(first layer at u), from the received model, without dropout.
    The second layer at v has one more neighbour for each of the c_v twins u of other participants:
        Σ_j (A + I)_vj z_j / sqrt(D_v D_j) + Σ_u e_u W / D_v + b,     D_v = d_v + 1 + c_v,
    with z_j = h_j W. A twin has the weight of v itself, 1 / D_v. e_u is fixed within a round.
    θ <- Σ_i n_i θ_i / Σ_i n_i.

The published method recommends items to users. In tables of subgraph learning, its name means that
nodes with the same neighbours exchange embeddings. No code of this variant is public. The formulas
above, with neighbours inside a client only, are our interpretation. Clients that share no node have
no twins; then the method equals FedAvg, bit for bit. `server.pairs` counts pairs of twins.
`Graph.ids` identify nodes. They must be the numbers of the whole graph, as in Atoll's partitions.

Wire, per client and round:  down  model, sums and counts of twins      up  embeddings, model, n;
once, up keys of all nodes (padded to the largest client), down which nodes have twins.
Private state: the nodes with twins, the latest sums for them (a client also predicts with these),
and the optimizer's moments.
Floats per client and round: 2P + 1 without twins. With twins 3P + 1 + s (2h + 1), where s is the
largest number of nodes with twins at one client. The model is sent before and after the exchange.
What it tells: the keys show the server which nodes of different clients have equal neighbourhoods.
Keys are salted (`salt`, which real clients must hide from the server). A party that knows the salt
can guess small sets.
Departures from the reference code: the code pads a user's items with false items and has no second
layer. `clip` and `epsilon` are its local privacy: it clips an update to the norm `clip` and adds
Laplace noise of scale 2 clip / epsilon to each number. As there, epsilon is nominal, because
Laplace noise needs a bound on the L1 norm and `clip` bounds the L2 norm.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from atoll.core.aggregate import Aggregate, Mean, Update, aggregated, put, spread
from atoll.core.dp import clipped
from atoll.core.errors import ConfigError
from atoll.core.graph import Graph, View, sum_at
from atoll.core.hyper import NonNegative, OptimizerState, WeightBy
from atoll.core.message import ToAll, ToEach
from atoll.core.method import Clients, client_step
from atoll.core.random import fold, make_key, uniform
from atoll.core.training import Training
from atoll.core.tree import Empty, Tree, leaves, record, tree_map
from atoll.nn import views
from atoll.nn.nets import GCN
from atoll.nn.ops import matmul


@record
class Count:
    """The number of nodes of a client."""

    nodes: Tensor


@record
class Keys:
    """A key for every node, (S,). Zero means no neighbours or padding."""

    keys: Tensor


@record
class Twins:
    """For each node with twins: the sum of their embeddings, (s, h), and their number, (s,)."""

    total: Tensor
    count: Tensor


@record
class Embeddings:
    """First-layer embeddings of the nodes with twins, (s, h). Padding is zero."""

    rows: Tensor


@record
class Download:
    """The global model and, if any node has twins, their sums and counts."""

    model: Tree
    twins: Twins | None


@record
class Private:
    """The private state: nodes with twins, (s,), padded with -1, their sums, and the moments."""

    nodes: Tensor | None
    twins: Twins | None
    moments: Tree


@record
class Server:
    """The server's tree: the global model, the twins, and the state of the aggregation rule."""

    model: Tree
    group: Tensor  # the twins' group of each node with twins, (N, s), padded with -1
    pairs: Tensor  # the number of pairs of twins
    rule: Tree = None


@dataclass(frozen=True)
class FedGNN(Training):
    """Federated averaging with twins."""

    net: GCN
    weight_by: WeightBy = "nodes"
    optimizer_state: OptimizerState = "keep"
    clip: Annotated[NonNegative, "largest norm of an update; 0 for no clipping"] = 0.0
    epsilon: Annotated[NonNegative, "nominal ε of the Laplace noise; 0 for no noise"] = 0.0
    salt: Annotated[int, "salt of the keys, which the server must not know"] = 0
    aggregate: Aggregate = Mean()

    paper = (
        "Wu et al., FedGNN: Federated Graph Neural Network for Privacy-Preserving Recommendation, "
        "arXiv 2021"
    )
    not_private = "its clients send keys and embeddings of single nodes"
    nets = ("gcn",)
    bytes_per_node = 64  # measured: `match` sorts the keys of all clients

    def __post_init__(self) -> None:
        super().__post_init__()
        net = self.net
        if not isinstance(net, GCN) or net.layers - (net.head == "linear") < 2:
            raise ConfigError("fedgnn uses the second convolution of a gcn; give it at least two")
        if self.epsilon and not self.clip:
            raise ConfigError("epsilon needs a bound on the update; give clip as well")

    @property
    def views(self) -> Mapping[str, View]:
        keys = partial(neighbourhood_keys, salt=self.salt)
        return {**self.net.views, "neighbourhood": keys, "gcn_degree": views.gcn_degrees}

    @property
    def scale(self) -> float:
        """The scale of the Laplace noise on an update."""
        return 2 * self.clip / self.epsilon if self.epsilon else 0.0

    def init(self, clients: Clients) -> Server:
        most = int(clients.map(self.count, ToAll(Empty())).nodes.max())
        # A tensor without numbers: only its shape, the length of the reply, is sent.
        blank = torch.zeros(most, 0, device=clients.key.device)
        keys = clients.map(self.announce, ToAll(blank)).keys
        nodes, group, pairs = match(keys)
        # A site may have failed before: its row stays empty.
        none = nodes.new_full((clients.total, nodes.shape[1]), -1)
        nodes, group = (put(none, clients.positions, found) for found in (nodes, group))
        if nodes.shape[1]:
            clients.map(self.note, ToEach(nodes))
        model = self.net.init(clients.key)
        return Server(model, group, pairs, self.aggregate.init(model))

    def round(self, server: Server, clients: Clients) -> Server:
        message: ToAll | ToEach = ToAll(Download(server.model, None))
        if server.group.shape[1]:
            rows = clients.map(self.embed, ToAll(server.model)).rows
            found = of_others(rows, server.group[clients.positions], server.group.numel())
            none = tree_map(lambda leaf: leaf.new_zeros(clients.total, *leaf.shape[1:]), found)
            twins = put(none, clients.positions, found)
            message = ToEach(Download(spread(server.model, clients.total), twins))
        reply = clients.map(self.train, message)
        model, rule = aggregated(self.aggregate, server, reply, clients.key)
        return replace(server, model=model, rule=rule)

    @client_step(keeps_state=True)
    def count(self, graph: Graph, nothing: Empty, state: Tree, key: Tensor) -> Count:
        """Return the number of nodes."""
        return Count(graph.real.sum())

    @client_step(
        keeps_state=True, discloses={"keys": "the server finds equal neighbourhoods by their keys"}
    )
    def announce(self, graph: Graph, blank: Tensor, state: Tree, key: Tensor) -> Keys:
        """Return the keys of all nodes, padded with zeros to the requested length."""
        keys = graph.tensor_view("neighbourhood")[: len(blank), 0]
        return Keys(torch.cat([keys, keys.new_zeros(len(blank) - len(keys))]))

    @client_step
    def note(self, graph: Graph, nodes: Tensor, state: Tree, key: Tensor) -> tuple[Empty, Private]:
        """Store which nodes have twins."""
        return Empty(), Private(nodes, None, None)

    @client_step(
        keeps_state=True, discloses={"rows": "twins at other clients read them as a neighbour's"}
    )
    def embed(self, graph: Graph, model: Tree, state: Private, key: Tensor) -> Embeddings:
        """Return the first layer's output at the nodes with twins."""
        place, used = _places(state, graph)
        return Embeddings(torch.relu(self.net.embed(model[:2], graph))[place] * used.unsqueeze(-1))

    @client_step
    def train(
        self, graph: Graph, received: Download, state: Private | None, key: Tensor
    ) -> tuple[Update, Private]:
        """Train the received model on the extended graph."""
        own = replace(state or Private(None, None, None), twins=received.twins)

        def loss(params: Tree, graph: Graph, key: Tensor) -> Tensor:
            return graph.task.loss(self.predict(graph, params, own, key), graph)

        start, why = (received.model, own.moments), "fedgnn adds neighbours to the whole graph"
        model, moments = self.fit(graph, *start, key, loss=loss, needs_whole=why)
        model = self.hidden(model, received.model, fold(key, "privacy"))
        return Update(model, graph.size(self.weight_by)), replace(own, moments=moments)

    def why_bound(self) -> str:
        return "its clients predict with rows that others sent for the nodes they were trained on"

    def predict(
        self, graph: Graph, message: Tree, state: Private | None, key: Tensor | None = None
    ) -> Tensor:
        """Return logits, (N, C), with twins as additional neighbours in the second layer."""
        if state is None or state.twins is None:
            return self.net(message, graph, key)
        adjacency, degree = graph.views["gcn"], graph.tensor_view("gcn_degree")
        place, used = _places(state, graph)
        more = torch.zeros_like(degree).index_add(0, place, state.twins.count * used)
        degree = degree.clamp(min=0)
        # Degrees grow on both sides of the adjacency, which is then S Â S with S = diag(shrink).
        shrink = torch.where(more > 0, (degree / (degree + more).clamp(min=1)).sqrt(), 1.0)
        shrink = shrink.unsqueeze(-1)
        share = state.twins.total * (used / (degree + more).clamp(min=1)[place]).unsqueeze(-1)

        def propagate(z: Tensor, bias: Tensor) -> Tensor:
            inside = shrink * matmul(adjacency, shrink * z)
            return inside.index_add(0, place, share @ message[1]["weight"]) + bias

        h = self.net.embed(message[:2], graph, key)
        for number, layer in enumerate(message[1:], start=1):
            spread_over = propagate if number == 1 else partial(matmul, adjacency)
            h = self.net.dropped(h, number, graph, key)
            h = self.net.convolved(layer, h, number, spread_over)
        return h

    def hidden(self, model: Tree, start: Tree, key: Tensor) -> Tree:
        """Clip the model's update if `clip` is set, and add noise to it if `epsilon` is set."""
        if not self.clip:
            return model
        update = clipped(tree_map(torch.sub, model, start), self.clip)
        if not self.epsilon:
            return tree_map(torch.add, update, start)
        number = iter(range(len(leaves(update))))

        def noisy(leaf: Tensor, before: Tensor) -> Tensor:
            noise = laplace(fold(key, next(number)), tuple(leaf.shape), leaf.dtype)
            return before + leaf + self.scale * noise

        return tree_map(noisy, update, start)


def _places(own: Private, graph: Graph) -> tuple[Tensor, Tensor]:
    """Return the rows of the nodes with twins, and a mask that is zero for padding, (s,) each."""
    assert own.nodes is not None
    used = (own.nodes >= 0).to(graph.real.dtype)
    # A real client needs no clamp. The wire tries steps on a small dummy graph, which does.
    return own.nodes.clamp(0, graph.num_nodes - 1), used


def neighbourhood_keys(graph: Graph, salt: int) -> Tensor:
    """Hash the ids of each node's neighbours, (N, 1) int64. Zero without neighbours."""
    source, target = graph.edges
    size, root = graph.num_nodes, fold(make_key(salt, source.device), "neighbourhood")
    pair = (target * size + source)[(source != target) & (graph.edge_weight != 0)].unique()
    target, source = pair // size, pair % size
    # A sum of hashes ignores the order. The second hash prevents its decomposition.
    total = torch.zeros_like(graph.y).index_add(0, target, fold(root, graph.ids[source]))
    some = torch.zeros_like(graph.y).index_add(0, target, torch.ones_like(target))
    return torch.where(some > 0, fold(root, "set", total), 0).unsqueeze(-1)


def match(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find twins in the keys of N clients, (N, S).

    Return each client's nodes with a twin at another client, (N, s), their groups, (N, s), and the
    number of pairs of twins. Twins have the same group number. -1 pads nodes and groups.
    """
    values, number = torch.unique(keys, return_inverse=True)
    client = torch.arange(len(keys), device=keys.device).unsqueeze(-1)
    pair, inside = torch.unique(client * len(values) + number, return_counts=True)
    value = pair % len(values)  # once for each client that has it
    shared = (torch.bincount(value, minlength=len(values)) > 1) & (values != 0)
    total = torch.bincount(number.flatten(), minlength=len(values))
    squares = torch.zeros_like(total).index_add(0, value, inside * inside)
    # Sorted by group number, so that the order does not disclose a client's numbering.
    group = torch.where(shared, shared.cumsum(0) - 1, len(values))[number]
    group, nodes = group.sort(dim=1, stable=True)
    most = int(shared[number].sum(1).max())
    used, group, nodes = (t[:, :most] for t in (group < len(values), group, nodes))
    pairs = ((total * total - squares) * shared).sum() // 2
    return torch.where(used, nodes, -1), torch.where(used, group, -1), pairs


def of_others(rows: Tensor, group: Tensor, groups: int) -> Twins:
    """Sum the twins at other clients, given embeddings (K, s, h) and groups (K, s).

    `groups` exceeds all group numbers. A client's nodes of one group must be in successive rows.
    """
    used = (group >= 0).to(rows.dtype).unsqueeze(-1)
    counted = torch.cat([rows, torch.ones_like(used)], dim=-1) * used
    # No number is read on the host, so that a GPU can record the round.
    new = (group != group.roll(1, 1)).long()
    new[:, 0] = 1
    inside = new.flatten().cumsum(0).reshape(group.shape) - 1  # numbers each client's groups
    flat, group = counted.flatten(0, 1), group.clamp(min=0)
    everyone = sum_at(group.flatten(), flat, groups)
    own = sum_at(inside.flatten(), flat, group.numel())
    others = (everyone[group] - own[inside]) * used
    count = others[..., -1].round()
    return Twins(others[..., :-1] * (count > 0).unsqueeze(-1), count)


def laplace(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Draw Laplace noise of scale one."""
    centred = uniform(key, shape, dtype) - 0.5
    return -centred.sign() * torch.log1p(-2 * centred.abs())
