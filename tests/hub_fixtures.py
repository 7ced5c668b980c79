"""Fixtures for tests of hub models: a stand-in pair, a run of the small paper profile, an empty cache of the hub's client."""

from types import SimpleNamespace

import pytest

from kvlib.study import hub
from kvlib.study.run import Run
from tests.standins import save_fineweb, save_pair, save_profile, save_wikitext, texts_of


@pytest.fixture
def small_pair(tmp_path):
    wikitext = save_wikitext(tmp_path / "wikitext", {"train": 40, "test": 10})
    return SimpleNamespace(
        home=tmp_path,
        wikitext=wikitext,
        fineweb=save_fineweb(tmp_path / "fineweb", 8),
        places=save_pair(tmp_path / "models", "llama", texts_of(wikitext)),
    )


@pytest.fixture
def small_run(small_pair, monkeypatch):
    """Opens a run of the small paper profile, with other places and overrides."""
    monkeypatch.setenv("KVLIB_HOME", str(small_pair.home))

    def open_run(places: dict | None = None, name: str = "run", **overrides) -> Run:
        profile = save_profile(
            small_pair.home, "paper", places or small_pair.places, small_pair.wikitext, small_pair.fineweb
        )
        return Run.open(str(profile), name, results=small_pair.home, overrides=overrides)

    return open_run


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty cache of the hub's client."""
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
