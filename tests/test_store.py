"""The memory that a store of windows takes: what was read stays in reach only where that is a small part of the machine's."""

import re
from pathlib import Path

import pytest
import torch

from kvlib.cache import Geometry
from kvlib.study import store as stores
from kvlib.study.store import WindowStore

WINDOWS, TOKENS, GEOMETRY, HIDDEN = 6, 64, Geometry(4, 4, 64), 32


@pytest.fixture
def store(tmp_path) -> WindowStore:
    """Of zeros: what is read is not looked at."""
    windows = torch.zeros(WINDOWS, TOKENS, dtype=torch.int64)
    return WindowStore(tmp_path, windows, GEOMETRY, HIDDEN, torch.bfloat16)


def mapped_bytes(store: WindowStore) -> int:
    """How much of the store's files this process has in reach."""
    text = Path("/proc/self/smaps").read_text()
    sizes = re.findall(rf"{re.escape(str(store.folder))}/\S+\n(?:\S.*\n)*?Rss: +(\d+) kB", text)
    return 1024 * sum(map(int, sizes))


def read(store: WindowStore, chosen: list[int]) -> int:
    """The bytes of the caches in a warm-up's batch, all of which are read."""
    batch = store.batch(chosen, [TOKENS - 1] * len(chosen), 1, with_target=True)
    rows = [*batch.source.rows, *batch.target.rows]
    assert not any(row.any() for row in rows)
    return sum(row.nbytes for row in rows)


def test_files_that_are_large_for_the_machine_are_let_go_of_batch_by_batch(store, monkeypatch):
    monkeypatch.setattr(stores, "MAPPED_SHARE", 0)
    each = [(read(store, [n, n + 1]), mapped_bytes(store)) for n in range(WINDOWS - 1)]
    # the system maps some of a page's neighbours
    whole = store.source[0].nbytes
    assert all(size <= mapped <= size + 2 * whole for size, mapped in each)
    store.batch([0], [9], 1, with_target=False)
    assert mapped_bytes(store) < whole


def test_small_files_stay_in_reach(store):
    sizes = [read(store, [n]) for n in range(WINDOWS)]
    assert store.stays_mapped and mapped_bytes(store) >= sum(sizes)
    store.batch([0], [9], 1, with_target=False)
    assert mapped_bytes(store) >= sum(sizes)
    store.release()
    assert mapped_bytes(store) == 0
