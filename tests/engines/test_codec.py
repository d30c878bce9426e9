"""Encoding: trees survive unchanged, and decoding returns only trees."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import os
import pickle
import struct
from collections import OrderedDict, namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor
from torch.utils import _pytree as pytree

from atoll.core import files
from atoll.core.batching import WHOLE, Graphs
from atoll.core.errors import DataError, WireError
from atoll.core.tree import Empty, Tree, record, static
from atoll.engines.codec import (
    MOVED,
    TYPES,
    _build,
    _plan,
    check_like,
    decode,
    encode,
    load_checkpoint,
    pack_states,
    save_checkpoint,
    unpack_states,
)
from atoll.nn.neighgen_slots import used_places
from atoll.testing import small_graph_federation


@record
class Parcel:
    content: Tree
    label: Tree
    kind: str = static("plain")


DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.bool)
tensors = st.builds(
    lambda shape, dtype, seed: (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(9).to(dtype)
    ),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
plain = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.floats(allow_nan=False))
names = st.one_of(st.sampled_from(["a", "b", "a.b", "", ".", "__metadata__", "tensor"]), st.text())
trees = st.recursive(
    st.one_of(tensors, plain),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(names, inner, max_size=3),
        st.builds(Parcel, inner, inner, st.sampled_from(["plain", "odd"])),
        st.just(Empty()),
    ),
    max_leaves=8,
)


def assert_equal(a: Tree, b: Tree) -> None:
    flat, spec = pytree.tree_flatten(a)
    other, other_spec = pytree.tree_flatten(b)
    assert spec == other_spec
    for one, two in zip(flat, other, strict=True):
        assert type(one) is type(two)
        if isinstance(one, Tensor):
            assert (one.dtype, one.shape) == (two.dtype, two.shape)
            assert torch.equal(one, two)
        else:
            assert one == two


@given(trees)
@settings(max_examples=150, deadline=None)
def test_trees_come_back_as_they_were(tree):
    assert_equal(decode(encode(tree)), tree)


def test_a_graph_of_an_earlier_version_is_read_without_its_batch_size():
    graph = small_graph_federation().graphs[1]
    tensors: dict[str, Tensor] = {}
    plan = _plan(graph, tensors)
    assert "batching" not in plan["fields"]
    plan["fields"]["batch_size"] = {"value": 3}
    again = _build(plan, tensors)
    assert again.batching == WHOLE
    assert torch.equal(again.root, graph.root)


def test_a_static_field_with_its_default_need_not_be_a_plain_value():
    with pytest.raises(WireError, match="Graphs cannot be sent"):
        encode(replace(small_graph_federation().graphs[1], batching=Graphs(3)))
    assert decode(encode(small_graph_federation().graphs[1])).batching == WHOLE


def test_equal_trees_have_equal_bytes():
    assert encode([torch.ones(2), None]) == encode([torch.ones(2), None])
    assert encode(torch.ones(2)) != encode(torch.zeros(2))


@pytest.mark.parametrize(
    "tree",
    [
        {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}},
        {"": {"a": torch.zeros(1)}, "a": torch.ones(1)},
        [torch.zeros(1), {"0": torch.ones(1)}, {"0'": torch.ones(1)}],
        {"__metadata__": torch.ones(2)},
    ],
)
def test_names_that_look_alike_stay_apart(tree):
    assert_equal(decode(encode(tree)), tree)


def test_tensors_that_share_memory_are_sent_each():
    whole = torch.arange(6.0)
    tree = [whole, whole, whole[:4], whole[2:], whole.reshape(2, 3).T, whole.expand(2, 6)]
    back = decode(encode(tree))
    assert_equal(back, tree)
    back[0] += 1
    assert torch.equal(back[1], whole)  # apart on arrival


def test_gradients_and_parameters_stay_at_home():
    back = decode(encode([torch.nn.Parameter(torch.ones(2)), torch.ones(1, requires_grad=True)]))
    assert [type(leaf) for leaf in back] == [Tensor, Tensor]
    assert not any(leaf.requires_grad for leaf in back)


Point = namedtuple("Point", "x y")  # what a careless method would send


class Unknown:
    pass


@pytest.mark.parametrize(
    "tree",
    [
        Unknown(),
        [{"a": Unknown()}],
        {1: torch.ones(1)},
        {"a": {None: 1}},
        Point(torch.ones(1), torch.ones(1)),
        OrderedDict(a=torch.ones(1)),
        {1, 2},
        len,
        b"bytes",
        torch.float32,
    ],
)
def test_what_would_not_come_back_the_same_is_refused_before_it_leaves(tree):
    with pytest.raises(WireError, match="cannot be sent: use tensors, records"):
        encode(tree)


def message(plan: Any, header: dict[str, Any] | None = None, body: bytes = b"\0" * 4) -> bytes:
    """Bytes as an attacker may write them."""
    text = plan if isinstance(plan, str) else json.dumps(plan)
    parts = {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, **(header or {})}
    top = json.dumps({"__metadata__": {"tree": text}, **parts}).encode()
    return struct.pack("<Q", len(top)) + top + body


def test_the_attackers_bytes_are_well_formed():
    assert torch.equal(decode(message({"tensor": "x"})), torch.zeros(1))


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_a_pickle_is_refused_and_never_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for payload in (Bomb(), {"model": torch.ones(2)}):
        with pytest.raises(WireError, match="not an Atoll message"):
            decode(pickle.dumps(payload))
    torch.save({"a": torch.ones(1)}, tmp_path / "saved")
    with pytest.raises(WireError, match="not an Atoll message"):
        decode((tmp_path / "saved").read_bytes())
    assert not (tmp_path / "exploded").exists()


GOOD = encode(Parcel({"w": torch.arange(6.0), "b": torch.ones(2, 2)}, [None, 1]))


@pytest.mark.parametrize("size", [*range(0, len(GOOD), 7), len(GOOD) - 1])
def test_a_message_cut_off_anywhere_is_refused(size):
    with pytest.raises(WireError, match="refused"):
        decode(GOOD[:size])


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_refused(data):
    with pytest.raises(WireError, match="not an Atoll message"):
        decode(data)


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_one_changed_byte_is_refused_or_still_a_tree(place, value):
    data = bytearray(GOOD)
    data[place] = value
    try:
        tree = decode(bytes(data))
    except WireError:
        return
    for leaf in pytree.tree_leaves(tree):
        assert leaf is None or type(leaf) in (Tensor, bool, int, float, str)


BAD_PLANS = {
    "a record that does not exist": {"record": "os.system", "fields": {}},
    "a class that is no record": {"record": "builtins.dict", "fields": {}},
    "fields that a record has not": {"record": f"{__name__}.Parcel", "fields": {"other": None}},
    "fields missing": {"record": f"{__name__}.Parcel", "fields": {}},
    "a name that is a list": {"record": ["a"], "fields": {}},
    "a tensor that is not there": {"tensor": "y"},
    "a tensor named by a list": {"tensor": []},
    "a value that is a tree": {"value": {"a": [1]}},
    "a list that is none": {"list": 3},
    "a dict that is none": {"dict": []},
    "something else": {"other": 1},
    "a number": 3,
    "a word": "tensor",
    "nothing": None,
}


@pytest.mark.parametrize("plan", list(BAD_PLANS.values()), ids=list(BAD_PLANS))
def test_a_structure_that_nobody_declared_is_refused(plan):
    with pytest.raises(WireError, match="refused"):
        decode(message(json.dumps(plan)))


@pytest.mark.parametrize("text", ["", "{", "not json", "[" * 10**5, '{"list":[' * 5000])
def test_a_structure_that_cannot_be_read_is_refused(text):
    with pytest.raises(WireError, match="not an Atoll message"):
        decode(message(text))


def test_a_structure_too_deep_to_build_is_refused():
    def deep(levels):
        return message('{"list":[' * levels + '{"value":1}' + "]}" * levels)

    assert decode(deep(64))
    for levels in (65, 400, 900):  # the last is too much for the JSON itself
        with pytest.raises(WireError, match=r"64 levels|not an Atoll message"):
            decode(deep(levels))


def test_a_file_without_a_structure_is_refused():
    for top in (b"{}", b'{"__metadata__":{}}', b'{"__metadata__":{"other":"1"}}'):
        with pytest.raises(WireError, match="not an Atoll message"):
            decode(struct.pack("<Q", len(top)) + top)


def test_a_message_over_the_limit_is_refused_unread():
    data = encode(torch.zeros(100))
    assert decode(data, limit=len(data)) is not None
    with pytest.raises(WireError, match=rf"{len(data)} bytes was refused; the limit is 99 bytes"):
        decode(data, limit=99)
    with pytest.raises(WireError, match="the limit is"):
        decode(b"\0" * 100, limit=99)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_number_that_is_none_is_refused_by_name(bad, dtype):
    data = encode({"model": [torch.ones(2), torch.tensor([1.0, bad], dtype=dtype)]})
    with pytest.raises(WireError, match=r"'model\.1' holds a NaN or infinite number"):
        decode(data)
    assert decode(data, finite=False)["model"][0].tolist() == [1, 1]


LIKE = Parcel({"w": torch.zeros(3, 2), "b": torch.zeros(2)}, torch.tensor(1.0))


def test_a_reply_like_the_declared_one_passes():
    check_like(Parcel({"w": torch.ones(3, 2), "b": torch.ones(2)}, torch.tensor(7.0)), LIKE, {})


REFUSED = {
    "a missing name": (
        Parcel({"w": torch.zeros(3, 2)}, torch.tensor(1.0)),
        r"it holds \['content.w', 'label'\]",
    ),
    "another name": (
        Parcel({"w": torch.zeros(3, 2), "c": torch.zeros(2)}, torch.tensor(1.0)),
        r"declares \['content.w', 'content.b', 'label'\]",
    ),
    "one more": (
        Parcel({"w": torch.zeros(3, 2), "b": torch.zeros(2), "x": torch.zeros(1)}, torch.ones(())),
        "content.x",
    ),
    "nothing instead of a tensor": (
        Parcel({"w": torch.zeros(3, 2), "b": torch.zeros(2)}, None),
        r"it holds \['content.w', 'content.b'\], but",
    ),
    "another kind of record": (
        Parcel({"w": torch.zeros(3, 2), "b": torch.zeros(2)}, torch.ones(()), kind="odd"),
        "it holds",
    ),
    "another type": (
        Parcel({"w": torch.zeros(3, 2), "b": torch.zeros(2).double()}, torch.tensor(1.0)),
        "'content.b' is torch.float64, declared torch.float32",
    ),
    "another shape": (
        Parcel({"w": torch.zeros(5, 2), "b": torch.zeros(2)}, torch.tensor(1.0)),
        r"'content.w' has shape \(5, 2\), declared \(3, 2\); a node or edge axis must be declared",
    ),
    "another number of axes": (
        Parcel({"w": torch.zeros(3, 2), "b": torch.zeros(2)}, torch.ones(1)),
        r"'label' has shape \(1,\), declared \(\)",
    ),
}


@pytest.mark.parametrize(("reply", "problem"), list(REFUSED.values()), ids=list(REFUSED))
def test_a_reply_unlike_the_declared_one_is_refused(reply, problem):
    with pytest.raises(WireError, match=problem):
        check_like(reply, LIKE, {})


def test_only_the_shape_of_a_declared_field_is_free():
    free = {"content": "the reason"}
    check_like(Parcel({"w": torch.zeros(5, 2), "b": torch.zeros(1)}, torch.ones(())), LIKE, free)
    other_type = Parcel({"w": torch.zeros(3, 2).double(), "b": torch.zeros(2)}, torch.ones(()))
    with pytest.raises(WireError, match=r"is torch\.float64"):
        check_like(other_type, LIKE, free)
    other_field = Parcel({"w": torch.zeros(3, 2), "b": torch.zeros(2)}, torch.ones(1))
    with pytest.raises(WireError, match="'label' has shape"):
        check_like(other_field, LIKE, free)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64])
def test_numbers_that_cannot_be_checked_are_refused(dtype):
    with pytest.raises(WireError, match=f"'a' is {dtype}"):
        decode(encode({"a": torch.ones(2).to(dtype)}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_tensor_has_at_most_64_dimensions(dtype):
    most = {"a": torch.ones([1] * 64, dtype=dtype)}
    assert_equal(decode(encode(most)), most)
    with pytest.raises(WireError, match="'a' has 65 dimensions"):
        decode(encode({"a": most["a"][None]}))


@record
class Saved:
    model: Tree
    note: Tree


OLD = Saved({"w": torch.tensor([1.0, torch.nan])}, "old")
NEW = Saved({"w": torch.tensor([2.0, torch.inf])}, "new")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A place where an old checkpoint lies."""
    place = tmp_path / "run" / "checkpoint"
    save_checkpoint(place, OLD)
    return place


