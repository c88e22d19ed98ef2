"""The server's addresses: answers as the Predictor gives them, every mistake a sentence, every bound kept."""

from __future__ import annotations

import base64
import io
import json
import logging
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

from support.served import picture, tiny_model
from vitral.cli import main as cli
from vitral.errors import VitralError
from vitral.explain import METHODS, scaled
from vitral.inference.predictor import Predictor
from vitral.serve.app import make_app
from vitral.serve.limits import Limits
from vitral.serve.middleware import State, digests
from vitral.serve.models import Served, model_threads, name_all
from vitral.serve.server import Lines, share_cores, usable_cores

PREDICT, EXPLAIN = "/v1/models/insects/predict", "/v1/models/insects/explain"


@pytest.fixture(scope="module")
def predictor(tmp_path_factory) -> Predictor:
    return Predictor.load(tiny_model(tmp_path_factory.mktemp("insects"), unknown_below=6.0), device="cpu")


@contextmanager
def serving(predictor, keys=(), ready=True, **limits):
    state = State(limits=replace(Limits(), **limits), keys=digests(keys))
    with ThreadPoolExecutor(2) as decoders, model_threads(2) as threads:
        served = Served("insects", predictor, state.limits, decoders, threads, state.meters, workers=2)
        with TestClient(make_app([served], state), raise_server_exceptions=True) as client:
            while ready and client.get("/readyz").status_code != 200:
                pass
            client.state, client.served = state, served
            yield client


@pytest.fixture(scope="module")
def client(predictor):
    with serving(predictor) as client:
        yield client


def files(*pictures: bytes):
    return [("file", (f"{index}.png", content, "image/png")) for index, content in enumerate(pictures)]


def said(predictor: Predictor, content: bytes, top: int = 5):
    answer = predictor.predict(content, top=top)
    return [{"name": label.name, "probability": pytest.approx(label.probability, abs=1e-5)} for label in answer.labels]


def test_an_answer_is_the_predictors_however_the_image_is_sent(client, predictor):
    content = picture(1)
    text = base64.b64encode(content).decode()
    for reply in (
        client.post(PREDICT, files=files(content)),
        client.post(PREDICT, content=content, headers={"content-type": "image/png"}),
        client.post(PREDICT, content=content, headers={"content-type": "application/octet-stream"}),
        client.post(PREDICT, content=content),
        client.post(PREDICT, json={"images": [text]}),
    ):
        assert reply.status_code == 200, reply.text
        (answer,) = reply.json()["answers"]
        assert answer["labels"] == said(predictor, content)
        assert sum(label["probability"] for label in answer["labels"]) == pytest.approx(1)


def test_many_images_are_answered_in_order_and_a_broken_one_stops_nothing(client, predictor):
    contents = [picture(seed) for seed in range(9)]
    contents[4] = b"not an image at all"
    reply = client.post(f"{PREDICT}?top=2", files=files(*contents)).json()
    assert (reply["model"], reply["version"]) == ("insects", client.served.version)
    for index, (content, answer) in enumerate(zip(contents, reply["answers"], strict=True)):
        assert answer["name"] == f"{index}.png"
        if index == 4:
            assert answer == {"name": "4.png", "error": "not an image"}
        else:
            assert answer["labels"] == said(predictor, content, top=2)


def test_unknown_is_the_calibrations(client, predictor):
    contents = [picture(seed) for seed in range(24)]
    answers = client.post(PREDICT, files=files(*contents)).json()["answers"]
    unknown = [predictor.predict(content).unknown for content in contents]
    assert [answer["unknown"] for answer in answers] == unknown
    assert {True, False} == set(unknown)


def test_the_version_changes_with_the_weights_and_with_the_card(predictor, tmp_path):
    from vitral.runs.run import load_model, save_model
    from vitral.serve.models import version_of

    again = Predictor.load(tiny_model(tmp_path / "same", unknown_below=6.0), device="cpu")
    assert version_of(again) == version_of(predictor)
    model, card = load_model(tmp_path / "same")
    save_model(tmp_path / "other", model, replace(card, classes=("a", "b", "c", "d")))
    assert version_of(Predictor.load(tmp_path / "other")) != version_of(predictor)
    with torch.no_grad():
        next(model.parameters())[0] += 1
    save_model(tmp_path / "third", model, card)
    assert version_of(Predictor.load(tmp_path / "third")) != version_of(predictor)


