"""Sites with their own tables agree on one encoder. Owners decide what they send for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import atoll
from atoll.core.errors import ConfigError
from atoll.data.own.reader import load_own
from atoll.deploy.disclosure import disclosure
from atoll.deploy.policy import Policy
from atoll.deploy.site import Site
from atoll.deploy.site_data import read_site_data
from atoll.engines.fleet import PROTOCOL, Packet, SitesFailed
from atoll.experiment.config import config_text, make_config
from atoll.testing import small_federation
from tests.data.own.graphs import folder

SMALL = {"hidden": 8}
DECLARED = """
[columns]
age = {scale = "range", range = [0, 90]}
sex = {kind = "category", values = ["f", "m", "x"]}
"""
DP = {"clip": 1.0, "noise": 1.0}


def hospital(path: Path, number: int, schema: str = "", rows: int = 24) -> Path:
    """The tables of one hospital, of which only the second has sex = x, in six rows."""
    lines = []
    for i in range(rows):
        sex = "x" if number == 1 and i % 4 == 0 else "fm"[i % 2]
        lines.append(f"{i},{20 + 3 * i + 10 * number},{sex},{'uv'[i % 3 == 0]}")
    edges = "\n".join(["source,target", *(f"{i},{(i + 1) % rows}" for i in range(rows))])
    return folder(path, "\n".join(["id,age,sex,label", *lines]), edges, schema)


def two(
    room, path: Path, schema: str = "", policy: Policy | None = None, classes: tuple[str, ...] = ()
) -> dict[str, Site]:
    room.names, rules = ("h0", "h1"), policy or Policy()
    sites = {}
    for number, name in enumerate(room.names):
        given = {"rare": rules.rare_categories, "classes": classes}
        data = read_site_data(hospital(path / name, number, schema), **given)
        sites[name] = Site(data, rules, path / f"{name}-site")
    return sites


def test_two_hospitals_of_which_one_has_sex_x(make_room, tmp_path) -> None:
    room = make_room(small_federation())
    sites = two(room, tmp_path)
    room.run(room.order("fedavg", rounds=2, set=SMALL), room.fleet(sites=sites))
    for number in range(2):  # as one table, of which each hospital has its part
        name = f"h{number}"
        (tmp_path / "all" / name).mkdir(parents=True)
        for file in ("nodes.csv", "edges.csv"):
            (tmp_path / "all" / name / file).write_bytes((tmp_path / name / file).read_bytes())
    whole, report = load_own(tmp_path / "all")
    assert report.features == ("age", "sex=f", "sex=m", "sex=x")
    for name, site in sites.items():
        mine = torch.from_numpy(whole.x[whole.columns["client"] == name])
        assert torch.equal(site.data.graph.x, mine)
        told = next(iter(site.audit.events(event="hello")))["told"]
        assert told["columns"] == ["age", "sex"]
    agreed = json.loads((room.folder / "server" / "encoder.json").read_text())
    assert [one["name"] for one in agreed] == ["age", "sex"]
    assert agreed[1]["values"] == ["f", "m", "x"]


def test_hospitals_get_the_numbers_of_a_simulation(make_room, tmp_path) -> None:
    """Without dropout, whose noise depends on the numbers of the rows in all tables together."""
    room, sites, chosen = make_room(small_federation()), {}, {"hidden": 8, "dropout": 0.0}
    room.names = ("h0", "h1")
    for number, name in enumerate(room.names):
        tables = hospital(tmp_path / "all" / name, number)
        head, *rows = (tables / "nodes.csv").read_text().splitlines()
        roles = [f"{row},{('train', 'val', 'test')[i % 3]}" for i, row in enumerate(rows)]
        (tables / "nodes.csv").write_text("\n".join([f"{head},split", *roles]))
        data = read_site_data(tables, split="given")
        sites[name] = Site(data, Policy(), tmp_path / f"{name}-site")
    room.run(room.order("fedavg", rounds=3, set=chosen), room.fleet(sites=sites))
    options = {"engine": "serial", "split": "given", "set": chosen, "out": tmp_path / "out"}
    atoll.run("fedavg", str(tmp_path / "all"), rounds=3, **options)
    live, simulated = (path / "metrics.csv" for path in (room.folder / "server", tmp_path / "out"))
    assert live.read_text() == simulated.read_text()


def test_a_resumed_run_keeps_its_encoder(make_room, tmp_path) -> None:
    room = make_room(small_federation())
    before = two(room, tmp_path)
    order = room.order("fedavg", rounds=2, set=SMALL)
    room.run(order, room.fleet(sites=before))
    for site in before.values():
        site.close()
    after = two(room, tmp_path)
    room.run(order, room.fleet(sites=after))
    for name, site in after.items():
        assert torch.equal(site.data.graph.x, before[name].data.graph.x)


@pytest.mark.parametrize(
    ("policy", "schema", "options", "sentence"),
    [
        (Policy(statistics=False), "", {}, "its policy does not allow statistics of columns"),
        (Policy(), "", {"dp": DP}, "a private run tells no statistics of rows"),
        (Policy(), "[columns.age]\nscale='robust'\n", {}, "column 'age' needs a median"),
    ],
)
def test_owners_may_refuse(make_room, tmp_path, policy, schema, options, sentence) -> None:
    room = make_room(small_federation())
    sites = two(room, tmp_path, schema, policy)
    with pytest.raises(SitesFailed, match=sentence):
        room.run(room.order("fedavg", rounds=1, **options), room.fleet(sites=sites))


def test_a_private_run_with_declared_columns(make_room, tmp_path) -> None:
    room = make_room(small_federation())
    sites = two(room, tmp_path, DECLARED, Policy(statistics=False), ("u", "v", "w"))
    room.run(room.order("fedavg", rounds=1, set=SMALL, dp=DP), room.fleet(sites=sites))
    assert sites["h0"].data.graph.num_features == 4


def test_pooled_is_for_simulations(make_room, tmp_path) -> None:
    room = make_room(small_federation())
    with pytest.raises(ConfigError, match="--encoder pooled is for simulations"):
        room.run(room.order("fedavg", encoder="pooled"), room.fleet(sites=two(room, tmp_path)))


def test_rare_values_stay_at_their_site(make_room, tmp_path) -> None:
    with pytest.raises(ConfigError, match="column 'sex' has values in fewer than 7 rows, which"):
        read_site_data(hospital(tmp_path / "alone", 1), rare=7)
    room = make_room(small_federation())
    other = '[columns.sex]\nkind = "category"\nother = "other"\n'
    sites = two(room, tmp_path, other, Policy(rare_categories=7))
    room.run(room.order("fedavg", rounds=1, set=SMALL), room.fleet(sites=sites))
    x = sites["h1"].data.graph.x
    assert x.shape[1] == 4
    # x is one of the others, and no site was told its name. So is f, which only h0 told.
    assert x[:, 3].sum() == 12
    assert not any("x" in one.values for site in sites.values() for one in site.data.told)


def test_a_dry_run_shows_what_is_told_of_columns(tmp_path) -> None:
    data = read_site_data(hospital(tmp_path / "h", 1))
    found = disclosure(make_config(method="fedavg"), data, Policy())["told_of_columns"]
    assert [(one["name"], one["rows"], one["values"]) for one in found] == [
        ("age", 24, ()),
        ("sex", 0, ("f", "m", "x")),
    ]
    refused = disclosure(make_config(method="fedavg"), data, Policy(statistics=False))
    assert refused["told_of_columns"].startswith("refused: its policy does not allow statistics")
    local = disclosure(make_config(method="fedavg", encoder="local"), data, Policy())
    assert local["told_of_columns"] == "nothing, with --encoder local"


def begun(site: Site, encoder: object) -> Packet:
    config = 'method = "fedavg"\nrounds = 1\n'
    return site.answer(
        Packet({"do": "begin", "run": "r", "config": config, "encoder": encoder}, b"")
    )


@pytest.mark.parametrize(
    "encoder",
    [
        [{"name": "age"}],
        [{"name": "age", "spread": 0.0}, {"name": "sex"}],
        [{"name": "age", "centre": 1e999}, {"name": "sex"}],
        [{"name": "age", "code": "x"}, {"name": "sex"}],
        "age",
    ],
)
def test_a_false_encoder_is_refused(tmp_path, encoder: object) -> None:
    site = Site(read_site_data(hospital(tmp_path / "h", 1)), Policy(), tmp_path / "site")
    answer = begun(site, encoder)
    assert answer.head["failure"] == "bad"
    assert site.job is None


@pytest.mark.parametrize(
    "told",
    [b"{", b"[3]", b'[{"name": "age", "form": "number", "rows": -1}]', b'[{"name": 3}]'],
)
def test_false_statistics_of_a_site_are_refused(make_room, tmp_path, told: bytes) -> None:
    room = make_room(small_federation())

    def lie(site: str, question: Packet, answer: Packet) -> Packet:
        lying = site == "h1" and question.head["do"] == "hello"
        return Packet(answer.head, told) if lying else answer

    fleet = room.fleet(lie, sites=two(room, tmp_path))
    with pytest.raises(SitesFailed, match="h1: its summary of the data cannot be used"):
        room.run(room.order("fedavg", rounds=1), fleet)


def greeted(site: Site, mode: str, dp: object = None) -> Packet:
    head = {"do": "hello", "version": PROTOCOL, "run": "r", "method": "fedavg", "rounds": 1}
    return site.answer(Packet({**head, "dp": dp, "encoder": mode}, b""))


@pytest.mark.parametrize("mode", ["federated", "local", "pooled", "", "other"])
def test_no_way_to_greet_a_site_gives_values_that_it_keeps_back(tmp_path, mode: str) -> None:
    rare = '[columns.sex]\nkind = "category"\nother = "other"\n'
    path = hospital(tmp_path / "h", 1, rare)
    keeps = Site(read_site_data(path, rare=7), Policy(rare_categories=7), tmp_path / "keeps")
    private = Site(read_site_data(path), Policy(), tmp_path / "private")
    for answer in (greeted(keeps, mode), greeted(private, mode, DP)):
        told = answer.body + json.dumps(answer.head).encode()
        assert b"sex=x" not in told
        assert b'"x"' not in told
    refused = greeted(private, mode, DP).head
    assert (refused["failure"], "values of categories" in refused["reason"]) == ("refused", True)
    if mode == "federated":
        assert "failure" not in greeted(keeps, mode).head
    else:
        assert "rare_categories = 7" in greeted(keeps, mode).head["reason"]


@pytest.mark.parametrize("mode", ["federated", "local", ""])
def test_a_private_run_tells_no_class_that_only_the_rows_name(tmp_path, mode: str) -> None:
    path = hospital(tmp_path / "h", 1, DECLARED)
    found = Site(read_site_data(path), Policy(), tmp_path / "found")
    listed = Site(read_site_data(path, classes=("u", "v", "w")), Policy(), tmp_path / "listed")
    answer = greeted(found, mode, DP).head
    assert answer["failure"] == "refused"
    assert answer["reason"].startswith("a private run tells no class, and no number of classes, ")
    assert "words" not in answer
    config = make_config(method="fedavg", set=SMALL, dp=DP, rounds=1, positive="x", encoder="local")
    begin = {"do": "begin", "run": "r-0", "config": config_text(config)}
    assert found.answer(Packet(begin, b"")).head["reason"] == answer["reason"]
    assert "class u" in greeted(found, mode).head["words"]
    assert greeted(listed, mode, DP).head["words"][:3] == ["class u", "class v", "class w"]
    lines = (path / "nodes.csv").read_text().replace(",u", ",0").replace(",v", ",1")
    (path / "nodes.csv").write_text(lines)  # one more row with 2 would tell that it is there
    numbered = Site(read_site_data(path), Policy(), tmp_path / "numbered")
    assert greeted(numbered, mode, DP).head["reason"] == answer["reason"]
    public = Site(read_site_data(path, classes=("0", "1", "2")), Policy(), tmp_path / "public")
    assert greeted(public, mode, DP).head["classes"] == 3


def test_a_private_run_tries_no_encoder_of_the_server_on_its_rows(tmp_path) -> None:
    """Else success and failure would answer questions about rows, without noise."""
    data = read_site_data(hospital(tmp_path / "alone", 1))
    site = Site(data, Policy(), tmp_path / "site")
    config = config_text(make_config(method="fedavg", set=SMALL, dp=DP, rounds=1))
    encoder = [{"name": "age", "centre": 0.0, "spread": 1.0}, {"name": "sex", "values": ["f", "m"]}]
    begin = {"do": "begin", "run": "r-0", "config": config, "encoder": encoder}
    answer = site.answer(Packet(begin, b"")).head
    assert answer["failure"] == "refused"
    assert "a private run tells no statistics of rows" in answer["reason"]


RARE = '[columns.sex]\nkind = "category"\nother = "other"\n'


def test_a_rare_value_that_a_server_guesses_gets_no_column(tmp_path) -> None:
    """Else its row of the weights would be trained, which tells that the value occurs."""
    path = hospital(tmp_path / "h", 1, RARE)
    site = Site(read_site_data(path, rare=7), Policy(rare_categories=7), tmp_path / "site")
    guesses = ["f", "m", "x", "y"]  # of which only m is in 7 rows or more
    assert begun(site, [{"name": "age"}, {"name": "sex", "values": guesses}]).head == {}
    x = site.data.graph.x
    assert x[:, 1:].sum(0).tolist() == [0, 12, 0, 0, 12]
    kept = read_site_data(path, rare=100)
    assert kept.told[1].values == ()


def test_a_run_that_hello_would_refuse_does_not_begin(tmp_path) -> None:
    path = hospital(tmp_path / "h", 1, RARE)
    site = Site(read_site_data(path, rare=7), Policy(rare_categories=7), tmp_path / "site")
    for mode in ("local", "federated", None):
        config = config_text(make_config(method="fedavg", rounds=1, encoder=mode))
        answer = site.answer(Packet({"do": "begin", "run": "r", "config": config}, b"")).head
        assert "rare_categories = 7" in answer["reason"]
    assert site.job is None


AGREED = [
    {"name": "age", "centre": 50.0, "spread": 10.0},
    {"name": "sex", "values": ["f", "m", "x"]},
]


def test_a_run_has_one_encoder_and_a_refused_begin_changes_nothing(tmp_path) -> None:
    site = Site(read_site_data(hospital(tmp_path / "h", 1)), Policy(), tmp_path / "site")
    assert begun(site, AGREED).head == {}
    job, x, folders = site.job, site.data.graph.x.clone(), set((tmp_path / "site/runs").iterdir())
    other = [{**AGREED[0], "centre": 1.0}, AGREED[1]]
    for encoder in (other, []):
        assert "with another encoder of its tables" in begun(site, encoder).head["reason"]
    config = config_text(make_config(method="fedavg", rounds=2))
    for run, reason in (("r", "with another configuration"), ("s", "")):
        head = {"do": "begin", "run": run, "config": config, "encoder": other}
        head |= {} if reason else {"config": config.replace("fedavg", "fedavgg")}
        answer = site.answer(Packet(head, b"")).head
        assert reason in answer["reason"]
        assert site.job is job
    assert torch.equal(site.data.graph.x, x)
    unknown = config_text(make_config(method="fedavg", rounds=2, metric="recall", positive="zzz"))
    answer = site.answer(Packet({"do": "begin", "run": "t", "config": unknown}, b"")).head
    assert "zzz" in answer["reason"]
    assert set((tmp_path / "site/runs").iterdir()) == folders


def test_a_begin_that_waited_for_the_lock_overwrites_no_encoder(tmp_path, monkeypatch) -> None:
    """The encoder is written where no other job begins: after the last check, before the note."""
    data = read_site_data(hospital(tmp_path / "h", 1))
    first, second = (Site(data, Policy(), tmp_path / "site") for _ in range(2))
    hold = second._hold

    def waited(folder: Path) -> object:
        assert begun(first, AGREED).head == {}
        first.close()
        return hold(folder)

    monkeypatch.setattr(second, "_hold", waited)
    other = [{**AGREED[0], "centre": 1.0}, AGREED[1]]
    assert "with another encoder of its tables" in begun(second, other).head["reason"]
    trained = Site(data, Policy(), tmp_path / "site").data_of("r")
    assert [one["centre"] for one in trained.encoder["features"]] == [50.0, 0.0]


def test_greetings_note_the_names_of_columns_once(tmp_path) -> None:
    """A site may have thousands of columns, and a server may greet it without a pause."""
    site = Site(read_site_data(hospital(tmp_path / "h", 1)), Policy(), tmp_path / "site")
    for _ in range(3):
        assert greeted(site, "federated").body
    site = Site(read_site_data(hospital(tmp_path / "i", 1)), Policy(), tmp_path / "site")
    assert greeted(site, "federated").body
    first, *more = [event["told"] for event in site.audit.events(event="hello")]
    assert first["columns"] == ["age", "sex"]
    assert [told["columns"] for told in more] == [2, 2, 2]
    assert len({told["sha256"] for told in more}) == 1


def test_a_run_does_not_train_on_the_encoding_of_another(tmp_path) -> None:
    site = Site(read_site_data(hospital(tmp_path / "h", 1)), Policy(), tmp_path / "site")
    assert begun(site, AGREED).head == {}
    head = {"do": "begin", "run": "local", "config": 'method = "fedavg"\nrounds = 1\n'}
    assert site.answer(Packet(head, b"")).head == {}
    assert torch.equal(site.job.graph.x, site.own.graph.x)


def test_a_run_that_an_earlier_version_began_continues_with_its_encoder(tmp_path) -> None:
    site = Site(read_site_data(hospital(tmp_path / "h", 1)), Policy(), tmp_path / "site")
    site.audit.note("begin", run="r", config='method = "fedavg"\nrounds = 1\n')
    assert begun(site, AGREED).head == {}
    assert "with another encoder" in begun(site, []).head["reason"]


def lying(room, path: Path, head: dict[str, object], column: dict[str, object], liars=("h1",)):
    """The sentence of a run in which some sites tell other values of their data and columns."""

    def lie(site: str, question: Packet, answer: Packet) -> Packet:
        if site not in liars or question.head["do"] != "hello":
            return answer
        told = [{**one, **column} for one in json.loads(answer.body)]
        return Packet({**answer.head, **head}, json.dumps(told).encode())

    fleet = room.fleet(lie, sites=two(room, path))
    with pytest.raises(SitesFailed) as error:
        room.run(room.order("fedavg", rounds=1), fleet)
    return str(error.value)


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        ({"rows": 5, "mean": 1e200}, "the statistics of column 'age' are too large"),
        ({"rows": 3, "rest": -1e308}, "the statistics of column 'age' are too large"),
        ({"rows": 3, "squares": 1e308}, "the statistics of column 'age' are too large"),
        ({"rows": 5, "form": ""}, "the form of column 'age' is not complete"),
        ({"rows": 5, "form": "number, x"}, "the form of column 'age' is not complete"),
        ({"rows": 25}, "a column has 25 rows, but there are 24 nodes"),
        ({"rows": 2**63}, "rows, but there are 24 nodes"),
    ],
)
def test_a_site_whose_statistics_are_not_plausible_is_named(make_room, tmp_path, column, problem):
    said = lying(make_room(small_federation()), tmp_path, {}, column)
    assert said.startswith("h1: its summary of the data cannot be used: ")
    assert problem in said


@pytest.mark.parametrize("classes", [0, 1, 10**6])
def test_sites_that_all_tell_an_absurd_number_of_classes_get_a_sentence(
    make_room, tmp_path, classes: int
) -> None:
    head = {"classes": classes}
    said = lying(make_room(small_federation()), tmp_path, head, {}, ("h0", "h1"))
    assert "cannot be used: Expected `int`" in said
