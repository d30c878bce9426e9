"""Trees of tensors: nested records, dicts, tuples and lists with tensors at the leaves.

Models, messages, states and graphs are trees. `record` makes a class a tree node, which `vmap`,
the wire format and checkpoints understand. `tree_map`, `stack` and `take` work on all trees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast, dataclass_transform

import torch
from torch import Tensor
from torch._C import _functorch
from torch.utils import _pytree as pytree

Tree = Any
"""A tensor, or a nested list, tuple, dict or record of trees.

The type is Any, because no type checker follows a recursive type through records.
"""
T = TypeVar("T")

RECORDS: dict[str, type[Any]] = {}
"""Every record type by its dotted name. Decoders create no other classes."""
_FIELDS: dict[type[Any], tuple[tuple[str, bool], ...]] = {}
"""The fields of every record type, in order: name, and whether the field is static."""


def static(default: Any) -> Any:
    """Declare a record field that is part of the structure (a flag, a name), not a tensor tree."""
    return dataclasses.field(default=default, metadata={"static": True})


@dataclass_transform(frozen_default=True, field_specifiers=(static,))
def record(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass and a tree node for `vmap`, the wire and checkpoints."""
    # A field that is None is part of the structure, like a static field: `vmap` needs tensors.
    made: Any = dataclasses.dataclass(frozen=True, eq=False)(cls)
    _FIELDS[made] = tuple(
        (field.name, bool(field.metadata.get("static"))) for field in dataclasses.fields(made)
    )
    leaves = tuple(name for name, is_static in _FIELDS[made] if not is_static)
    fixed = tuple(name for name, is_static in _FIELDS[made] if is_static)

    def flatten(node: Any) -> tuple[list[Any], tuple[Any, ...]]:
        there = tuple(n for n in leaves if getattr(node, n) is not None)
        return [getattr(node, n) for n in there], (there, *(getattr(node, n) for n in fixed))

    def unflatten(children: Any, context: Any) -> Any:
        there, *plain = context
        given = dict(zip((*there, *fixed), (*children, *plain), strict=True))
        return made(**{name: given.get(name) for name in (*leaves, *fixed)})

    def flatten_with_keys(node: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        children, context = flatten(node)
        named = [(pytree.GetAttrKey(n), c) for n, c in zip(context[0], children, strict=True)]
        return named, context

    pytree.register_pytree_node(made, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)
    RECORDS[f"{made.__module__}.{made.__qualname__}"] = made
    return made  # type: ignore[no-any-return]  # dataclass() is typed through Any above


@record
class Empty:
    """A tree without leaves: a message or a reply without content."""


def leaves(tree: Tree) -> list[Tensor]:
    """Return all tensors of a tree, in a fixed order."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Tree, found: list[Tensor]) -> None:
    kind = type(tree)
    if kind is Tensor:
        found.append(tree)
    elif kind is dict:
        for child in tree.values():
            _collect(child, found)
    elif kind is list or kind is tuple:
        for child in tree:
            _collect(child, found)
    elif kind in _FIELDS:
        for name, is_static in _FIELDS[kind]:
            if not is_static:
                _collect(getattr(tree, name), found)
    else:
        _mapped(found.append, tree)


def leaves_like(tree: Tree, like: Tree) -> list[Tensor]:
    """Return the tensors of a tree in the order of another tree of the same structure."""
    found: list[Tensor] = []
    _collect_like(tree, like, found)
    return found


def _collect_like(tree: Tree, like: Tree, found: list[Tensor]) -> None:
    kind, same = type(like), type(tree) is type(like)
    if kind is Tensor and same:
        found.append(tree)
    elif kind is dict and same and tree.keys() == like.keys():
        for key, child in like.items():
            _collect_like(tree[key], child, found)
    elif (kind is list or kind is tuple) and same and len(tree) == len(like):
        for one, child in zip(tree, like, strict=True):
            _collect_like(one, child, found)
    elif kind in _FIELDS and same:
        for name, is_static in _FIELDS[kind]:
            if not is_static:
                _collect_like(getattr(tree, name), getattr(like, name), found)
    else:  # a container that only torch knows, or another structure, which is an error
        ours = pytree.tree_structure(like).flatten_up_to(tree)
        found += [leaf for leaf in ours if isinstance(leaf, Tensor)]


def with_leaves(tree: T, tensors: Iterable[Any]) -> T:
    """Replace the tensors of a tree, in the order of `leaves`."""
    given = iter(tensors)
    return cast(T, _mapped(lambda _: next(given), tree))


def named_leaves(tree: Tree) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a tree with their dotted paths, for example `model.0.weight`."""
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, Tensor):
            yield ".".join(map(_step_name, path)), leaf


