"""A method around another method: it forwards a written list of hooks, and never a step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, cast

from torch import Tensor

from atoll.core.graph import Graph, View
from atoll.core.message import Message
from atoll.core.method import Clients, Method
from atoll.core.tree import Tree


class Wrapper(Method):
    """Forwards every hook of `Method` to its base, except `why_not_private`.

    Each hook is written out, because `__getattr__` would also forward steps, and a step of the base
    runs without the wrapper's protection (`core.method.declared_step`). A subclass is a frozen
    dataclass with a field `base`; where that may be None, `Method`'s own hooks apply. A subclass
    that keeps more on the server than its base overrides `of_base`.
    """

    base: Method | None

    @property
    def _hooks(self) -> Method:
        """Whose hooks apply."""
        return cast(Method, super()) if self.base is None else self.base

    def of_base(self, server: Tree) -> Tree:
        """The base's part of the server's tree."""
        return server

    @property
    def views(self) -> Mapping[str, View]:
        return self._hooks.views

    def init(self, clients: Clients) -> Tree:
        return self._hooks.init(clients)

    def loss(self, params: Tree, graph: Graph, key: Tensor | None) -> Tensor:
        return self._hooks.loss(params, graph, key)

    def round(self, server: Tree, clients: Clients) -> Tree:
        return self._hooks.round(server, clients)

    def stage(self, round: int) -> Hashable:
        return self._hooks.stage(round)

    def deploy(self, server: Tree) -> Message:
        return self._hooks.deploy(self.of_base(server))

    def redeploy(self, server: Tree, tree: Tree) -> Tree:
        return self._hooks.redeploy(self.of_base(server), tree)

    def local(self, reply: Any) -> Tree:
        return self._hooks.local(reply)

    def predict(
        self, graph: Graph, message: Tree, state: Tree, key: Tensor | None = None
    ) -> Tensor:
        return self._hooks.predict(graph, message, state, key)

    def derived_from(self, state: Tree) -> Tree:
        return self._hooks.derived_from(state)

    def derive(self, graph: Graph, part: Tree) -> Tree:
        return self._hooks.derive(graph, part)

    def diagnostics(self, server: Tree) -> Mapping[str, Any]:
        return self._hooks.diagnostics(self.of_base(server))

    def explain_edges(self, graph: Graph, message: Tree, state: Tree) -> Tensor | None:
        return self._hooks.explain_edges(graph, message, state)

    def scored_as(self) -> str:
        return self._hooks.scored_as()

    def too_short(self, rounds: int) -> str:
        return self._hooks.too_short(rounds)
