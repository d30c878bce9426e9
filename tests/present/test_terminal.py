"""Tables and progress: readable in 80 columns, quiet when asked, one Ctrl-C stops cleanly."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from rich.console import Console

import atoll
from atoll.experiment.result import Result
from atoll.experiment.run import Stopped
from atoll.present.tables import Column, make_table, rich_table
from atoll.present.terminal import Watcher, client_table, percent, result_table

SMALL = {"data": "lagoon:nodes=150", "clients": 3, "rounds": 4}


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return [atoll.run(name, seeds=2, **SMALL) for name in ("local", "fedprox")]


def text_of(thing: object, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(thing)
    return console.file.getvalue()


def test_the_table_reads_well_in_80_columns(results: list[Result]) -> None:
    lines = text_of(result_table(results)).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == (
        "lagoon:nodes=150, 3 clients, column:owner, 4 rounds, 2 seeds, protocol strict"
    )
    head = next(line for line in lines if line.startswith("method"))
    for name in ("scored", "accuracy", "local", "macro F1", "MB/round", "s/round"):
        assert name in head
    rows = [line for line in lines if line.startswith(("local", "fedprox"))]
    assert ["personalised" in row for row in rows] == [True, False]
    assert all(row.count("±") == 3 for row in rows)
    assert "…" not in "".join(lines)
    assert "mean ± standard deviation over seeds" in " ".join(lines).replace("  ", " ")


def test_40_columns_leave_out_columns_from_the_right_and_name_them(results: list[Result]) -> None:
    lines = text_of(result_table(results), width=40).splitlines()
    assert max(map(len, lines)) <= 40
    head = next(line for line in lines if line.startswith("method"))
    assert head.split() == ["method", "scored", "accuracy"]
    assert "Too narrow for: local, macro F1," in "\n".join(lines)
    assert "…" not in "".join(lines)
    assert "Too narrow" not in text_of(result_table(results))  # 80 columns


def test_words_may_wrap_before_a_column_is_left_out() -> None:
    columns = ["name", Column("what it is", "left", wrap=True), "number"]
    table = rich_table(make_table(columns, [["a", "some quite long words", "12.5"]]))
    assert "12.5" in text_of(table, width=24)
    assert "Too narrow" not in text_of(table, width=24)
    narrow = text_of(table, width=12)
    assert "Too narrow for: number" in " ".join(narrow.split())
    assert "long" in narrow
    assert "12.5" in text_of(table, width=24)  # drawing it once changes nothing


def test_named_clients_have_a_table_of_their_own(results: list[Result]) -> None:
    assert client_table(results[0]) is None
    named = replace(results[0], federation={"client_names": ["north", "south", "west"]})
    lines = text_of(result_table([named])).splitlines()
    row = next(line.split() for line in lines if line.startswith("south"))
    mean = 100 * named.of_clients()[:, 1].mean()
    assert row[:3] == ["south", "49", f"{mean:.1f}"]
    assert "south" not in text_of(result_table([named, named]))


def test_one_seed_has_no_spread() -> None:
    text = text_of(result_table([atoll.run("fedavg", **SMALL)]))
    assert "1 seed," in text
    assert "±" not in text


def test_a_score_picked_on_test_data_is_called_that() -> None:
    result = atoll.run("gcfl", compat=("test-selection",), **SMALL)
    caption = " ".join(text_of(result_table([result])).split())
    assert "in percent, selected on the test data: each client's best model" in caption


def test_two_classes_show_an_auc() -> None:
    result = atoll.run(
        "fedavg", "lagoon:nodes=200,classes=2,label_skew=0", clients=2, rounds=2, seeds=2
    )
    text = text_of(result_table([result]))
    assert "AUC" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("per_seed", "shown"), [([0.781], "78.1"), ([0.775, 0.787], "78.1 ± 0.8"), (None, "-")]
)
def test_percent(per_seed: list[float] | None, shown: str) -> None:
    if per_seed is None:
        assert percent({}, "x") == shown
        return
    spread = {"mean": 0.781, "std": 0.0084, "per_seed": per_seed}
    assert percent({"x": spread}, "x") == shown


def watched(*, quiet: bool = False, terminal: bool = False, label: str = "", **options) -> str:
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal)
    with Watcher(console, quiet=quiet, label=label) as watcher:
        atoll.run("fedavg", observer=watcher, **{**SMALL, **options})
    return console.file.getvalue()


def test_without_a_terminal_some_lines_show_that_something_happens() -> None:
    lines = watched(rounds=8).splitlines()
    assert lines[0].startswith("engine fused: ")
    assert [line.split(",")[0] for line in lines[1:]] == [
        f"fedavg: round {r}/8" for r in (2, 4, 6, 8)
    ]
    assert "validation" in lines[1]


def test_quiet_is_silent_and_a_label_says_the_engine_no_more() -> None:
    assert watched(quiet=True) == ""
    assert watched(label="fedavg  ").startswith("fedavg: round 1/4, seed 0, validation")


def test_a_terminal_gets_a_bar() -> None:
    text = watched(terminal=True, seeds=2)
    assert "8/8" in text
    assert "validation" in text
    assert "round 1/4" not in text


def test_notes_with_brackets_are_shown_as_they_are(tmp_path) -> None:
    (tmp_path / "nodes.csv").write_text("id,[red],label\n" + "".join(
        f"{i},{'ab'[i % 2]},{'xy'[i // 2 % 2]}\n" for i in range(40)))  # fmt: skip
    edges = "".join(f"{i},{i + 1}\n" for i in range(39)) + "3,4\n"
    (tmp_path / "edges.csv").write_text("source,target\n" + edges)
    text = watched(data=str(tmp_path), clients=2)
    assert "column '[red]' became 2 columns" in text


@pytest.fixture
def handler() -> Iterator[Callable[..., object]]:
    before = signal.getsignal(signal.SIGINT)
    yield before
    assert signal.getsignal(signal.SIGINT) is before


def test_the_first_interrupt_stops_after_the_round_and_the_second_at_once(
    handler, tmp_path
) -> None:
    console = Console(file=io.StringIO(), width=80)

    class Interrupting(Watcher):
        def round(self, seed, history) -> None:
            super().round(seed, history)
            if history.rounds == 2:
                os.kill(os.getpid(), signal.SIGINT)

    with Interrupting(console, quiet=True) as watcher, pytest.raises(Stopped) as stop:
        atoll.run("fedavg", observer=watcher, out=tmp_path / "run", **SMALL)
    assert (stop.value.rounds, stop.value.seed) == (2, 0)
    assert "stopping after this round" in console.file.getvalue()
    with Watcher(console, quiet=True) as watcher:
        os.kill(os.getpid(), signal.SIGINT)
        assert watcher.should_stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_resumed_bar_goes_on_where_it_stopped(tmp_path) -> None:
    class Stopping(Watcher):
        def should_stop(self) -> bool:
            return bool(self.progress.tasks) and self.progress.tasks[0].completed >= 5

    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with Stopping(console, quiet=False) as watcher, pytest.raises(Stopped):
        atoll.run("fedavg", observer=watcher, out=tmp_path / "run", seeds=2, **SMALL)
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with Watcher(console, quiet=False) as watcher:
        atoll.resume(tmp_path / "run", watcher)
        assert watcher.progress.tasks[0].completed == 8


def test_a_run_in_another_thread_takes_no_signals() -> None:
    problems: list[BaseException] = []

    def work() -> None:
        try:
            watched(quiet=True)
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert problems == []