def _step_name(step: Any) -> str:
    if isinstance(step, pytree.GetAttrKey):
        return step.name
    return str(step.key if isinstance(step, pytree.MappingKey) else step.idx)


def tree_map(fn: Callable[..., Any], tree: T, *rest: Tree) -> T:
    """Apply `fn` to the tensors of one tree, or of several trees of the same structure."""
    if not rest:
        return cast(T, _mapped(fn, tree))

    def on_tensors(first: Any, *others: Any) -> Any:
        return fn(first, *others) if isinstance(first, Tensor) else first

    mapped: T = pytree.tree_map(on_tensors, tree, *rest)
    return mapped


def _mapped(fn: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """Apply `fn` to the tensors of one tree, in a third of the time of torch's `tree_map`."""
    kind = type(tree)
    if kind is Tensor:
        return fn(tree)
    if kind is dict:
        return {key: _mapped(fn, child) for key, child in tree.items()}
    if kind is list or kind is tuple:
        return kind([_mapped(fn, child) for child in tree])
    if kind in _FIELDS:
        return kind(
            *[
                getattr(tree, name) if is_static else _mapped(fn, getattr(tree, name))
                for name, is_static in _FIELDS[kind]
            ]
        )
    if tree is None:
        return None
    # Anything else: a leaf that is not a tensor, or a container that only torch knows.
    return pytree.tree_map(lambda leaf: fn(leaf) if isinstance(leaf, Tensor) else leaf, tree)


flatten = pytree.tree_flatten  # all leaves of a tree, and its structure
unflatten = pytree.tree_unflatten  # the tree with these leaves and this structure
structure = pytree.tree_structure  # trees can be mapped together if their structures are equal


def stack(trees: Sequence[T]) -> T:
    """Stack trees of one structure: tensors of the result have a new leading axis."""
    return tree_map(lambda *parts: torch.stack(parts), *trees)


def concat(trees: Sequence[T]) -> T:
    """Concatenate stacked trees along the leading axis."""
    return trees[0] if len(trees) == 1 else tree_map(lambda *parts: torch.cat(parts), *trees)


def take(tree: T, index: int | Tensor | slice) -> T:
    """Select a row, or rows, of a stacked tree."""
    return tree_map(lambda leaf: leaf[index], tree)


def unstack(tree: T, size: int) -> list[T]:
    """Split a stacked tree into one tree per row."""
    return [take(tree, row) for row in range(size)]


def num_bytes(tree: Tree) -> int:
    """Return the size of all tensors of a tree in bytes."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def all_finite(tree: Tree) -> bool:
    """Whether all float tensors of a tree are finite, usually with one device-to-host copy."""
    # A sum of finite numbers is finite unless it overflows. Then the exact check decides.
    floats = [leaf for leaf in leaves(tree) if leaf.is_floating_point() and leaf.numel()]
    if not floats:
        return True
    if floats[0].is_cuda:  # one launch for all leaves of a dtype
        total = torch.stack(torch._foreach_norm(floats, 1)).sum(dtype=torch.float64)
    else:
        total = torch.stack([leaf.sum().to(torch.float64) for leaf in floats]).sum()
    return bool(torch.isfinite(total)) or all(bool(torch.isfinite(leaf).all()) for leaf in floats)


def inside_transform() -> bool:
    """Whether code runs inside torch.func's `vmap` or `grad`, so a tensor may be a stack."""
    return _functorch.peek_interpreter_stack() is not None


def norm(tree: Tree) -> Tensor:
    """Return the Euclidean norm of a whole tree."""
    return torch.cat([leaf.flatten() for leaf in leaves(tree)]).square().sum().sqrt()