def test_models_are_described(client):
    (model,) = client.get("/v1/models").json()["models"]
    assert model == client.get("/v1/models/insects").json()
    assert model["classes"] == ["ant", "bee", "<b>wasp</b>", "나비"]
    assert (model["image_size"], model["patch_size"], model["depth"], model["heads"]) == ([32, 32], 8, 3, 2)
    assert model["knows_unknown"] is True


def bomb(side: int) -> bytes:
    """A PNG that says it has side² pixels, in a few bytes."""
    header = side.to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    data = zlib.compress(b"\0" * 1000)

    def chunk(kind: bytes, content: bytes) -> bytes:
        checked = kind + content
        return len(content).to_bytes(4, "big") + checked + zlib.crc32(checked).to_bytes(4, "big")

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


MULTIPART = "multipart/form-data; boundary=x"


@pytest.mark.parametrize(
    ("kind", "body", "status", "what"),
    [
        ("image/png", b"", 400, "the body is empty"),
        ("image/png", b"garbage", 422, "image: not an image"),
        ("image/png", bomb(60_000), 422, "more than the 50 megapixels read here"),
        ("image/png", bomb(8_000), 422, "8000×8000 pixels, more than the 50 megapixels read here"),
        ("image/png", bomb(9_600), 422, "more than the 50 megapixels read here"),
        ("image/png", picture()[:80], 422, "broken or truncated"),
        ("text/plain", b"hello", 415, "the type 'text/plain' is not read here"),
        ("application/x-www-form-urlencoded", b"url=http://example.org/x.png", 415, "is not read here"),
        ("application/json", b"{", 400, "the body is not JSON"),
        ("application/json", b"[" * 100_000, 400, "the body is not JSON"),
        ("application/json", b"[]", 400, "the JSON is not an object"),
        ("application/json", b"{}", 400, "'images' must be a list of base64 texts"),
        ("application/json", b'{"images": []}', 400, "there is no image in the body"),
        ("application/json", b'{"images": ["%%%"]}', 400, "image 1 is not base64"),
        ("application/json", b'{"images": [1]}', 400, "'images' must be a list"),
        ("application/json", b'{"images": [], "path": "/etc/passwd"}', 400, "a key that is not known: 'path'"),
        ("application/json", b'{"images": ["aGVsbG8="]}', 422, "image 1: not an image"),
        ("multipart/form-data", b"x", 400, "without a boundary"),
        (MULTIPART, b"garbage", 400, "the multipart body cannot be read"),
        (MULTIPART, b"--x\r\n", 400, "the multipart body ends too early"),
        (MULTIPART, b"--x--\r\n", 400, "there is no image in the body"),
        (
            MULTIPART,
            b'--x\r\nContent-Disposition: form-data; name="top"\r\n\r\n3\r\n--x--\r\n',
            400,
            "the field 'top' is no file",
        ),
        (
            MULTIPART,
            b'--x\r\nContent-Disposition: form-data; name="f"; filename="a.png"\r\n\r\nhalf',
            400,
            "the multipart body ends too early",
        ),
        ("multipart/form-data; boundary=" + "x" * 5000, b"garbage", 400, "the multipart body cannot be read"),
    ],
)
def test_what_cannot_be_read_is_told_in_a_sentence(client, kind, body, status, what):
    for address in (PREDICT, EXPLAIN):
        reply = client.post(address, content=body, headers={"content-type": kind})
        assert reply.status_code == status, reply.text
        assert what in reply.json()["error"]


@pytest.mark.parametrize(
    ("method", "address", "status", "what"),
    [
        ("POST", "/v1/models/insect/predict", 404, "no model named 'insect'. Did you mean insects?"),
        ("GET", "/v1/models/..%2F..%2Fetc", 404, "not found"),
        ("GET", "/nowhere", 404, "not found"),
        ("GET", "/page/..%2fapp.py", 404, "not found"),
        ("GET", "/page/app.py", 404, "there is no such file"),
        ("GET", PREDICT, 405, "method not allowed"),
        ("POST", f"{PREDICT}?top=0", 422, "top: "),
        ("POST", f"{PREDICT}?top=many", 422, "top: "),
        ("POST", f"{EXPLAIN}?target=moth", 422, "no class named 'moth'"),
        ("POST", f"{EXPLAIN}?methods=rollot", 422, "no method named 'rollot'. Did you mean rollout?"),
    ],
)
def test_wrong_addresses_are_told_in_a_sentence(client, method, address, status, what):
    reply = client.request(method, address, content=picture() if method == "POST" else None)
    assert reply.status_code == status
    assert what in reply.json()["error"]


