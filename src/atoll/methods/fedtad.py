"""FedTAD: distil each client's most reliable knowledge on generated graphs (Zhu et al., 2024).

    once      φ_k^c = Σ_{i train, y_i = c} mean_{j ∈ N(i)} cos(h_i, h_j),  h = [x ‖ walk returns].
    round     Clients train; the base method (FedAvg) aggregates their models to w̃.
    I times   z ~ N(0, 1);  X̂ = P(z, ŷ; θ);  Ĝ joins each row of X̂ to its nearest neighbours.
              I_g steps on θ:  minimise  λ1 L_sem + λ2 L_div - L_diverg.
              I_d steps on w̃:  minimise  L_diverg.
    L_sem = Σ_k Σ_i r_ki CE(f_k(i), ŷ_i),   L_diverg = Σ_k Σ_i r_ki KL(f̃(i) ‖ f_k(i)).
    L_div = mean_ij cos(x̂_i, x̂_j),         r_ki = φ_k^ŷi / Σ_k φ_k^ŷi over the participants.
    P is the generator, Ĝ a pseudo graph. ŷ contains about equally many labels of each class. f_k
    are the predictions of client k's model, f̃ those of w̃.

Wire, per client and round:  down  the base's message      up  the base's reply; once, φ
Private state: the base's (the optimizer's moments for FedAvg).
Floats per client and round: the base's (FedAvg: twice the parameters, and one); once C for C
classes.
Departures from the reference code: φ is Eqs. 3 to 5. The code's φ (`reliability=reference`) is in
effect the number of labelled nodes, because its transition matrix is diagonal and walks visit
random nodes. Negative φ count as zero, and so does a class that no participant has. Predictions on
pseudo graphs have no dropout (`server_dropout=true` is the code's behaviour). FedTAD-r-eq of Fig.
4a distils on the real graph, which no server has. It is the baseline `fedtad-real` of `atoll
compare`, an oracle without privacy. Variants in which paper and code differ have names:
- `discrepancy` kl | l1 (the code's; its generator holds local predictions fixed);
- `diversity` cosine | mode-seeking (the code adds it once per client);
- `reduce` sum | mean over the pseudo nodes of a class;
- `neighbours_by` dot | cosine (the code's, made symmetric).
With a base that personalises, the same teachers correct every participant's model. Distillation
then pulls the models towards the common predictions. The server's two rates are shares of the
clients' rate. The default is a tenth as in the code (1e-3 for 1e-2; the paper reports no value),
because an absolute 1e-3 ruins the model at a client rate of 1e-3. If clients do not use Adam, the
shares refer to Adam's default rate, 1e-2. The default of I is 1, chosen on validation scores from
the paper's grid {1, 3, 5, 10}. The code's I = 5 slows convergence at small rates. Both presets keep
it, and so do recipes of the papers' tables without a tuned I.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.aggregate import Aggregate, Mean, Update, put, with_model
from atoll.core.errors import ConfigError
from atoll.core.fit import minimise
from atoll.core.graph import Graph, View, make_graph
from atoll.core.hyper import NonNegative, OneOrMore, Positive, Width, ZeroOrMore
from atoll.core.message import ToAll, ToEach
from atoll.core.method import Clients, Method, client_step
from atoll.core.optim import Adam
from atoll.core.random import fold, normal
from atoll.core.space import USUAL, Real, Whole, paper_grid, preset_table
from atoll.core.training import Averaging
from atoll.core.tree import Empty, Tree, leaves, record, take, tree_map
from atoll.core.wrapper import Wrapper
from atoll.nn import fedtad as parts

PLAYED = ("iterations", "generator_steps", "distil_steps")
"""I, I_g and I_d."""


@record
class Reliability:
    """The reply that a client sends once: the reliability of its knowledge of each class, (C,)."""

    phi: Tensor


@record
class Server:
    """The base method's tree, the clients' reliabilities, and the state of the distillation."""

    base: Tree
    phi: Tensor
    generator: Tree
    generator_moments: Tree
    model_moments: Tree


@dataclass(frozen=True)
class FedTAD(Wrapper, Averaging):
    """Topology-aware data-free distillation. Without a base it averages as FedAvg does."""

    base: Annotated[Method | None, "method that aggregates; none: FedAvg"] = None
    reliability: Annotated[
        Literal["topology", "nodes", "equal", "reference"], "φ: measure of a client's reliability"
    ] = "topology"
    walk_length: Annotated[OneOrMore, "longest walk whose return probability is a feature"] = 5
    phi_noise: Annotated[float, "relative noise on φ before it is sent"] = 0.0
    iterations: Annotated[ZeroOrMore, "I: iterations of generator and model per round"] = 1
    generator_steps: Annotated[ZeroOrMore, "I_g: steps of the generator"] = 1
    distil_steps: Annotated[ZeroOrMore, "I_d: steps of the distilled model"] = 5
    pseudo_nodes: Annotated[Width, "nodes of a pseudo graph"] = 100
    noise_size: Annotated[Width, "width of the noise z"] = 32
    neighbours: Annotated[OneOrMore, "nearest neighbours of a node in a pseudo graph"] = 5
    lam_sem: Annotated[float, "λ1: weight of L_sem"] = 1.0
    lam_div: Annotated[float, "λ2: weight of L_div"] = 1.0
    lam_diverg: Annotated[float, "weight of L_diverg for the generator"] = 1.0
    generator_ratio: Annotated[Positive, "generator's rate, as a share of the clients'"] = 0.1
    distil_ratio: Annotated[Positive, "distilled model's rate, as a share of the clients'"] = 0.1
    generator_lr: Annotated[NonNegative, "absolute rate of the generator; 0: use the share"] = 0.0
    distil_lr: Annotated[NonNegative, "absolute rate of the distilled model; 0: the share"] = 0.0
    discrepancy: Annotated[Literal["kl", "l1"], "D in L_diverg"] = "l1"
    diversity: Annotated[Literal["cosine", "mode-seeking"], "form of L_div"] = "mode-seeking"
    reduce: Annotated[Literal["sum", "mean"], "over the pseudo nodes of a class"] = "mean"
    neighbours_by: Annotated[Literal["dot", "cosine"], "similarity for pseudo edges"] = "cosine"
    server_dropout: Annotated[bool, "whether predictions on pseudo graphs use dropout"] = False
    aggregate: Aggregate = Mean()

    space = USUAL | {
        **dict.fromkeys(("lam_sem", "lam_div"), Real(1e-3, 10, log=True)),
        **dict.fromkeys(PLAYED, Whole(1, 10)),
        **dict.fromkeys(("generator_ratio", "distil_ratio"), Real(1e-2, 1, log=True)),
    }
    grids = paper_grid(
        **dict.fromkeys(("lam_sem", "lam_div"), (0.1, 0.01, 0.001)),
        **dict.fromkeys(PLAYED, (1, 3, 5, 10)),
        hidden=(64, 128),
    )
    paper = (
        "Zhu et al., FedTAD: Topology-aware Data-free Knowledge Distillation for Subgraph "
        "Federated Learning, IJCAI 2024"
    )
    not_private = (
        "its clients also send how reliable each of their classes is, and the server "
        "distils from each of their models"
    )
    repeats = ("epochs", "iterations", "generator_steps", "distil_steps")
    presets = preset_table(
        *("reliability", "discrepancy", "diversity", "reduce", "neighbours_by"),
        *("lam_sem", "lam_div", "server_dropout", "iterations"),
        # Eqs. 3 to 11. The paper tunes both λ and reports no choice; these are its grid's middle.
        paper=("topology", "kl", "cosine", "sum", "dot", 0.01, 0.01, False, 5),
        # The public code's defaults, with the errors of its φ and dropout on the server.
        reference=("reference", "l1", "mode-seeking", "mean", "cosine", 1.0, 1.0, True, 5),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = (Mean(), getattr(self.base, "aggregate", Mean()))
        if self.base is not None and self.aggregate not in allowed:
            raise ConfigError(
                f"fedtad on a base aggregates as {type(self.base).__name__} does; remove "
                "aggregate, or give it to the base as well"
            )

    @property
    def views(self) -> Mapping[str, View]:
        alike: View = _every_node_alike
        if self.reliability == "topology":
            alike = partial(parts.neighbour_similarity, length=self.walk_length)
        elif self.reliability == "reference":
            alike = partial(parts.visited_similarity, length=self.walk_length)
        return {**self._hooks.views, "similarity": alike}

    @property
    def generator(self) -> parts.Generator:
        """The conditional generator P."""
        return parts.Generator(self.net.features, self.net.classes, self.noise_size)

    @property
    def generator_optimizer(self) -> Adam:
        return Adam(lr=self.generator_lr or self.generator_ratio * self._client_rate)

    @property
    def distil_optimizer(self) -> Adam:
        return Adam(lr=self.distil_lr or self.distil_ratio * self._client_rate)

    @property
    def _client_rate(self) -> float:
        return self.optimizer.lr if isinstance(self.optimizer, Adam) else Adam().lr

    def init(self, clients: Clients) -> Server:
        if self.pseudo_nodes < self.net.classes:
            raise ConfigError(
                f"pseudo_nodes is {self.pseudo_nodes}, fewer than the {self.net.classes} classes; "
                f"give at least {self.net.classes}"
            )
        base = self._hooks.init(clients)
        generator = self.generator.init(fold(clients.key, "generator"))
        moments = self.generator_optimizer.init(generator)
        deployed, of_model = self._hooks.deploy(base), self.distil_optimizer.init
        if isinstance(deployed, ToEach):
            of_model = torch.func.vmap(of_model)
        found = clients.map(self.assess, ToAll(Empty())).phi
        # An absent site has no reliability in any class, also when it returns.
        phi = put(found.new_zeros(clients.total, *found.shape[1:]), clients.positions, found)
        return Server(base, phi, generator, moments, of_model(deployed.tree))

    def round(self, server: Server, clients: Clients) -> Server:
        base = self._hooks.round(server.base, clients)
        reply: Any = clients.replies.get("train")  # with a base, any record
        teachers = None if reply is None else self.local(reply)
        name = type(self.base).__name__
        if not leaves(getattr(reply, "model", teachers)):
            raise ConfigError(f"fedtad distils uploaded models, and {name} uploads no model")
        deployed = self._hooks.deploy(base)
        if self.scored_as() == "personalised" and not isinstance(deployed, ToEach):
            # All clients get one model, but each also has private layers, which never leave.
            raise ConfigError(f"fedtad distils whole models, and {name} uploads only their base")
        return self._distil(server, base, teachers, clients)

    def lesson(self, teachers: Tree, share: Tensor, personal: bool) -> "Lesson":
        """Return the distillation of one round. The baseline `fedtad-real` overrides it."""
        return Lesson(self, teachers, share, personal)

    def of_base(self, server: Server) -> Tree:
        return server.base

    def redeploy(self, server: Server, tree: Tree) -> Server:
        redeploy = with_model if self.base is None else self.base.redeploy
        return replace(server, base=redeploy(server.base, tree))

    @client_step(keeps_state=True)
    def assess(self, graph: Graph, nothing: Tree, state: Tree, key: Tensor) -> Reliability:
        """Compute the reliability of this client's knowledge of each class."""
        truth = functional.one_hot(graph.y, self.net.classes).to(graph.real.dtype)
        trusted = graph.tensor_view("similarity") * graph.train
        phi = (truth * trusted.unsqueeze(-1)).sum(0)
        if self.reliability == "equal":
            phi = torch.ones_like(phi)
        if self.phi_noise:
            phi = phi * (1 + self.phi_noise * normal(key, (self.net.classes,), phi.dtype))
        return Reliability(phi)

    @client_step
    def train(self, graph: Graph, model: Tree, state: Tree, key: Tensor) -> tuple[Update, Tree]:
        """FedAvg's step, used without a base: train the received model."""
        model, state = self.fit(graph, model, state, key)
        return Update(model, graph.size("nodes")), state

    def _distil(self, server: Server, base: Tree, teachers: Tree, clients: Clients) -> Server:
        """Alternate steps of generator and deployed model, then deploy the corrected model."""
        deployed, rows = self._hooks.deploy(base), clients.positions
        personal = isinstance(deployed, ToEach)
        students, moments = deployed.tree, server.model_moments
        if personal:
            students, moments = take(students, rows), take(moments, rows)
        # Matrices are stored by column, so products with all of them need no copy.
        stored = tree_map(lambda w: w.mT.contiguous().mT if w.dim() > 2 else w, teachers)
        lesson = self.lesson(stored, _share(server.phi[rows]), personal)
        lesson = replace(lesson, numbers=clients.numbers)
        start = server.generator, server.generator_moments, students, moments
        generator, its_moments, students, moments = lesson.play(*start, clients.key)
        if personal:
            students = put(deployed.tree, rows, students)
            moments = put(server.model_moments, rows, moments)
        clients.require_finite(
            students,
            "distillation diverged on the server (its model is not finite); lower distil_ratio, or "
            "the clients' learning rate",
        )
        server = Server(base, server.phi, generator, its_moments, moments)
        return self.redeploy(server, students)


