"""Events of a study: appended by several processes, read without half lines."""

from __future__ import annotations

from pathlib import Path

from atoll.experiment.events import EVENTS, NewEvents, append_event, failures, read_events


def test_half_a_line_costs_one_event_only(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []
    append_event(tmp_path, {"event": "begin", "cell": "a"})
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"event": "end", "ce')  # the process was killed here
    append_event(tmp_path, {"event": "begin", "cell": "b"})
    assert [event["cell"] for event in read_events(tmp_path)] == ["a", "b"]


def test_a_failure_counts_until_the_cell_begins_again(tmp_path: Path) -> None:
    append_event(tmp_path, {"event": "failed", "cell": "a", "error": "no"})
    append_event(tmp_path, {"event": "failed", "cell": "b"})
    assert failures(tmp_path) == {"a": "no", "b": "failed"}
    append_event(tmp_path, {"event": "begin", "cell": "a"})
    assert failures(tmp_path) == {"b": "failed"}


def test_new_events_are_whole_lines_since_the_last_call(tmp_path: Path) -> None:
    append_event(tmp_path, {"event": "begin", "cell": "old"})
    news = NewEvents(tmp_path)
    assert news.read() == []
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"event": "begin", "cell": "a"}\n{"event"')
    assert [event["cell"] for event in news.read()] == ["a"]
    with (tmp_path / EVENTS).open("a") as file:
        file.write(': "end", "cell": "a"}\n')
    assert [event["event"] for event in news.read()] == ["end"]