def test_the_body_is_bounded_by_what_comes_not_by_what_is_declared(predictor):
    with serving(predictor, body_mib=1, held_mib=1) as client:

        def endless():
            for _ in range(30):
                yield b"\0" * 2**16

        for content in (b"\0" * (2**20 + 1), endless()):
            reply = client.post(PREDICT, content=content)
            assert (reply.status_code, reply.headers["connection"]) == (413, "close")
            assert "longer than 1 MiB" in reply.json()["error"]
        assert client.state.held.taken == 0
        assert client.post(PREDICT, content=picture()).status_code == 200


def test_bodies_together_are_bounded(predictor):
    with serving(predictor, body_mib=1, held_mib=1) as client:
        client.state.held.take(2**20 - 100)
        reply = client.post(PREDICT, content=picture())
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        client.state.held.give(2**20 - 100)
        assert client.post(PREDICT, content=picture()).status_code == 200


def test_images_a_request_are_bounded(predictor):
    text = base64.b64encode(picture()).decode()
    with serving(predictor, images=3) as client:
        assert client.post(PREDICT, files=files(*[picture()] * 3)).status_code == 200
        for reply in (
            client.post(PREDICT, files=files(*[picture()] * 4)),
            client.post(PREDICT, json={"images": [text] * 4}),
        ):
            assert (reply.status_code, reply.json()["error"]) == (413, "more than 3 images in one request")


def test_requests_and_the_queue_are_bounded(predictor):
    with serving(predictor, queue=4) as client:
        reply = client.post(PREDICT, files=files(*[picture()] * 5))  # all of them find room, or none
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        assert client.served.batcher.places == 0
        client.state.under_way.take(client.state.limits.requests)
        assert client.post(PREDICT, content=picture()).status_code == 429
        assert client.get("/healthz").status_code == 200  # probes are always answered


def test_a_request_that_takes_too_long_is_given_up(predictor, monkeypatch):
    import time

    with serving(predictor, request_s=0.05) as client:
        answer = client.served.batcher.answer
        monkeypatch.setattr(client.served.batcher, "answer", lambda images: time.sleep(0.4) or answer(images))
        for address in (PREDICT, EXPLAIN):
            if address == EXPLAIN:
                monkeypatch.setattr("vitral.serve.models.look_inside", lambda *_: time.sleep(0.4))
            reply = client.post(address, content=picture())
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
            assert reply.json()["error"] == "no answer in 0.05 seconds"


def test_a_mistake_of_ours_is_a_500_without_details(predictor, monkeypatch, caplog):
    with serving(predictor) as client:
        monkeypatch.setattr(client.served.batcher, "answer", lambda images: 1 / 0)
        reply = client.post(PREDICT, content=picture())
    assert reply.status_code == 500
    assert "division" not in reply.text
    assert "the server made a mistake" in reply.json()["error"]


def test_keys_are_asked_for_where_there_are_any(predictor):
    with serving(predictor, keys=("first", "zweiter-schlüssel")) as client:
        for address in ("/", "/docs", "/openapi.json", "/healthz", "/readyz"):
            assert client.get(address).status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": ""}, {"authorization": "Basic first"}):
            for reply in (
                client.post(PREDICT, content=picture(), headers=headers),
                client.get("/v1/models", headers=headers),
                client.get("/metrics", headers=headers),
            ):
                assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
                assert reply.json()["error"] == "this server asks for an API key"
        for headers in ({"authorization": "Bearer first"}, {"x-api-key": "zweiter-schlüssel".encode()}):
            assert client.post(PREDICT, content=picture(), headers=headers).status_code == 200


def test_it_is_ready_after_warming_up_and_until_it_drains(predictor, monkeypatch):
    import threading

    gate = threading.Event()
    warm_up = Served.warm_up
    monkeypatch.setattr(Served, "warm_up", lambda self: gate.wait(10) and warm_up(self))
    with serving(predictor, ready=False) as client:
        assert client.get("/healthz").status_code == 200
        assert (client.get("/readyz").status_code, client.get("/readyz").json()) == (503, {"status": "warming up"})
        reply = client.post(PREDICT, content=picture())
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
        gate.set()
        while client.get("/readyz").status_code != 200:
            pass
        assert "connection" not in client.post(PREDICT, content=picture()).headers
        client.state.draining = True
        assert client.get("/readyz").json() == {"status": "draining"}
        reply = client.post(PREDICT, content=picture())
        assert (reply.status_code, reply.headers["connection"]) == (200, "close")


