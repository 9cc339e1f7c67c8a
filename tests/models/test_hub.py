"""What the hub answers for a name, at a hub of the test's own on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from pykv import ModelError
from pykv.models.hub import confirmed_by_hub
from pykv.models.load import load_model
from pykv.models.sources import Checkpoint, find_checkpoint
from pykv.models.timed_step import say_nothing

COMMIT = "0" * 40
HEADERS = {"ETag": '"1"', "X-Repo-Commit": COMMIT, "Content-Length": "2"}
NAME = "owner/model"
OFFLINE = "may not be asked, since HF_HUB_OFFLINE is set"


class Hub(HTTPServer):
    """Answers every HEAD in the same way.

    Attributes:
        answer: status and headers.
        num_asked: requests so far.
    """

    answer: tuple[int, dict[str, str]] = (200, HEADERS)
    num_asked = 0


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.server.num_asked += 1
        status, headers = self.server.answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub(("127.0.0.1", 0), Handler) as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def end(hub: Hub) -> None:
    """Nobody listens there any more."""
    hub.shutdown()
    hub.server_close()


@pytest.fixture
def checkpoint() -> Checkpoint:
    return find_checkpoint(NAME, lambda _: None)


def cache(folder: str) -> None:
    """Puts the model's config into the hub's cache, as the hub's client does."""
    model = Path(folder) / "models--owner--model"
    (model / "snapshots" / COMMIT).mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "snapshots" / COMMIT / "config.json").write_text("{}")
    (model / "refs" / "main").write_text(COMMIT)


def test_a_model_that_the_hub_has_stays_one_of_the_hub(hub: Hub, checkpoint: Checkpoint) -> None:
    assert confirmed_by_hub(checkpoint, say_nothing) == checkpoint == Checkpoint(NAME, NAME, is_local=False)


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "RepoNotFound", "has no model of this name that may be read without HF_TOKEN"),
        (404, "RepoNotFound", "has no model of this name that may be read without HF_TOKEN"),
        (403, "GatedRepo", "gives it to those only who have accepted its terms"),
        (404, "EntryNotFound", r"has no config\.json under this name"),
        (503, "", "answers with an error: .*503"),
    ],
)
def test_what_the_hub_refuses_is_asked_once_and_says_where_was_looked(
    hub: Hub, checkpoint: Checkpoint, status: int, code: str, words: str
) -> None:
    hub.answer = status, {"X-Error-Code": code, "Content-Length": "0"} if code else {"Content-Length": "0"}
    folder = Path(NAME).absolute()
    with pytest.raises(
        ModelError,
        match=rf"^no model at {NAME}: there is no folder {folder}, and the hub http://127.*{words}",
    ):
        confirmed_by_hub(checkpoint, say_nothing)
    assert hub.num_asked == 1


@pytest.mark.parametrize("is_offline", [False, True])
def test_a_hub_that_cannot_be_asked_is_named_with_the_reason(
    hub: Hub, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, is_offline: bool
) -> None:
    end(hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    reason = OFFLINE if is_offline else "cannot be reached: .*refused"
    with pytest.raises(ModelError, match=f"{reason}, and its cache in .*cache has no such model"):
        confirmed_by_hub(checkpoint, say_nothing)


@pytest.mark.parametrize("is_offline", [False, True])
def test_a_model_in_the_cache_is_read_from_there_where_the_hub_cannot_be_asked(
    hub: Hub, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, is_offline: bool
) -> None:
    end(hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    cache(constants.HF_HUB_CACHE)
    found = confirmed_by_hub(checkpoint, say_nothing)
    assert (found.location, found.name, found.is_local) == (NAME, NAME, True)


@pytest.mark.parametrize("is_offline", [False, True])
def test_a_model_of_which_the_cache_has_a_part_alone_says_that_the_hub_was_not_asked(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, is_offline: bool
) -> None:
    end(hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    cache(constants.HF_HUB_CACHE)
    reason = OFFLINE if is_offline else "cannot be reached: .*refused"
    words = (
        rf"cannot be read: (?s:.*); it may be in the cache only in part, and the hub http://127.* {reason}"
    )
    with pytest.raises(ModelError, match=rf"^the model at {NAME} {words}"):
        load_model(NAME, device="cpu")


@pytest.mark.parametrize("is_offline", [False, True])
def test_that_the_hub_is_asked_is_told_where_it_is(
    hub: Hub, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, is_offline: bool
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    cache(constants.HF_HUB_CACHE)
    told: list[str] = []
    confirmed_by_hub(checkpoint, told.append)
    assert told == [f"asking the hub for {NAME}: no folder here has this name"] * (not is_offline)
    assert hub.num_asked == len(told)


@pytest.mark.parametrize("is_offline", [False, True])
def test_a_name_that_the_hubs_client_refuses_is_told_with_its_reason(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, is_offline: bool
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    with pytest.raises(ModelError, match=r"^no model at a/b-: .* takes this for no name: Repo id must"):
        confirmed_by_hub(Checkpoint("a/b-", "a/b-", is_local=False), say_nothing)
    assert hub.num_asked == 0
