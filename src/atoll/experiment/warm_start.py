"""A server that starts from the models of an earlier run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from atoll.core.aggregate import spread
from atoll.core.errors import ConfigError
from atoll.core.message import ToAll
from atoll.core.method import Method
from atoll.core.tree import Tree, leaves, named_leaves, stack, tree_map


def with_models(method: Method, server: Tree, models: Sequence[Tree], origin: str) -> Tree:
    """Return the server's first tree with the models of an earlier run instead of random ones.

    A single model replaces a single model, or the model of every client. One model per client
    needs a method with one model per client, and the same number of clients.
    """
    message, name = method.deploy(server), type(method).__name__
    own = message.tree
    if not any(leaf.is_floating_point() for leaf in leaves(own)):
        raise ConfigError(f"the server of {name} has no model, so it cannot start from '{origin}'")
    if len(models) == 1:
        start = models[0] if isinstance(message, ToAll) else spread(models[0], len(leaves(own)[0]))
    elif isinstance(message, ToAll):
        has = f"the run in '{origin}' has a model for each client, but {name} starts from one"
        raise ConfigError(f"{has}; choose a method that has one for each client")
    else:
        start = stack(list(models))
    mine, given = (dict(named_leaves(tree)) for tree in (own, start))
    differ = [key for key in {**mine, **given} if _shape(mine, key) != _shape(given, key)]
    if differ:
        key = differ[0]
        shapes = f"'{key}' is {_shape(given, key)} there and {_shape(mine, key)} in {name}"
        hint = "use the same network, columns, classes and clients"
        raise ConfigError(f"the model of '{origin}' does not fit: {shapes}; {hint}")
    names = iter(mine)
    fitted = tree_map(lambda old: given[next(names)].to(old.device, old.dtype), own)
    return method.redeploy(server, fitted)


def _shape(tree: Mapping[str, Tensor], name: str) -> object:
    return tuple(tree[name].shape) if name in tree else "absent"