def test_every_answer_carries_the_security_headers(client):
    for address in ("/", "/docs", "/page/style.css", "/v1/models", "/nowhere", "/metrics"):
        headers = client.get(address).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert re.fullmatch(r"[0-9a-f]{16}", headers["x-request-id"])
        assert "server" not in headers
    assert client.get("/v1/models").headers["cache-control"] == "no-store"


def test_metrics_count(predictor):
    with serving(predictor) as client:
        client.post(PREDICT, files=files(picture(), picture(1), b"garbage"))
        client.post(PREDICT, content=b"garbage")
        text = client.get("/metrics").text
    route = 'route="/v1/models/{name}/predict"'
    assert f'vitral_requests_total{{{route},status="200"}} 1.0' in text
    assert f'vitral_requests_total{{{route},status="422"}} 1.0' in text
    assert 'vitral_images_total{model="insects"} 2.0' in text
    assert 'vitral_batch_images_sum{model="insects"} 2.0' in text
    assert "vitral_ready 1.0" in text
    assert "vitral_held_bytes 0.0" in text


def test_the_log_is_json_without_anything_of_the_images(client, caplog):
    content = picture(5)
    with caplog.at_level(logging.INFO, "vitral.serve"):
        client.post(PREDICT, files=[("file", ("my-secret.png", content, "image/png"))])
        client.get("/readyz")
    lines = [Lines("json").format(record) for record in caplog.records if record.name == "vitral.serve"]
    (line,) = lines  # probes are not logged
    entry = json.loads(line)
    assert entry.keys() == {"time", "level", "event", "id", "method", "route", "status", "ms", "images", "bytes"}
    assert (entry["route"], entry["status"], entry["images"]) == ("/v1/models/{name}/predict", 200, 1)
    assert "secret" not in line
    assert Lines("text").format(caplog.records[0]).startswith("POST 200")


def unpack(said: dict, name: str, kind: str, *shape: int) -> np.ndarray:
    return np.frombuffer(base64.b64decode(said[name]), dtype=kind).reshape(shape)


def test_attention_arrives_as_the_model_has_it(client, predictor):
    content = picture(7)
    reply = client.post(f"{EXPLAIN}?attention=true", content=content).json()
    pixels = predictor.card.preprocessing.pixels(Image.open(io.BytesIO(content)))
    trace = predictor.model.trace(predictor.card.preprocessing.normalise(pixels[None]))
    sent = reply["attention"]
    assert (sent["layers"], sent["heads"], sent["rows"], sent["columns"]) == ([1, 2, 3], 2, 17, 16)
    levels = unpack(sent, "levels", "u1", 3, 2, 17, 16) / 255
    peaks, elsewhere = (unpack(sent, name, "<u2", 3, 2, 17) / 65535 for name in ("peaks", "elsewhere"))
    for layer, attention in enumerate(trace.attention):
        true = attention[0].detach().numpy()
        np.testing.assert_allclose(levels[layer] * peaks[layer][..., None], true[..., 1:], atol=0.5 / 255 + 1e-4)
        np.testing.assert_allclose(elsewhere[layer], true[..., 0], atol=1e-4)
    assert reply["grid"] == [4, 4]
    seen = np.asarray(Image.open(io.BytesIO(base64.b64decode(reply["image"]["png"]))))
    np.testing.assert_array_equal(seen, pixels.permute(1, 2, 0).numpy())
    assert reply["labels"] == said(predictor, content)
    assert reply["target"] == reply["labels"][0]["name"]
    assert "attention" not in client.post(EXPLAIN, content=content).json()


@pytest.mark.parametrize("method", ["rollout", "relevance", "gradcam"])
def test_heatmaps_arrive_as_the_methods_make_them(client, predictor, method):
    content = picture(8)
    reply = client.post(f"{EXPLAIN}?methods={method}&target=bee", content=content).json()
    pixels = predictor.card.preprocessing.pixels(Image.open(io.BytesIO(content)))
    heat = METHODS[method](predictor.model, predictor.card.preprocessing.normalise(pixels[None])[0], 1)
    sent = reply["heatmaps"][method]
    levels = unpack(sent, "levels", "u1", sent["height"], sent["width"]) / 255
    np.testing.assert_allclose(levels, scaled(heat).numpy(), atol=0.51 / 255)
    assert reply["target"] == "bee"


