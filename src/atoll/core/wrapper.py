"""Base of methods that wrap another method, such as `core.dp.Noised`.

A wrapper forwards a fixed list of hooks, and never a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from atoll.core.graph import View
from atoll.core.message import Message
from atoll.core.method import Method
from atoll.core.tree import Tree

Hook = TypeVar("Hook", bound=Callable[..., object])


def _forwarded(hook: Hook) -> Hook:
    """Return a method that forwards the hook to the base."""

    def forward(self: Wrapper, *args: object, **options: object) -> object:
        return getattr(self._hooks, hook.__name__)(*args, **options)

    return cast(Hook, forward)


class Wrapper(Method):
    """Forwards every hook of `Method` to its base, except `why_not_private`.

    Each hook is listed here, because `__getattr__` would also forward steps, and a step of the base
    runs without the wrapper's protection (`core.method.declared_step`). A subclass is a frozen
    dataclass with a field `base`. If `base` is None, `Method`'s own hooks apply.
    """

    base: Method | None

    @property
    def _hooks(self) -> Method:
        return cast(Method, super()) if self.base is None else self.base

    def of_base(self, server: Tree) -> Tree:
        """Return the base's part of the server's tree. A subclass that stores more overrides it."""
        return server

    @property
    def views(self) -> Mapping[str, View]:
        return self._hooks.views

    init = _forwarded(Method.init)
    round = _forwarded(Method.round)
    stage = _forwarded(Method.stage)
    loss = _forwarded(Method.loss)
    local = _forwarded(Method.local)
    predict = _forwarded(Method.predict)
    derived_from = _forwarded(Method.derived_from)
    derive = _forwarded(Method.derive)
    explain_edges = _forwarded(Method.explain_edges)
    scored_as = _forwarded(Method.scored_as)
    too_short = _forwarded(Method.too_short)
    why_bound = _forwarded(Method.why_bound)
    mixture = _forwarded(Method.mixture)

    def plain_params(self, message: Tree, state: Tree) -> Tree:
        return message if self.base is None else self.base.plain_params(message, state)

    @property
    def reach(self) -> int | None:
        return self._hooks.reach

    def deploy(self, server: Tree) -> Message:
        return self._hooks.deploy(self.of_base(server))

    def redeploy(self, server: Tree, tree: Tree) -> Tree:
        return self._hooks.redeploy(self.of_base(server), tree)

    def diagnostics(self, server: Tree) -> Mapping[str, Any]:
        return self._hooks.diagnostics(self.of_base(server))