@dataclass(frozen=True, eq=False)
class Lesson:
    """The distillation of one round: the teachers, and their shares of each class's reliability."""

    method: FedTAD
    teachers: Tree  # the participants' trained models, stacked (K, ...)
    share: Tensor  # r_k of each teacher and class, (K, C); columns sum to one or zero
    personal: bool  # whether students are stacked (one per participant) or a single model
    numbers: Tensor | None = None  # of the participants, for their noise, (K,); None: 0, 1, ...

    @cached_property
    def labels(self) -> Tensor:
        """Labels of the pseudo nodes, (B,): equal counts per class, the rest in the last class."""
        count, classes = self.method.pseudo_nodes, self.share.shape[1]
        each = torch.arange(count, device=self.share.device) // (count // classes)
        return each.clamp(max=classes - 1)

    @cached_property
    def weight(self) -> Tensor:
        """The loss weights r_ki, (K, B). `reduce=mean` divides by the class's pseudo nodes."""
        labels, weight = self.labels, self.share[:, self.labels]
        if self.method.reduce == "sum":
            return weight
        return weight / (labels.unsqueeze(1) == labels).sum(1)

    def play(
        self, generator: Tree, its_moments: Tree, students: Tree, moments: Tree, key: Tensor
    ) -> tuple[Tree, Tree, Tree, Tree]:
        """Run all iterations of a round: steps of the generator, then of the students.

        Return generator, its moments, students and their moments.
        """
        keys = [fold(key, "distil", number) for number in range(self.method.iterations)]
        noise = torch.func.vmap(self.noise)(torch.stack(keys)) if keys else ()
        for number, drawn in enumerate(zip(noise, keys, strict=True)):
            # The first iteration reads the server's trees. Later ones may overwrite their own.
            own = number > 0
            made = self.make_harder(generator, its_moments, students, *drawn, owned=own)
            generator, its_moments = made
            own = own or self.personal
            students, moments = self.teach(generator, students, moments, *drawn, owned=own)
        return generator, its_moments, students, moments

    def make_harder(
        self,
        generator: Tree,
        moments: Tree,
        students: Tree,
        noise: Tensor,
        key: Tensor,
        owned: bool = False,
    ) -> tuple[Tree, Tree]:
        """Train the generator. Return it and its moments.

        The loss is small if the teachers classify the generated nodes correctly, if the nodes
        differ, and if students and teachers disagree about them.
        """
        method, labels, weight = self.method, self.labels, self.weight

        def loss(params: Tree, key: Tensor) -> Tensor:
            x = method.generator(params, noise, labels)
            graph = self.pseudo_graph(x)
            taught = self.answers(self.teachers, graph, key, "teachers", many=True)
            found = self.answers(students, graph, key, "students", many=self.personal)
            found = found if self.personal else found.unsqueeze(0)
            known = taught.flatten(0, 1), labels.repeat(len(taught))
            wrong = functional.cross_entropy(*known, reduction="none")
            sem = (weight * wrong.reshape(weight.shape)).sum()
            fixed = taught.detach() if method.discrepancy == "l1" else taught
            gaps = [parts.divergence(one, fixed, weight, method.discrepancy) for one in found]
            diverg = torch.stack(gaps).mean() if self.personal else gaps[0]
            seeking = method.diversity == "mode-seeking"
            div = len(taught) * parts.mode_seeking(noise, x) if seeking else parts.mean_cosine(x)
            return method.lam_sem * sem + method.lam_div * div - method.lam_diverg * diverg

        optimizer, steps = method.generator_optimizer, method.generator_steps
        return minimise(loss, generator, optimizer, moments, steps, key, owned=owned)

    def teach(
        self,
        generator: Tree,
        students: Tree,
        moments: Tree,
        noise: Tensor,
        key: Tensor,
        owned: bool = False,
    ) -> tuple[Tree, Tree]:
        """Train the student, or each student, towards the weighted answers of the teachers.

        Return students and their moments.
        """
        method, weight = self.method, self.weight
        with torch.no_grad():
            graph = self.drawn(generator, noise)
            answers = self.answers(self.teachers, graph, many=True).contiguous()

        def loss(params: Tree, key: Tensor) -> Tensor:
            taught = answers
            if method.server_dropout:
                taught = self.answers(self.teachers, graph, key, "teachers", many=True)
            found = self.answers(params, graph, key, "students", many=False)
            return parts.divergence(found, taught, weight, method.discrepancy)

        def correct(student: Tree, moments: Tree) -> tuple[Tree, Tree]:
            optimizer, steps = method.distil_optimizer, method.distil_steps
            return minimise(loss, student, optimizer, moments, steps, key, owned=owned)

        each = torch.func.vmap(correct) if self.personal else correct
        corrected: tuple[Tree, Tree] = each(students, moments)
        return corrected

    def drawn(self, generator: Tree, noise: Tensor) -> Graph:
        """Return the pseudo graph that the students learn from."""
        return self.pseudo_graph(self.method.generator(generator, noise, self.labels))

    def noise(self, key: Tensor) -> Tensor:
        """Draw the generator's noise, (B, noise_size)."""
        shape = (self.method.pseudo_nodes, self.method.noise_size)
        return normal(fold(key, "noise"), shape, self.share.dtype)

    def pseudo_graph(self, x: Tensor) -> Graph:
        """Connect every row of generated features to its nearest neighbours."""
        method = self.method
        edges, weight = parts.nearest_neighbours(x, method.neighbours, method.neighbours_by)
        return make_graph(x, edges, self.labels, edge_weight=weight, views=method._hooks.views)

    def answers(
        self, models: Tree, graph: Graph, key: Tensor | None = None, whose: str = "", *, many: bool
    ) -> Tensor:
        """Return logits on one pseudo graph: of one model (B, C), or of `many` models (K, B, C)."""
        predict, noise = self.method.predict, None
        if key is not None and self.method.server_dropout:
            noise = fold(key, whose)
        if not many:
            return predict(graph, models, None, noise)
        keys = []
        if noise is not None:
            rows = torch.arange(len(leaves(models)[0]), device=noise.device)
            keys = [fold(noise, rows if self.numbers is None else self.numbers)]
        each = torch.func.vmap(lambda model, *key: predict(graph, model, None, *key))
        found: Tensor = each(models, *keys)
        return found


def _share(phi: Tensor) -> Tensor:
    """Return each participant's share of a class's reliability, (K, C), or zero if all are zero."""
    phi = phi.clamp(min=0)
    total = phi.sum(0)
    return torch.where(total > 0, phi / torch.where(total > 0, total, torch.ones_like(total)), 0.0)


def _every_node_alike(graph: Graph) -> Tensor:
    return torch.ones_like(graph.real)