def test_too_much_attention_is_averaged_then_shortened(client, monkeypatch):
    for most, heads, layers in ((3 * 17 * 16, 1, [1, 2, 3]), (2 * 17 * 16, 1, [2, 3]), (1, 1, [3])):
        monkeypatch.setattr("vitral.serve.explain_payload.MOST_ATTENTION", most)
        sent = client.post(f"{EXPLAIN}?attention=true", content=picture()).json()["attention"]
        assert (sent["heads"], sent["layers"], sent["averaged"]) == (heads, layers, True)
        assert unpack(sent, "levels", "u1", len(layers), heads, 17, 16).max() == 255


def test_explain_takes_one_image(client):
    reply = client.post(EXPLAIN, files=files(picture(), picture()))
    assert (reply.status_code, reply.json()["error"]) == (413, "one image at a time is explained")


def test_the_description_is_complete_and_nothing_is_fetched_from_elsewhere(client):
    described = client.get("/openapi.json").json()
    assert {"/v1/models", "/v1/models/{name}", "/v1/models/{name}/predict", "/v1/models/{name}/explain"} <= {
        *described["paths"]
    }
    body = described["paths"]["/v1/models/{name}/predict"]["post"]["requestBody"]
    assert {"multipart/form-data", "application/octet-stream", "image/*", "application/json"} == {*body["content"]}
    for address in ("/", "/docs"):
        page = client.get(address)
        assert page.headers["content-type"].startswith("text/html")
        for link in re.findall(r'(?:src|href)="([^"#]+)"', page.text):
            assert link.startswith("/"), link
            assert client.get(link).status_code == 200, link


def test_cores_are_shared_among_batches(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: threads.append(count))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads: list[int] = []
    assert [share_cores(cores, None) for cores in (1, 2, 4, 8, 16, 64)] == [1, 2, 2, 4, 4, 16]
    assert threads == [1, 1, 2, 2, 4, 4]
    assert [share_cores(16, told) for told in (1, 8, 32)] == [16, 2, 1]  # as asked for
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert share_cores(7, None) == 2


def test_a_containers_limit_on_cores_is_noticed(monkeypatch, tmp_path):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    for said, cores in (("250000 100000", 2), ("max 100000", 64), ("50000 100000", 1), ("", 64)):
        (tmp_path / "cpu.max").write_text(said)
        assert usable_cores(tmp_path / "cpu.max") == cores
    assert usable_cores(tmp_path / "nothing") == 64


def test_names_come_from_the_folders(tmp_path):
    (tmp_path / "runs" / "my run" / "model").mkdir(parents=True)
    (tmp_path / "weights.safetensors").touch()
    paths = [str(tmp_path / "runs" / "my run" / "model"), str(tmp_path / "weights.safetensors"), "hf:google/vit-base"]
    assert name_all(paths, ()) == ["my-run", "weights", "vit-base"]
    assert name_all(paths, ("a", "b", "c")) == ["a", "b", "c"]
    for wrong, what in (
        ((paths[:2], ("a",)), "2 models and 1 names"),
        ((paths[:2], ("a", "a")), "two models are called 'a'"),
        ((paths[:1], ("a/b",)), "cannot be called 'a/b'"),
    ):
        with pytest.raises(VitralError, match=what):
            name_all(*wrong)


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        ([], "which model?", "vitral serve runs/mine"),
        (["nowhere"], "there is no run or model folder nowhere", "vitral train mnist makes one"),
        (["a", "b", "--name", "x"], "2 models and 1 names", "--name"),
        (["a", "--port", "99999"], "there is no port 99999", "any free one"),
        (["a", "--host", "300.1.1.1"], "cannot listen on 300.1.1.1:8000", "--host"),
        (["a", "--keys", "nothing.txt"], "cannot read the keys in nothing.txt", ""),
        (["a", "--queue", "0"], "queue must be above 0, not 0", "--help lists"),
    ],
)
def test_mistakes_on_the_command_line_are_two_lines(capsys, monkeypatch, tmp_path, words, what, hint):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(["serve", *words, *(["--port", "0"] if words == ["nowhere"] else [])])
    lines = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2
    assert what in lines[0]
    assert hint in (lines[1] if len(lines) > 1 else "")
