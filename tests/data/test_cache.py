"""The disk cache: its entries, distrusted entries, and data that it never stores."""

import logging
import os
import threading
from pathlib import Path

import pytest

from atoll.data.cache import MOST, Cache, key_of


def write_text(text: str):
    return lambda path: path.write_text(text)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def one_entry(cache: Cache) -> Path:
    ((_, _, path),) = cache.entries()
    return path


def test_an_entry_is_read_as_it_was_written(cache):
    key = key_of("a", 1)
    assert cache.read("text", key, Path.read_text) is None
    cache.write("text", key, write_text("hello"))
    assert cache.read("text", key, Path.read_text) == "hello"
    assert cache.read("text", key_of("a", 2), Path.read_text) is None
    assert cache.read("other", key, Path.read_text) is None


def test_only_the_owner_reads_it(cache):
    cache.write("text", key_of("a"), write_text("hello"))
    modes = {path: path.stat().st_mode & 0o777 for path in (cache.folder, *cache.folder.rglob("*"))}
    assert len(modes) == 3
    assert all(mode == (0o600 if path.is_file() else 0o700) for path, mode in modes.items())


@pytest.mark.parametrize("damage", [b"", b"hellp", b"hello and more"])
def test_a_damaged_entry_is_deleted_and_reported(cache, caplog, damage):
    cache.write("text", key_of("a"), write_text("hello"))
    path = one_entry(cache)
    path.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert cache.read("text", key_of("a"), Path.read_text) is None
    assert "is damaged" in caplog.text
    assert not path.exists()
    cache.write("text", key_of("a"), write_text("hello"))
    assert cache.read("text", key_of("a"), Path.read_text) == "hello"


def test_an_entry_that_cannot_be_parsed_is_made_again(cache):
    cache.write("text", key_of("a"), write_text("hello"))

    def fails(path: Path) -> str:
        raise ValueError("no number")

    assert cache.read("text", key_of("a"), fails) is None
    assert not cache.entries()


def test_the_least_recently_used_goes_first(cache):
    small = Cache(cache.folder, limit=4000)
    for number in range(4):
        small.write("text", key_of(number), write_text("x" * 900))
        os.utime(small.entries()[-1][2], (number, number))
    assert small.read("text", key_of(0), Path.read_text) is not None  # it is the latest now
    small.write("text", key_of(4), write_text("x" * 900))
    assert small.read("text", key_of(1), Path.read_text) is None
    assert small.read("text", key_of(0), Path.read_text) is not None
    assert sum(size for _, size, _ in small.entries()) <= small.limit


def test_a_very_large_entry_is_not_kept(cache):
    small = Cache(cache.folder, limit=MOST * 100)
    small.write("text", key_of("a"), write_text("x" * 101))
    assert not small.entries()
    small.write("text", key_of("a"), lambda path: pytest.fail("nothing is written"), size=101)
    small.write("text", key_of("a"), write_text("x" * 100))
    assert len(small.entries()) == 1


def test_many_writers_and_readers_share_a_folder(cache):
    small, failed = Cache(cache.folder, limit=20_000), []

    def work(start: int) -> None:
        for number in range(start, start + 30):
            key, text = key_of(number % 10), f"{number % 10}" * 2000
            small.write("text", key, write_text(text))
            found = small.read("text", key, Path.read_text)
            if found not in (None, text):
                failed.append(found)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert small.entries()
    assert not list(cache.folder.rglob(".new-*"))


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cache")
    cache.write("text", key_of("a"), write_text("hello"))
    assert cache.read("text", key_of("a"), Path.read_text) is None


def test_a_changed_raw_file_is_noticed_and_others_are_not_read_again(cache, tmp_path, monkeypatch):
    raw = tmp_path / "home" / "raw" / "a.txt"
    raw.parent.mkdir(parents=True)
    raw.write_text("one")
    (tmp_path / "home" / "processed").mkdir()
    first = cache.hash_of([tmp_path / "home"])
    assert not cache.entries()  # the file is so young that it may change without a new time
    monkeypatch.setattr("atoll.data.cache.RECENT", -1e9)
    assert cache.hash_of([tmp_path / "home"]) == first
    assert len(cache.entries()) == 1
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("it was read again"))
    assert cache.hash_of([tmp_path / "home"]) == first
    monkeypatch.undo()
    (tmp_path / "home" / "processed" / "data.pt").write_text("PyG's own cache")
    assert cache.hash_of([tmp_path / "home"]) == first
    times = raw.stat().st_atime_ns, raw.stat().st_mtime_ns
    raw.write_text("two")  # as long as before
    os.utime(raw, ns=times)
    assert cache.hash_of([tmp_path / "home"]) != first