def note(path: Path) -> str:
    return load_checkpoint(path).note


def test_what_is_saved_is_loaded_even_if_it_is_not_finite(path):
    back = load_checkpoint(path)
    assert isinstance(back, Saved)
    assert back.note == "old"
    assert torch.equal(back.model["w"].isnan(), torch.tensor([False, True]))
    save_checkpoint(path, NEW)
    assert note(path) == "new"


def test_no_other_file_stays_behind(path):
    save_checkpoint(path, NEW)
    assert os.listdir(path.parent) == ["checkpoint"]
    assert path.stat().st_mode & 0o777 == 0o644


class Killed(BaseException):
    """The process ends here: nothing in it runs any more."""


@pytest.mark.parametrize("at", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize("problem", [OSError("disk full"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_one_and_no_rubbish(path, monkeypatch, at, problem):
    def fail(*_: object) -> None:
        raise problem

    with monkeypatch.context() as patch:
        patch.setattr(files.os, at, fail)
        with pytest.raises(type(problem)):
            save_checkpoint(path, NEW)
    assert note(path) == "old"
    assert os.listdir(path.parent) == ["checkpoint"]


@pytest.mark.parametrize("at", ["fsync", "chmod", "replace"])
def test_a_process_killed_between_write_and_rename_leaves_the_old_one(path, monkeypatch, at):
    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(files.os, at, die)
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # a dead process cleans nothing up
        with pytest.raises(Killed):
            save_checkpoint(path, NEW)
    assert len(os.listdir(path.parent)) == 2
    assert note(path) == "old"
    save_checkpoint(path, NEW)
    assert note(path) == "new"


def test_the_new_content_is_on_the_disk_before_the_name_changes(path, monkeypatch):
    order = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(files.os, name, lambda *a, n=name, r=real: (order.append(n), r(*a))[1])
    save_checkpoint(path, NEW)
    assert order == ["fsync", "replace", "fsync"]  # the file, its name, the folder


def test_a_damaged_checkpoint_is_refused(path):
    good = path.read_bytes()
    for place in (0, 31, 32, 40, len(good) // 2, len(good) - 1):
        bad = bytearray(good)
        bad[place] ^= 1
        path.write_bytes(bad)
        with pytest.raises(DataError, match=r"is damaged .* delete it to start this seed again"):
            load_checkpoint(path)


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 100, -1])
def test_a_truncated_checkpoint_is_refused(path, size):
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match="is damaged"):
        load_checkpoint(path)


FOREIGN = {
    "text": b"hello\n" * 20,
    "a pickle": pickle.dumps({"model": 1}),
    "a message without a checksum": encode(OLD),
}


@pytest.mark.parametrize("content", list(FOREIGN.values()), ids=list(FOREIGN))
def test_a_foreign_file_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        load_checkpoint(path)


def test_a_checkpoint_of_another_version_is_refused(path):
    data = encode(OLD).replace(b"Saved", b"Sayed")
    path.write_bytes(hashlib.sha256(data).digest() + data)
    with pytest.raises(DataError, match="written by another version of Atoll"):
        load_checkpoint(path)


def test_a_checkpoint_that_cannot_be_read_says_why(tmp_path):
    with pytest.raises(DataError, match=r"nowhere cannot be read: No such file"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(DataError, match="Is a directory"):
        load_checkpoint(tmp_path)


def test_states_of_different_shapes_survive_a_checkpoint() -> None:
    states = [None, {"a": torch.ones(2)}, None, {"a": torch.zeros(3)}, {"a": torch.zeros(2)}]
    again = unpack_states(pack_states(states))
    assert again[0] is None
    assert again[2] is None
    for position in (1, 3, 4):
        assert torch.equal(again[position]["a"], states[position]["a"])


@pytest.mark.parametrize("module", MOVED.values())
def test_a_moved_module_can_be_imported(module):
    assert importlib.import_module(module).__name__ == module


def test_used_slots_of_an_earlier_version_are_read():
    places = used_places(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    plan = _plan(places, tensors := {})
    plan["record"] = plan["record"].replace("atoll.nn.neighgen_slots", "atoll.nn.places")
    assert torch.equal(_build(plan, tensors).nodes, places.nodes)


def test_files_that_grow_keep_no_memory():
    encode({"history": torch.zeros(1)})
    before = len(ctypes.Array.__subclasses__())  # one for each size, which Python never frees
    for size in range(1, 200):
        encode({"history": torch.zeros(1000 + size), "other": torch.zeros(size, 7)})
    assert len(ctypes.Array.__subclasses__()) <= before + 2


@pytest.mark.parametrize("dtype", sorted(TYPES, key=str))
def test_the_bytes_are_those_of_safetensors_for_torch(dtype):
    leaves = {str(i): torch.ones(shape).to(dtype)
              for i, shape in enumerate([(), (0,), (3,), (2, 0, 4), (2, 3)])}  # fmt: skip
    data = encode(leaves)
    size = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + size])["__metadata__"]
    assert data == save(leaves, metadata=metadata)
