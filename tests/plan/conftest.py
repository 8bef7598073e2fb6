"""Plans keep their answers in a folder of the test."""

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGITLESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plan"