def test_keys_know_code_and_packages(monkeypatch):
    before = key_of("a")
    monkeypatch.setattr("atoll.data.cache._code", lambda: "edited")
    edited = key_of("a")
    monkeypatch.setattr("atoll.data.cache._versions", lambda: {"numpy": "9"})
    assert len({before, edited, key_of("a")}) == 3


def test_where_it_is(monkeypatch, tmp_path):
    for name in ("ATOLL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert Cache.of_environment() == Cache(Path("~/.cache/atoll/prepared").expanduser())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Cache.of_environment() == Cache(tmp_path / "atoll" / "prepared")
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "own"))
    assert Cache.of_environment() == Cache(tmp_path / "own" / "prepared")
    monkeypatch.setenv("ATOLL_CACHE", "off")
    assert Cache.of_environment() is None


def test_clearing_deletes_entries_and_no_other_file(cache):
    for number in range(3):
        cache.write("text", key_of(number), write_text("hello"))
    shelf = one = cache.entries()[0][2].parent
    mine = [cache.folder / "notes.txt", shelf / "my-own-file", shelf / "a-b-c",
            cache.folder / "zz" / "text-my-thesis", cache.folder / "deep" / "er" / "x"]  # fmt: skip
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    assert len(cache.entries()) == 3
    Cache(cache.folder, limit=0)._make_room()
    cache.clear()
    assert not cache.entries()
    assert all(path.read_text() == "mine" for path in mine)
    assert {path for path in cache.folder.rglob("*") if path.is_file()} == set(mine)
    assert one.exists()
    for path in mine:
        path.unlink()
    cache.clear()
    assert not one.exists()


@pytest.mark.parametrize("error", [MemoryError, RecursionError, AttributeError, IndexError])
def test_an_entry_that_fails_its_reader_in_any_way_is_made_again(cache, error):
    cache.write("text", key_of("a"), write_text("hello"))

    def fails(path: Path) -> str:
        raise error

    assert cache.read("text", key_of("a"), fails) is None
    assert not cache.entries()


def test_no_file_for_sites_names_the_cache():
    files = (Path(__file__).parents[2] / "src" / "atoll" / "deploy").rglob("*.py")
    read = {path.name: path.read_text() for path in files}
    assert len(read) > 10
    assert not [name for name, text in read.items() if "data.cache" in text or "Problem" in text]


@pytest.mark.parametrize("place", ["folder", "shelf", "entry"])
def test_an_entry_that_another_user_could_have_written_is_not_read(cache, place, monkeypatch):
    key = key_of("a")
    cache.write("text", key, write_text("hello"))
    path = one_entry(cache)
    path = {"folder": cache.folder, "shelf": path.parent, "entry": path}[place]
    mode = path.stat().st_mode
    for writable in (0o020, 0o002):
        path.chmod(mode | writable)
        assert cache.read("text", key, Path.read_text) is None
    path.chmod(mode)
    assert cache.read("text", key, Path.read_text) == "hello"
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    assert cache.read("text", key, Path.read_text) is None


def test_clearing_leaves_folders_and_links_that_only_look_like_entries(cache, tmp_path):
    cache.write("text", key_of("a"), write_text("hello"))
    path = one_entry(cache)
    (tmp_path / "mine").write_text("mine")
    folder, link = (path.with_name(f"{path.name[:-8]}{n:08}") for n in (1, 2))
    folder.mkdir()
    link.symlink_to(tmp_path / "mine")
    notes = path.parent / ".new-notes" / "diary.txt"
    own, left = (path.parent / f".new-abcdefg{n}" / "x" for n in range(2))
    for file in (notes, own, left):
        file.parent.mkdir()
        file.write_text("mine")
        (file.parent / "entry.atoll").write_text("half")
        os.utime(file.parent, (1, 1))
    left.unlink()
    os.utime(left.parent, (1, 1))
    cache.clear()
    assert not path.exists()
    assert folder.is_dir()
    assert link.is_symlink()
    assert notes.exists()
    assert own.exists()
    assert not left.parent.exists()
