"""The explorer at /explorer/: where it is offered, and that it runs under the server's security policy."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from support.served import server, tiny_model, tiny_multilabel
from vitral.errors import VitralError
from vitral.inference.predictor import Predictor
from vitral.serve.app import create_app
from vitral.serve.explorer import is_explorer_offered
from vitral.serve.limits import Limits
from vitral.serve.middleware import CONTENT_SECURITY_POLICY, ServerState, hash_keys
from vitral.serve.models import ServedModel, start_model_threads


@contextmanager
def serving(offers_explorer: bool, **folders):
    state = ServerState(limits=replace(Limits()), key_digests=hash_keys(None), offers_explorer=offers_explorer)
    with start_model_threads(decoders=1, workers=1) as threads:
        models = [
            ServedModel(name, Predictor.load(folder, device="cpu"), state.limits, threads, state.metrics)
            for name, folder in folders.items()
        ]
        with TestClient(create_app(models, state), base_url="http://localhost", follow_redirects=False) as client:
            yield client


@pytest.mark.parametrize(
    ("setting", "host", "keys", "offered"),
    [
        ("auto", "127.0.0.1", None, True),
        ("auto", "localhost", None, True),
        ("auto", "0.0.0.0", None, False),
        ("auto", "127.0.0.1", ["secret"], False),
        ("on", "0.0.0.0", None, True),
        ("off", "127.0.0.1", None, False),
    ],
)
def test_weights_are_published_to_this_machine_only_unless_requested(setting, host, keys, offered):
    assert is_explorer_offered(setting, host, keys) is offered


def test_explorer_cannot_be_combined_with_api_keys():
    with pytest.raises(VitralError, match="publishes the weights"):
        is_explorer_offered("on", "127.0.0.1", ["secret"])


def test_site_contains_the_models_that_a_browser_can_run(tmp_path):
    insects, things = tiny_model(tmp_path / "insects"), tiny_multilabel(tmp_path / "things")
    with serving(True, insects=insects, things=things) as client:
        described = {model["name"]: model["explorer"] for model in client.get("/v1/models").json()["models"]}
        assert described == {"insects": True, "things": False}
        redirect = client.get("/explorer")
        assert (redirect.status_code, redirect.headers["location"]) == (308, "/explorer/")
        page = client.get("/explorer/")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert "worker-src blob:" in page.headers["content-security-policy"]
        manifest = client.get("/explorer/data/manifest.js").text
        assert '"name": "insects"' in manifest
        assert '"name": "things"' not in manifest
        assert client.get("/explorer/weights/insects.js").text.startswith("VITRAL_RECEIVE(")
        for missing in ("/explorer/nothing.js", "/explorer/../app.py", "/explorer/%2e%2e/app.py"):
            assert client.get(missing).status_code == 404
        assert client.get("/").headers["content-security-policy"] == CONTENT_SECURITY_POLICY


def test_server_without_explorer_has_no_such_page(tmp_path):
    with serving(False, insects=tiny_model(tmp_path / "insects")) as client:
        assert client.get("/explorer/").status_code == 404
        assert client.get("/v1/models").json()["models"][0]["explorer"] is False


@pytest.mark.slow
def test_page_links_to_the_explorer_which_runs_under_the_policy(browser, tmp_path):
    problems = []
    with server(tiny_model(tmp_path / "insects")) as running:
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.goto(running.url)
        page.wait_for_selector("body[data-ready]")
        page.click("#explorer")
        page.wait_for_url("**/explorer/**")
        page.wait_for_selector("body[data-ready]")
        page.close()
    assert problems == []
