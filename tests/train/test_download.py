"""The corpora that are there without data: Python's own sources, and tiny Shakespeare by download."""

import hashlib
import http.server
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kos.errors import DataError
from kos.files import cache_folder
from kos.train.data import download
from kos.train.data.corpus import read_corpus
from kos.train.data.stdlib import TRAIN, VAL, read_stdlib
from tests.train.corpora import PLAY, documents, refusal
from tests.train.refusal import refused


def test_the_standard_librarys_own_sources():
    assert len(set(TRAIN) | set(VAL)) == len(TRAIN) + len(VAL), "a file is in one split, once"
    for names in (TRAIN, VAL):
        assert list(names) == sorted(names)
        assert {name.partition("/")[0] for name in names} <= sys.stdlib_module_names
    train, val = read_stdlib()
    assert 4e6 < sum(map(len, train)) < 8e6
    assert 1.5e5 < sum(map(len, val)) < 5e5
    root = Path(os.__file__).parent
    assert (root / f"{TRAIN[0]}.py").read_text("utf-8") == train[0]
    got = read_corpus("stdlib").splits
    assert (got.train, got.val) == (train, val) and got.held_out.endswith(" and 14 more")


def test_a_python_without_sources_is_refused(tmp_path):
    with refused(DataError, "sources", str(tmp_path), "--data PATH"):
        read_stdlib(tmp_path)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Serves PLAY and its wrong versions; counts requests."""

    requests: ClassVar[Counter[str]]
    release: ClassVar[threading.Event]

    def do_GET(self) -> None:
        self.requests[self.path] += 1
        wrong = bytes([PLAY[0] ^ 1]) + PLAY[1:]
        body = {"/wrong": wrong, "/short": PLAY[:-5], "/long": PLAY + b"x", "/empty": b""}.get(self.path, PLAY)
        if self.path in ("/redirect", "/away"):
            self.send_response(302)
            self.send_header("Location", "/good" if self.path == "/redirect" else "file:///etc/hostname")
            self.end_headers()
            return
        self.send_response(404 if self.path == "/missing" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.path == "/broken":
            body = body[: len(body) // 2]
        self.wfile.write(body[:1000] if self.path == "/stall" else body)
        if self.path == "/stall":
            self.wfile.flush()
            self.release.wait(100)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def server():
    """A server on a free port of this host: its URL and the requests it got."""

    class Handler(_Handler):
        requests: ClassVar[Counter[str]] = Counter()
        release = threading.Event()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}", Handler.requests
        Handler.release.set()
        running.shutdown()
        thread.join(10)


NOWHERE = "http://127.0.0.1:9/"


@pytest.fixture
def play(tmp_path, monkeypatch):
    """PLAY in the place of tinyshakespeare, in a cache of its own, at no address that answers. Sets another one."""

    def published_at(url, seconds=20.0):
        about = {"URL": url, "SIZE": len(PLAY), "SHA256": hashlib.sha256(PLAY).hexdigest(), "SOCKET_SECONDS": seconds}
        for name, value in about.items():
            monkeypatch.setattr(download, name, value)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    published_at(NOWHERE)
    return published_at


def test_tinyshakespeare_is_the_published_file():
    assert download.SIZE == 1_115_394
    assert download.SHA256 == "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
    assert download.URL.endswith("karpathy/char-rnn/master/data/tinyshakespeare/input.txt")


@pytest.mark.parametrize("path", ["/good", "/redirect"])
def test_download_once_then_from_the_cache(tmp_path, server, play, path):
    (url, requests), text = server, PLAY.decode()
    at = int(len(text) * 0.9)  # nanoGPT
    file = tmp_path / "cache" / "kos" / "tinyshakespeare.txt"
    for address, damaged, requested in ((url + path, False, 1), (NOWHERE, False, 1), (url + path, True, 2)):
        play(address)
        if damaged:  # it is replaced
            file.write_bytes(PLAY[:-1] + b"?")
        assert documents("tinyshakespeare") == ([text[:at]], [text[at:]])
        assert [*file.parent.iterdir()] == [file]
        assert file.read_bytes() == PLAY and requests["/good"] == requested


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("/wrong", ["sha256", hashlib.sha256(PLAY).hexdigest()]),
        ("/short", [f"expected {len(PLAY)} bytes", f"got {len(PLAY) - 5}"]),
        ("/long", [f"expected {len(PLAY)} bytes", f"got more than {len(PLAY)}"]),
        ("/empty", [f"expected {len(PLAY)} bytes", "got 0"]),
        ("/broken", [f"expected {len(PLAY)} bytes", f"got {len(PLAY) // 2}"]),
        ("/missing", ["404", "--data PATH"]),
        ("/away", ["302", "--data PATH"]),
        ("/stall", ["timed out", "--data PATH"]),
    ],
)
def test_a_wrong_download_is_refused_and_leaves_nothing(tmp_path, server, play, path, parts):
    url, requests = server
    play(url + path, 0.3 if path == "/stall" else 20.0)
    refusal("tinyshakespeare", "--data tinyshakespeare", url + path, *parts)
    until = time.monotonic() + 20
    while not requests[path]:  # the server may be slower than the 0.3 s
        assert time.monotonic() < until
    assert requests[path] == 1
    assert not [*(tmp_path / "cache" / "kos").iterdir()]


def test_without_a_network_one_line_names_the_way_out(play):
    refusal("tinyshakespeare", download.URL, "refused", "without a network", "--data PATH")
    play("not a url")
    refusal("tinyshakespeare", "not a url", "--data PATH")


def test_a_cache_that_cannot_be_written(tmp_path, play, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    refusal("tinyshakespeare", "cache that can be written", str(tmp_path / "file"))


def test_the_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "kos"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for none in ("", "relative/cache", "~/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", none)
        assert cache_folder() == tmp_path / "home" / ".cache" / "kos"
