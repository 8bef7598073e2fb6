"""Trackers: real ones, that reach no network unless they are told to."""

import contextlib
import json
import socket
import threading

import pytest

from logitless.train.config import LogConfig
from logitless.train.errors import TrainError
from logitless.train.sinks import open_sinks, read_metrics


@contextlib.contextmanager
def counted_network(monkeypatch):
    """A proxy for all of HTTP that serves nothing and counts who asks."""
    seen = []
    server = socket.create_server(("127.0.0.1", 0))

    def answer():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                seen.append(connection.recv(200))

    threading.Thread(target=answer, daemon=True).start()
    address = f"http://127.0.0.1:{server.getsockname()[1]}"
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, address)
        monkeypatch.setenv(name.lower(), address)
    try:
        yield seen
    finally:
        server.close()


def test_lines_are_kept_up_to_the_update_that_is_resumed(tmp_path):
    for keep, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        (sink,) = open_sinks(LogConfig(), "run", tmp_path, {}, keep_until=keep)
        for step in steps:
            sink.write(step, {"loss": step / 10 + keep, "kl": None})
        sink.close()
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 0.1), (2, 0.2), (3, 2.3), (4, 2.4)]


def test_a_line_that_was_cut_by_a_crash_does_not_count(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1}) + "\n" + '{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1}]
    path.write_text('{"step": 2, "lo\n' + json.dumps({"step": 3}) + "\n")
    with pytest.raises(TrainError, match="line 1: no JSON"):
        read_metrics(path)


def test_wandb_offline_keeps_the_run_and_reaches_no_network(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed (pip install '.[wandb]')")
    with counted_network(monkeypatch) as seen:
        sinks = open_sinks(LogConfig(wandb="offline"), "run", tmp_path, {"steps": 2}, keep_until=0)
        for sink in sinks:
            sink.write(1, {"loss": 0.5, "kl": None})
            sink.close()
    assert not seen, seen
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


def test_wandb_online_without_a_key_goes_offline_and_says_so(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed (pip install '.[wandb]')")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no netrc"))
    said = []
    with counted_network(monkeypatch):
        for sink in open_sinks(LogConfig(wandb="online"), "run", tmp_path, {}, keep_until=0, say=said.append):
            sink.close()
    assert len(said) == 1 and "no API key" in said[0] and "offline" in said[0]


def test_a_server_that_cannot_be_reached_does_not_stop_the_training(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed (pip install '.[wandb]')")
    real = wandb.init

    def init(mode, **options):
        if mode == "online":
            raise wandb.errors.CommError("Run initialization has timed out\nmore")
        return real(mode=mode, **options)

    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(wandb, "init", init)
    said = []
    sinks = open_sinks(LogConfig(wandb="online"), "run", tmp_path, {}, keep_until=0, say=said.append)
    for sink in sinks:
        sink.write(1, {"loss": 1.0})
        sink.close()
    assert said == [
        "wandb: the server cannot be reached (Run initialization has timed out): logging offline, training goes on"
    ]
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}]


def test_trackio_keeps_the_run_here(tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason="trackio is not installed (pip install '.[trackio]')")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    with counted_network(monkeypatch) as seen:
        for sink in open_sinks(LogConfig(trackio=True), "run", tmp_path, {"steps": 2}, keep_until=0):
            sink.write(1, {"loss": 0.5, "kl": None})
            sink.close()
    assert not [request for request in seen if b"127.0.0.1" not in request], seen
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["loss"] == 0.5


@pytest.mark.parametrize(("name", "config"), [("wandb", {"wandb": "offline"}), ("trackio", {"trackio": True})])
def test_a_tracker_that_is_not_installed(name, config, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TrainError, match=rf"pip install 'logitless\[{name}\]'"):
        open_sinks(LogConfig(**config), "run", tmp_path, {}, keep_until=0)
