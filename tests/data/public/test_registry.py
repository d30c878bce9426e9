"""The public data sets: their table, their published counts, and their raw layouts."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from atoll.core.errors import ConfigError, DataError
from atoll.data.load import load
from atoll.data.public import untrusted as checksums
from atoll.data.public.fetch import counts
from atoll.data.public.raw import READERS
from atoll.data.public.registry import (
    DATASETS,
    GROUPS,
    DatasetInfo,
    data_root,
    dataset_info,
    load_dataset,
    sets_of_group,
    task_of_data,
)
from atoll.data.public.tables import TABLES
from atoll.data.source import TEST, TRAIN, UNUSED, VAL, Source

# nodes, directed edges, features, classes, graphs: as the sets' authors and PyG's pages give them.
PUBLISHED = {
    "cora": (2708, 10556, 1433, 7, 1),
    "citeseer": (3327, 9104, 3703, 6, 1),
    "pubmed": (19717, 88648, 500, 3, 1),
    "photo": (7650, 238162, 745, 8, 1),
    "cs": (18333, 163788, 6805, 15, 1),
    "minesweeper": (10000, 78804, 7, 2, 1),
    "actor": (7600, 30019, 932, 5, 1),
    "cornell": (183, 298, 1703, 5, 1),
    "chameleon": (2277, 36101, 2325, 5, 1),
    "ogbn-arxiv-structure": (169343, 1166243, 0, 40, 1),
    "MUTAG": (3371, 7442, 7, 2, 188),
    "BZR": (14479, 31070, 53, 2, 405),
    "COX2": (19252, 40578, 35, 2, 467),
    "DHFR": (32075, 67352, 53, 2, 756),
    "PTC_MR": (4915, 10108, 18, 2, 344),
    "AIDS": (31385, 64780, 38, 2, 2000),
    "NCI1": (122747, 265506, 37, 2, 4110),
    "PROTEINS": (43471, 162088, 3, 2, 1113),
    "IMDB-BINARY": (19773, 193062, 136, 2, 1000),
    "IMDB-MULTI": (19502, 197806, 89, 3, 1500),
    "DD": (334925, 1686092, 89, 2, 1178),
    "COLLAB": (372474, 24572158, 492, 3, 5000),
    "amlsim-20k": (20000, 120558, 1, 2, 1),
    "german": (1000, 43484, 38, 2, 1),
    "bail": (18876, 672430, 17, 2, 1),
    "twitch": (34118, 858226, 3170, 2, 1),
}
# train, validation, test, unused nodes of the first published split.
SPLITS = {
    "cora": (140, 500, 1000, 1068),
    "citeseer": (120, 500, 1000, 1707),
    "pubmed": (60, 500, 1000, 18157),
    "minesweeper": (5000, 2500, 2500, 0),
    "actor": (3648, 2432, 1520, 0),
    "cornell": (87, 59, 37, 0),
    "chameleon": (1092, 729, 456, 0),
    "ogbn-arxiv-structure": (90941, 29799, 48603, 0),
}
BAG_OF_WORDS = {"cora", "citeseer", "cs", "actor", "cornell", "chameleon", "twitch"}
NOT_IN_THE_MIRROR = {"computers", "physics", "wikics", "ogbn-arxiv", "squirrel", "texas", "ENZYMES"}
NOT_IN_THE_MIRROR |= {
    "roman-empire",
    "amazon-ratings",
    "tolokers",
    "questions",
    "wisconsin",
    "MSRC_21",
}


@pytest.mark.data
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str, real_data: Callable[[str], Path]) -> None:
    if name == "COLLAB" and os.environ.get("ATOLL_SLOW") != "1":
        pytest.skip("COLLAB is large; set ATOLL_SLOW=1")
    data = load_dataset(name, real_data(name))
    assert tuple(counts(data).values()) == PUBLISHED[name]
    info = DATASETS[name]
    assert (info.nodes, info.edges, info.features, info.classes, info.graphs) == PUBLISHED[name]
    assert data.name == name
    assert data.edges.dtype == np.int64
    assert data.x.dtype == np.float32
    assert data.metric == info.metric
    if isinstance(data, Source):
        assert sp.issparse(data.x) == (name in BAG_OF_WORDS)
        if name in SPLITS:
            roles = [int((data.split == role).sum()) for role in (TRAIN, VAL, TEST, UNUSED)]
            assert tuple(roles) == SPLITS[name]
        else:
            assert data.split is None
    else:
        inside = data.graph_of_node()
        assert (inside[data.edges[0]] == inside[data.edges[1]]).all()
        assert (data.x.sum(axis=1) == 1).all()  # one-hot labels, or one-hot degrees


def test_every_name_of_the_issue_is_there() -> None:
    assert set(DATASETS) == PUBLISHED.keys() | NOT_IN_THE_MIRROR
    assert all(key == info.name for key, info in DATASETS.items())
    auc = {name for name, info in DATASETS.items() if info.metric == "auc"}
    assert auc == {"minesweeper", "tolokers", "questions", *TABLES}
    assert all(info.licence and info.origin for info in DATASETS.values())


def test_groups() -> None:
    assert [len(group) for group in GROUPS.values()] == [7, 10, 13]
    assert set(GROUPS["molecules"]) < set(GROUPS["biochem"]) < set(GROUPS["mix"])
    others = {"MSRC_21"}  # of the paper's Table 1 only
    assert set(GROUPS["mix"]) | others == {n for n, i in DATASETS.items() if i.task == "graph"}


@pytest.mark.parametrize(
    "name",
    [n for n, i in DATASETS.items() if not i.by_atoll and i.loader != checksums.OGB_CLASS],
)
def test_layout_is_what_the_class_itself_expects(name: str, tmp_path: Path) -> None:
    info = DATASETS[name]
    seen: list[Path] = []

    class Found(Exception):
        pass

    def look(self: object) -> None:
        seen.extend(Path(path) for path in self.raw_paths)  # type: ignore[attr-defined]
        raise Found

    with checksums.quiet(), pytest.raises(Found):
        checksums.loader_class(info.loader, _download=look)(
            root=str(tmp_path / info.folder), **info.arguments
        )
    assert set(seen) <= {tmp_path / info.home / file for file in info.files}


# The sets below are not in the mirror: tiny files in the published raw layout stand for them.


def write(home: Path, file: str, text: str) -> None:
    path = home / file
    path.parent.mkdir(parents=True, exist_ok=True)
    if file.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)


def write_npz(home: Path, file: str, **arrays: np.ndarray) -> None:
    (home / file).parent.mkdir(parents=True, exist_ok=True)
    np.savez(home / file, **arrays)


MASKS = np.eye(3, dtype=bool)  # node 0 trains, node 1 validates, node 2 tests


def geom_gcn(info: DatasetInfo, home: Path) -> None:
    nodes = "node_id\tfeature\tlabel\n0\t1,0,0,1\t0\n1\t0,1,0,1\t1\n2\t0,0,1,1\t1\n"
    write(home, info.files[0], nodes)
    write(home, info.files[1], "node_id\tnode_id\n0\t1\n1\t2\n")
    for i, file in enumerate(info.files[2:]):
        turned = np.roll(MASKS, i, axis=1)
        masks = {f"{part}_mask": turned[k] for k, part in enumerate(("train", "val", "test"))}
        write_npz(home, file, **masks)


def heterophilous(info: DatasetInfo, home: Path) -> None:
    write_npz(
        home,
        info.files[0],
        node_features=np.eye(3, 4, dtype=np.float32),
        node_labels=np.array([0, 1, 1]),
        edges=np.array([[0, 1], [1, 2]]),
        train_masks=np.stack([MASKS[0], MASKS[1]]),
        val_masks=np.stack([MASKS[1], MASKS[2]]),
        test_masks=np.stack([MASKS[2], MASKS[0]]),
    )


def wikics(info: DatasetInfo, home: Path) -> None:
    raw = {
        "features": np.eye(3, 4).tolist(),
        "labels": [0, 1, 1],
        "links": [[1], [2], []],
        "train_masks": [MASKS[0].tolist(), MASKS[1].tolist()],
        "val_masks": [MASKS[1].tolist(), MASKS[0].tolist()],
        "stopping_masks": [MASKS[1].tolist(), MASKS[0].tolist()],
        "test_mask": MASKS[2].tolist(),
    }
    write(home, info.files[0], json.dumps(raw))


def shchur(info: DatasetInfo, home: Path) -> None:
    x, adjacency = sp.csr_array(np.eye(3, 4)), sp.csr_array(np.eye(3, k=1))
    arrays = {"labels": np.array([0, 1, 1])}
    for name, matrix in (("attr", x), ("adj", adjacency)):
        for part in ("data", "indices", "indptr", "shape"):
            arrays[f"{name}_{part}"] = np.asarray(getattr(matrix, part))
    write_npz(home, info.files[0], **arrays)


def ogb(info: DatasetInfo, home: Path) -> None:
    one_column = {"raw/node-label": "0 1 1", "raw/node_year": "2013 2015 2014"}
    one_column |= {"raw/num-node-list": "3", "raw/num-edge-list": "2", "split/time/train": "0"}
    one_column |= {"split/time/valid": "1", "split/time/test": "2"}
    for file, values in one_column.items():
        write(home, f"{file}.csv.gz", values.replace(" ", "\n") + "\n")
    write(home, "raw/edge.csv.gz", "0,1\n1,2\n")
    write(home, "RELEASE_v1.txt", "")
    if info.loader == checksums.OGB_CLASS:
        write(home, "raw/node-feat.csv.gz", "1,0,0,0\n0,1,0,0\n0,0,1,0\n")


def tu(home: Path, name: str, **files: str) -> None:
    graphs = {"A": "1, 2\n2, 1\n3, 4\n4, 3\n4, 5\n5, 4\n", "graph_labels": "-1\n1\n-1\n"}
    graphs["graph_indicator"] = "1\n1\n2\n2\n2\n3\n"  # the third graph is one node, no edge
    for part, text in (graphs | files).items():
        write(home, f"raw/{name}_{part}.txt", text)


@pytest.mark.parametrize(
    ("name", "make", "symmetric", "splits"),
    [
        ("wikics", wikics, False, 2),
        ("roman-empire", heterophilous, True, 2),
        ("amazon-ratings", heterophilous, True, 2),
        ("tolokers", heterophilous, True, 2),
        ("questions", heterophilous, True, 2),
        ("squirrel", geom_gcn, False, 10),
        ("texas", geom_gcn, False, 10),
        ("wisconsin", geom_gcn, False, 10),
        ("computers", shchur, True, 0),
        ("physics", shchur, True, 0),
        ("ogbn-arxiv", ogb, False, 1),
        ("ogbn-arxiv-structure", ogb, False, 1),
    ],
)
def test_hand_made_raw_files(
    name: str, make: Callable[..., None], symmetric: bool, splits: int, tmp_path: Path
) -> None:
    info = DATASETS[name]
    if info.loader == checksums.OGB_CLASS:
        pytest.importorskip("ogb", reason="the optional package ogb is not installed")
    make(info, tmp_path / info.home)
    for _ in ("raw files", "cache"):
        data = load_dataset(name.upper(), tmp_path)
        directed = {(0, 1), (1, 2)}
        expected = directed | {(b, a) for a, b in directed} if symmetric else directed
        assert set(map(tuple, data.edges.T.tolist())) == expected
        assert data.y.tolist() == [0, 1, 1]
        assert data.classes == 2
        assert data.x.shape == (3, 0 if name == "ogbn-arxiv-structure" else 4)
        assert (data.split is None) if splits == 0 else (data.split.tolist() == [TRAIN, VAL, TEST])
    if splits > 1:
        assert load_dataset(name, tmp_path, split_index=1).split.tolist() != [TRAIN, VAL, TEST]
    with pytest.raises(ConfigError, match=rf"no split {max(splits, 1)}; its splits are 0 to"):
        load_dataset(name, tmp_path, split_index=max(splits, 1))


@pytest.mark.parametrize(
    ("files", "features"),
    [
        ({"node_labels": "1\n2\n1\n2\n4\n1\n"}, [[1, 0, 0, 0], [0, 1, 0, 0]]),
        ({"node_attributes": "0.5\n1\n2\n3\n4\n5\n"}, [[0.5], [1]]),
        ({}, [[0, 1, 0], [0, 1, 0]]),
    ],
    ids=["labels", "attributes", "degrees"],
)
@pytest.mark.parametrize("name", ["ENZYMES", "MSRC_21", "tu:REDDIT-BINARY"])
def test_hand_made_tu_files(
    name: str, files: dict[str, str], features: list[list[float]], tmp_path: Path
) -> None:
    label = name.removeprefix("tu:")
    tu(tmp_path / "TUDataset" / label, label, **files)
    data = load_dataset(name, tmp_path)
    assert data.node_ptr.tolist() == [0, 2, 5, 6]
    assert data.edges.tolist() == [[0, 1, 2, 3, 3, 4], [1, 0, 3, 2, 4, 3]]
    assert data.y.tolist() == [0, 1, 0]
    assert data.x[:2].tolist() == features
    with pytest.raises(ConfigError, match="no split 1"):
        load_dataset(name, tmp_path, split_index=1)
    if not files:
        assert load_dataset(name, tmp_path, max_degree=1).x[3].tolist() == [0, 1]
        with pytest.raises(ConfigError, match="max_degree is -1"):
            load_dataset(name, tmp_path, max_degree=-1)


def test_degrees_that_would_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tu(tmp_path / "TUDataset" / "BIG", "BIG")
    monkeypatch.setattr("atoll.data.public.registry.MAX_DEGREE_BYTES", 10)
    with pytest.raises(DataError, match=r"degrees up to 2, .*give a smaller max_degree"):
        load_dataset("tu:BIG", tmp_path)


def test_regression_targets_are_refused(tmp_path: Path) -> None:
    tu(tmp_path / "TUDataset" / "QM9", "QM9", graph_attributes="0.5\n1\n2\n")
    with pytest.raises(DataError, match="no single class per graph"):
        load_dataset("tu:QM9", tmp_path)


def test_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert dataset_info("Cora") is DATASETS["cora"]
    assert dataset_info("mutag") is dataset_info("tu:MUTAG") is DATASETS["MUTAG"]
    assert dataset_info("tu:Synthie").archive == "Synthie.tar.xz"
    with pytest.raises(ConfigError, match=r"did you mean 'citeseer'.*'tu:NAME'"):
        dataset_info("citeser")
    for name in ("tu:../../etc", "tu:", "tu:a/b", "tu:cora/..", "../cora", "tu:cora\n/"):
        with pytest.raises(ConfigError, match="unknown data set"):
            dataset_info(name)
    monkeypatch.delenv("ATOLL_DATA", raising=False)
    assert data_root() == Path.home() / ".cache" / "atoll" / "data"
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path))
    assert data_root() == tmp_path
    assert data_root(tmp_path / "x") == tmp_path / "x"


def test_absent_set_names_the_command_and_does_not_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("went to the network"))
    with pytest.raises(DataError, match=r"'cora' is not in .*get it with: atoll data fetch cora$"):
        load_dataset("cora", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_missing_ogb_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ogb(DATASETS["ogbn-arxiv"], tmp_path / "ogbn_arxiv")
    monkeypatch.setitem(sys.modules, "ogb", None)
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    with pytest.raises(ConfigError, match=r"pip install 'atoll-fgl\[ogb\]'$"):
        load_dataset("ogbn-arxiv", tmp_path)


def test_damaged_files_are_one_sentence_and_leave_no_cache(tmp_path: Path) -> None:
    info = DATASETS["texas"]
    geom_gcn(info, tmp_path / info.home)
    write(tmp_path / info.home, info.files[0], "node_id\tfeature\tlabel\n0\t1,x\t0\n")
    with pytest.raises(
        DataError, match=r"'texas' in .* cannot be read \(ValueError: .*fetch texas$"
    ):
        load_dataset("texas", tmp_path)
    assert [path.name for path in (tmp_path / info.home).iterdir()] == ["raw"]


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_would_run_code_is_refused(
    protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    info = DATASETS["cora"]
    for file in info.files:
        write(tmp_path / info.home, file, "0\n")
    for file in info.files[:-1]:
        (tmp_path / info.home / file).write_bytes(pickle.dumps([Evil()], protocol=protocol))
    with pytest.raises(DataError, match="is a pickle that names"):
        load_dataset("cora", tmp_path)
    assert not (tmp_path / "evil").exists()


def test_a_cache_beside_the_raw_files_is_never_opened(tmp_path: Path) -> None:
    home = tmp_path / DATASETS["texas"].home
    geom_gcn(DATASETS["texas"], home)
    (home / "processed").mkdir()
    (home / "processed" / "data.pt").write_bytes(pickle.dumps(Evil()))
    for _ in range(2):
        assert load_dataset("texas", tmp_path).y.tolist() == [0, 1, 1]
    assert sorted(path.name for path in home.iterdir()) == ["processed", "raw"]


def test_nothing_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # PyG is silent when it sees this
    info = DATASETS["texas"]
    geom_gcn(info, tmp_path / info.home)
    load_dataset("texas", tmp_path)
    assert capfd.readouterr() == ("", "")


def test_names_joined_by_plus_are_a_group() -> None:
    assert sets_of_group("proteins+MUTAG") == ("PROTEINS", "MUTAG")
    assert sets_of_group("Molecules") == GROUPS["molecules"]
    assert task_of_data("PROTEINS+MUTAG:features=degree") == "graph"


@pytest.mark.parametrize(
    "name", ["PROTEINS", "cora+MUTAG", "PROTEINS+", "PROTEINS+nothing", "tu:A+B"]
)
def test_everything_else_is_not(name: str) -> None:
    assert sets_of_group(name) == ()


def test_a_set_that_does_not_exist_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"unknown data set 'PROTEINS\+MUTAGG'"):
        load("PROTEINS+MUTAGG")


@pytest.mark.data
def test_each_client_has_a_set_of_its_own(real_data) -> None:
    real_data("MUTAG")
    group, _ = load("MUTAG+PTC_MR:features=degree", root=real_data("PTC_MR"))
    assert [one.name for one in group.sets] == ["MUTAG", "PTC_MR"]
    assert group.name == "mutag+ptc_mr"


def test_files_that_ask_for_too_much_memory_are_named_in_one_sentence(tmp_path, monkeypatch):
    def greedy(*_: object) -> np.ndarray:
        return np.empty((1 << 59,))

    monkeypatch.setattr("atoll.data.public.registry.missing_files", lambda *_: [])
    monkeypatch.setitem(READERS, "Planetoid", greedy)
    match = r"data set 'cora' needs more memory than there is, or is damaged; .*fetch cora$"
    with pytest.raises(DataError, match=match):
        load_dataset("cora", root=tmp_path)
