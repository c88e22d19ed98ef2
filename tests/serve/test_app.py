"""The HTTP routes: predictions equal the Predictor's, errors have a status, a code and a message, limits hold."""

from __future__ import annotations

import base64
import copy
import io
import json
import logging
import re
import threading
import time
import zlib
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from starlette.testclient import TestClient

from support.served import make_image, tiny_model, tiny_multilabel, tiny_regression
from vitral.cli import main as cli
from vitral.device.threads import thread_count
from vitral.errors import VitralError
from vitral.explain import METHODS, rescale_for_display
from vitral.inference.predictor import Predictor
from vitral.models.conformal import ConformalSets
from vitral.serve import schema
from vitral.serve.app import create_app
from vitral.serve.hosts import allowed_hosts
from vitral.serve.limits import Limits, RequestError
from vitral.serve.logs import LogFormatter
from vitral.serve.middleware import ServerState, hash_keys
from vitral.serve.models import ServedModel, model_names, start_model_threads
from vitral.serve.request_parsing import parse_uploads
from vitral.serve.server import concurrent_batches, divide_cpus

PREDICT, EXPLAIN = "/v1/models/insects/predict", "/v1/models/insects/explain"


@pytest.fixture(scope="module")
def predictor(tmp_path_factory) -> Predictor:
    sets = ConformalSets(coverage=0.9, threshold=0.2, images=99)
    folder = tiny_model(tmp_path_factory.mktemp("insects"), ood_threshold=6.0, prediction_sets=sets)
    return Predictor.load(folder, device="cpu")


class Client(TestClient):
    """A client with access to the state of the server."""

    state: ServerState
    model: ServedModel


@contextmanager
def serving(predictor, keys=None, wait_until_ready=True, **limits):
    state = ServerState(limits=replace(Limits(), **limits), key_digests=hash_keys(keys))
    with start_model_threads(decoders=2, workers=2) as threads:
        model = ServedModel("insects", predictor, state.limits, threads, state.metrics)
        with Client(create_app([model], state), base_url="http://localhost") as client:
            while wait_until_ready and client.get("/readyz").status_code != 200:
                pass
            client.state, client.model = state, model
            yield client


@pytest.fixture(scope="module")
def client(predictor):
    with serving(predictor) as client:
        yield client


def multipart(*images: bytes):
    return [("file", (f"{index}.png", content, "image/png")) for index, content in enumerate(images)]


def expected_labels(predictor: Predictor, content: bytes, top: int = 5):
    labels = predictor.predict(content, top=top).labels
    return [{"name": label.name, "probability": pytest.approx(label.probability, abs=1e-5)} for label in labels]


def model_input(predictor: Predictor, content: bytes) -> torch.Tensor:
    return predictor.model_config.preprocessing.resize_and_crop(Image.open(io.BytesIO(content)))


def with_logits(predictor: Predictor, logits) -> Predictor:
    """A predictor whose forward pass is replaced."""
    changed = copy.copy(predictor)
    changed.logits = logits  # type: ignore[method-assign]
    return changed


def test_predictions_equal_the_predictors_for_every_body_format(client, predictor):
    content = make_image(1)
    text = base64.b64encode(content).decode()
    for response in (
        client.post(PREDICT, files=multipart(content)),
        client.post(PREDICT, content=content, headers={"content-type": "image/png"}),
        client.post(PREDICT, content=content, headers={"content-type": "application/octet-stream"}),
        client.post(PREDICT, content=content),
        client.post(PREDICT, json={"images": [text]}),
    ):
        assert response.status_code == 200, response.text
        (prediction,) = response.json()["predictions"]
        assert prediction["labels"] == expected_labels(predictor, content)
        assert sum(label["probability"] for label in prediction["labels"]) == pytest.approx(1)


def test_unreadable_image_does_not_affect_the_others_and_order_is_kept(client, predictor):
    contents = [make_image(seed) for seed in range(9)]
    contents[4] = b"not an image at all"
    response = client.post(f"{PREDICT}?top=2", files=multipart(*contents)).json()
    assert (response["model"], response["version"]) == ("insects", client.model.version)
    assert response["engine"] == predictor.engine.name
    for index, (content, prediction) in enumerate(zip(contents, response["predictions"], strict=True)):
        assert prediction["file"] == f"{index}.png"
        if index == 4:
            assert prediction == {"file": "4.png", "error": {"code": "unreadable_image", "message": "not an image"}}
        else:
            assert prediction["labels"] == expected_labels(predictor, content, top=2)


def test_ood_flag_equals_the_predictors(client, predictor):
    contents = [make_image(seed) for seed in range(24)]
    predictions = client.post(PREDICT, files=multipart(*contents)).json()["predictions"]
    expected = [predictor.predict(content).is_ood for content in contents]
    assert [prediction["ood"] for prediction in predictions] == expected
    assert set(expected) == {True, False}


def test_prediction_sets_equal_the_predictors_whatever_the_number_of_labels(client, predictor):
    contents = [make_image(seed) for seed in range(24)]
    predictions = client.post(f"{PREDICT}?top=1", files=multipart(*contents)).json()["predictions"]
    expected = [predictor.predict(content).prediction_set for content in contents]
    assert [tuple(prediction["prediction_set"]["labels"]) for prediction in predictions] == [x.labels for x in expected]
    assert {prediction["prediction_set"]["coverage"] for prediction in predictions} == {0.9}
    assert {len(x.labels) for x in expected} >= {1, 2}
    explanation = client.post(EXPLAIN, files=multipart(contents[0])).json()
    assert explanation["prediction_set"] == predictions[0]["prediction_set"]
    assert client.get("/v1/models/insects").json()["coverage"] == 0.9
    for prediction in predictions:
        schema.ImagePrediction.model_validate(prediction)


def test_regression_sends_values_with_intervals(tmp_path):
    regression = Predictor.load(tiny_regression(tmp_path / "ages"), device="cpu")
    contents = [make_image(seed) for seed in range(3)]
    with serving(regression) as client:
        predictions = client.post(PREDICT, files=multipart(*contents, b"not an image")).json()["predictions"]
        explanation = client.post(
            f"{EXPLAIN}?target=mass&methods=relevance,rollout", files=multipart(contents[0])
        ).json()
        description = client.get("/v1/models/insects").json()
        unknown = client.post(f"{EXPLAIN}?target=bee", files=multipart(contents[0]))
    for content, prediction in zip(contents, predictions, strict=False):
        schema.ImagePrediction.model_validate(prediction)
        assert "labels" not in prediction
        assert "ood" not in prediction
        expected = regression.predict(content).values
        assert [value["name"] for value in prediction["values"]] == ["age", "mass"]
        for sent, value in zip(prediction["values"], expected, strict=True):
            assert sent["value"] == pytest.approx(value.value, rel=1e-4)
            assert sent["high"] - sent["value"] == pytest.approx({"age": 6.4, "mass": 250}[value.name])
            assert sent["coverage"] == 0.9
    assert predictions[3]["error"]["code"] == "unreadable_image"
    schema.ExplainResponse.model_validate(explanation)
    assert explanation["target"] == "mass"
    assert set(explanation["heatmaps"]) == {"relevance", "rollout"}
    assert explanation["values"][0]["value"] == pytest.approx(predictions[0]["values"][0]["value"], rel=1e-4)
    assert (description["task"], description["classes"], description["coverage"]) == (
        "regression",
        ["age", "mass"],
        0.9,
    )
    assert unknown.status_code == 422


def test_multilabel_model_sends_labels_with_thresholds(tmp_path):
    predictor = Predictor.load(tiny_multilabel(tmp_path / "things"), device="cpu")
    contents = [make_image(seed) for seed in range(4)]
    with serving(predictor) as client:
        predictions = client.post(f"{PREDICT}?top=1", files=multipart(*contents)).json()["predictions"]
        explanation = client.post(f"{EXPLAIN}?target=bee&methods=gradcam", files=multipart(contents[0])).json()
        description = client.get("/v1/models/insects").json()
    for content, prediction in zip(contents, predictions, strict=True):
        schema.ImagePrediction.model_validate(prediction)
        expected = predictor.predict(content, top=1)
        assert [label["name"] for label in prediction["labels"]] == [label.name for label in expected.labels]
        for sent, label in zip(prediction["labels"], expected.labels, strict=True):
            assert (sent["threshold"], sent["present"]) == (label.threshold, label.is_present)
            assert sent["probability"] == pytest.approx(label.probability, abs=1e-5)
        assert not prediction["ood"]
        assert "prediction_set" not in prediction
    schema.ExplainResponse.model_validate(explanation)
    assert explanation["target"] == "bee"
    assert description["task"] == "multilabel"


def test_model_without_prediction_sets_sends_none(tmp_path):
    plain = Predictor.load(tiny_model(tmp_path / "plain"), device="cpu")
    with serving(plain) as client:
        (prediction,) = client.post(PREDICT, files=multipart(make_image(1))).json()["predictions"]
        assert "prediction_set" not in prediction
        assert client.get("/v1/models/insects").json()["coverage"] is None


def test_version_changes_with_the_weights_and_the_configuration(predictor, tmp_path):
    from vitral.runs.model_io import load_model, save_model
    from vitral.serve.models import model_version

    sets = predictor.model_config.calibration.prediction_sets
    same = Predictor.load(tiny_model(tmp_path / "same", ood_threshold=6.0, prediction_sets=sets), device="cpu")
    assert model_version(same) == model_version(predictor)
    model, model_config = load_model(tmp_path / "same")
    save_model(tmp_path / "classes", model, replace(model_config, classes=("a", "b", "c", "d")))
    assert model_version(Predictor.load(tmp_path / "classes")) != model_version(predictor)
    with torch.no_grad():
        next(model.parameters())[0] += 1
    save_model(tmp_path / "weights", model, model_config)
    assert model_version(Predictor.load(tmp_path / "weights")) != model_version(predictor)


def test_model_description(client, predictor):
    response = client.get("/v1/models").json()
    assert schema.ModelList.model_validate(response).models[0].engine.backend == "pytorch"
    (model,) = response["models"]
    assert model == client.get("/v1/models/insects").json()
    assert model["classes"] == ["ant", "bee", "<b>wasp</b>", "나비"]
    assert (model["image_size"], model["patch_size"], model["depth"], model["heads"]) == ([32, 32], 8, 3, 2)
    assert model["detects_ood"] is True
    assert model["engine"] == predictor.engine.info()


def decompression_bomb(side: int) -> bytes:
    """A PNG of a few bytes whose header claims side² pixels."""
    header = side.to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    data = zlib.compress(b"\0" * 1000)

    def chunk(kind: bytes, content: bytes) -> bytes:
        checked = kind + content
        return len(content).to_bytes(4, "big") + checked + zlib.crc32(checked).to_bytes(4, "big")

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


MULTIPART = "multipart/form-data; boundary=x"


@pytest.mark.parametrize(
    ("content_type", "body", "status", "code", "message"),
    [
        ("image/png", b"", 400, "invalid_body", "the body is empty"),
        ("image/png", b"garbage", 422, "unreadable_image", "image: not an image"),
        ("image/png", decompression_bomb(60_000), 422, "image_too_large", "more than 50 megapixels"),
        ("image/png", decompression_bomb(8_000), 422, "image_too_large", "8000×8000 pixels, more than 50 megapixels"),
        ("image/png", decompression_bomb(9_600), 422, "image_too_large", "more than 50 megapixels"),
        ("image/png", make_image()[:80], 422, "unreadable_image", "truncated"),
        ("text/plain", b"hello", 415, "unsupported_media_type", "content type 'text/plain' is not supported"),
        (
            "application/x-www-form-urlencoded",
            b"url=http://x.org/x.png",
            415,
            "unsupported_media_type",
            "not supported",
        ),
        ("application/json", b"{", 400, "invalid_body", "not valid JSON"),
        ("application/json", b"[" * 100_000, 400, "invalid_body", "nested more than 100 levels deep"),
        ("application/json", b'{"a":' * 100_000, 400, "invalid_body", "nested more than 100 levels deep"),
        ("application/json", b"[" * 500 + b"]" * 500, 400, "invalid_body", "nested more than 100 levels deep"),
        ("application/json", b'{"images": ' + b"9" * 5000 + b"}", 400, "invalid_body", "more than 19 digits"),
        ("application/json", b'{"images": [-' + b"9" * 5000 + b"]}", 400, "invalid_body", "more than 19 digits"),
        ("application/json", b'{"images": 1e99999}', 400, "invalid_body", "'images' must be a list"),
        ("application/json", b'{"images": NaN}', 400, "invalid_body", "'images' must be a list"),
        ("application/json", b'{"images": ["\\ud800"]}', 400, "invalid_body", "image 1 is not valid base64"),
        ("application/json", b'{"\\ud800": 1}', 400, "invalid_body", "unknown key in the JSON body: '\\ud800'"),
        ("application/json", b'{"images": ["\xff"]}', 400, "invalid_body", "not valid JSON"),
        ("application/json", b"\xff\xfe\x00", 400, "invalid_body", "not valid JSON"),
        ("application/json", b"[]", 400, "invalid_body", "the JSON body is not an object"),
        ("application/json", b"{}", 400, "invalid_body", "'images' must be a list of base64 strings"),
        ("application/json", b'{"images": []}', 400, "invalid_body", "no image in the body"),
        ("application/json", b'{"images": ["%%%"]}', 400, "invalid_body", "image 1 is not valid base64"),
        ("application/json", b'{"images": [1]}', 400, "invalid_body", "'images' must be a list"),
        (
            "application/json",
            b'{"images": [], "path": "/etc/passwd"}',
            400,
            "invalid_body",
            "unknown key in the JSON body: 'path'",
        ),
        ("application/json", b'{"images": ["aGVsbG8="]}', 422, "unreadable_image", "image 1: not an image"),
        ("multipart/form-data", b"x", 400, "invalid_body", "without a boundary"),
        (MULTIPART, b"garbage", 400, "invalid_body", "malformed multipart body"),
        (MULTIPART, b"--x\r\n", 400, "invalid_body", "the multipart body is truncated"),
        (MULTIPART, b"--x--\r\n", 400, "invalid_body", "no image in the body"),
        (
            MULTIPART,
            b'--x\r\nContent-Disposition: form-data; name="top"\r\n\r\n3\r\n--x--\r\n',
            400,
            "invalid_body",
            "the form field 'top' is not a file",
        ),
        (
            MULTIPART,
            b'--x\r\nContent-Disposition: form-data; name="f"; filename="a.png"\r\n\r\nhalf',
            400,
            "invalid_body",
            "the multipart body is truncated",
        ),
        ("multipart/form-data; boundary=" + "x" * 5000, b"garbage", 400, "invalid_body", "malformed multipart body"),
    ],
)
def test_invalid_bodies_are_refused_with_code_and_message(client, caplog, content_type, body, status, code, message):
    for path in (PREDICT, EXPLAIN):
        response = client.post(path, content=body, headers={"content-type": content_type})
        assert response.status_code == status, response.text
        assert response.json()["error"]["code"] == code
        assert message in response.json()["error"]["message"]
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "message"),
    [
        ("POST", "/v1/models/insect/predict", 404, "not_found", "no model named 'insect'. Did you mean"),
        ("GET", "/v1/models/..%2F..%2Fetc", 404, "not_found", "not found"),
        ("GET", "/nowhere", 404, "not_found", "not found"),
        ("GET", "/page/..%2fapp.py", 404, "not_found", "not found"),
        ("GET", "/page/app.py", 404, "not_found", "no such file"),
        ("GET", PREDICT, 405, "method_not_allowed", "method not allowed"),
        ("POST", f"{PREDICT}?top=0", 422, "invalid_parameter", "top: "),
        ("POST", f"{PREDICT}?top=many", 422, "invalid_parameter", "top: "),
        ("POST", f"{PREDICT}?top={'9' * 5000}", 422, "invalid_parameter", "top: "),
        ("POST", f"{PREDICT}?top=%ff%00", 422, "invalid_parameter", "top: "),
        ("POST", f"{EXPLAIN}?attention={'9' * 5000}", 422, "invalid_parameter", "attention: "),
        ("POST", f"{EXPLAIN}?target={'[' * 5000}", 422, "invalid_parameter", "no class named '[[["),
        ("POST", f"{EXPLAIN}?target=%ff%ed%a0%80", 422, "invalid_parameter", "no class named"),
        ("POST", f"{EXPLAIN}?methods={'9' * 5000}", 422, "invalid_parameter", "no method named '999"),
        ("POST", f"/v1/models/{'9' * 5000}/predict", 404, "not_found", "no model named '999"),
        ("GET", "/v1/models/%ed%a0%80", 404, "not_found", "no model named"),
        ("POST", f"{EXPLAIN}?target=moth", 422, "invalid_parameter", "no class named 'moth'"),
        ("POST", f"{EXPLAIN}?methods=rollot", 422, "invalid_parameter", "no method named 'rollot'. Did you mean"),
    ],
)
def test_invalid_paths_and_parameters_are_refused_with_code_and_message(
    client, caplog, method, path, status, code, message
):
    response = client.request(method, path, content=make_image() if method == "POST" else None)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert message in response.json()["error"]["message"]
    assert len(response.json()["error"]["message"]) < 200
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=60),
        st.sampled_from(["multipart/form-data; ", "application/json; ", "image/png; ", ""]).flatmap(
            lambda start: st.text(st.characters(max_codepoint=255), max_size=40).map(
                lambda end: (start + end).encode("latin-1")
            )
        ),
    ),
    st.one_of(
        st.binary(max_size=80),
        st.recursive(st.none() | st.text(), st.lists).map(lambda value: json.dumps(value).encode()),
    ),
)
def test_any_content_type_and_body_give_a_client_error(content_type, body):
    error = None
    try:
        assert parse_uploads(content_type.decode("latin-1"), bytearray(body), Limits())
    except RequestError as request_error:
        error = request_error
    assert error is None or 400 <= error.status < 500
    assert error is None or json.dumps(error.to_dict(), ensure_ascii=False).encode()


def test_body_size_is_limited_for_declared_and_streamed_bodies(predictor):
    with serving(predictor, max_body_mib=1, max_total_body_mib=1) as client:

        def stream():
            for _ in range(30):
                yield b"\0" * 2**16

        for content in (b"\0" * (2**20 + 1), stream()):
            response = client.post(PREDICT, content=content)
            assert (response.status_code, response.headers["connection"]) == (413, "close")
            assert response.json()["error"]["code"] == "body_too_large"
        assert client.state.body_bytes.used == 0
        assert client.post(PREDICT, content=make_image()).status_code == 200


def test_total_size_of_all_bodies_is_limited(predictor):
    with serving(predictor, max_body_mib=1, max_total_body_mib=1) as client:
        client.state.body_bytes.acquire(2**20 - 100)
        response = client.post(PREDICT, content=make_image())
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        client.state.body_bytes.release(2**20 - 100)
        assert client.post(PREDICT, content=make_image()).status_code == 200


def test_images_per_request_are_limited(predictor):
    text = base64.b64encode(make_image()).decode()
    with serving(predictor, max_images=3) as client:
        assert client.post(PREDICT, files=multipart(*[make_image()] * 3)).status_code == 200
        for response in (
            client.post(PREDICT, files=multipart(*[make_image()] * 4)),
            client.post(PREDICT, json={"images": [text] * 4}),
        ):
            assert (response.status_code, response.json()["error"]["code"]) == (413, "too_many_images")


def test_queue_and_concurrent_requests_are_limited(predictor):
    with serving(predictor, max_queue=4) as client:
        response = client.post(PREDICT, files=multipart(*[make_image()] * 5))  # all images are queued, or none
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert client.model.predict_queue.pending == 0
        client.model.predict_slots.acquire(client.state.limits.max_requests)
        assert client.post(PREDICT, content=make_image()).status_code == 429
        for path in ("/healthz", "/readyz", "/metrics", "/v1/models"):  # exempt
            assert client.get(path).status_code == 200


def test_slow_forward_pass_times_out(predictor):
    def slow_logits(images):
        time.sleep(0.4)
        return predictor.logits(images)

    with serving(with_logits(predictor, slow_logits), request_timeout_s=0.05) as client:
        response = client.post(PREDICT, content=make_image())
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["code"] == "timeout"
        assert response.json()["error"]["message"] == "no result within 0.05 seconds"


def test_slow_explanation_times_out(predictor, monkeypatch):
    monkeypatch.setattr("vitral.serve.models.explain_image", lambda *_: time.sleep(0.4))
    with serving(predictor, request_timeout_s=0.05) as client:
        response = client.post(EXPLAIN, content=make_image())
        assert (response.status_code, response.json()["error"]["code"]) == (503, "timeout")


def test_internal_error_reveals_no_details(predictor):
    def failing_logits(images):
        if client_is_ready:
            raise ZeroDivisionError("division by zero")
        return predictor.logits(images)

    client_is_ready = False
    with serving(with_logits(predictor, failing_logits)) as client:
        client_is_ready = True
        response = client.post(PREDICT, content=make_image())
    assert response.status_code == 500
    assert "division" not in response.text
    assert response.json()["error"]["code"] == "internal_error"
    assert response.headers["x-request-id"] in response.json()["error"]["hint"]


def test_api_keys_protect_all_but_public_paths(predictor):
    with serving(predictor, keys=("first", "zweiter-schlüssel")) as client:
        for path in ("/", "/docs", "/openapi.json", "/healthz", "/readyz"):
            assert client.get(path).status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": ""}, {"authorization": "Basic first"}):
            for response in (
                client.post(PREDICT, content=make_image(), headers=headers),
                client.get("/v1/models", headers=headers),
                client.get("/metrics", headers=headers),
            ):
                assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
                assert response.json()["error"]["message"] == "this server requires an API key"
        for key in (("authorization", b"Bearer first"), ("x-api-key", "zweiter-schlüssel".encode())):
            assert client.post(PREDICT, content=make_image(), headers=dict([key])).status_code == 200


@pytest.mark.parametrize("key", ["first", "zweiter-schlüssel", "à la carte à", "열쇠"])
def test_keys_are_accepted_in_any_case_of_bearer_and_in_both_encodings(predictor, key):
    with serving(predictor, keys=("first", "zweiter-schlüssel", "à la carte à", "열쇠")) as client:
        encodings = ["utf-8"] if key == "열쇠" else ["utf-8", "latin-1"]
        for encoding in encodings:
            for scheme in (b"Bearer", b"bearer", b"BEARER"):
                headers = {b"authorization": scheme + b"  " + key.encode(encoding)}
                assert client.get("/v1/models", headers=headers).status_code == 200
            assert client.get("/v1/models", headers={b"x-api-key": key.encode(encoding)}).status_code == 200
        for value in (key.encode(), b"Basic " + key.encode(), b"Bearer" + key.encode(), b"Bearer " + key.encode()[:-1]):
            assert client.get("/v1/models", headers={b"authorization": value}).status_code == 401


@pytest.mark.parametrize("keys", [[], [""], [" "], ["a\nb"], ["\ud800"]])
def test_unusable_keys_are_an_error_instead_of_an_open_server(keys):
    with pytest.raises(VitralError, match="API key"):
        hash_keys(keys)


def test_head_equals_get_without_the_body(client):
    for path in ("/", "/docs", "/page/style.css", "/openapi.json", "/healthz", "/v1/models", "/v1/models/insects"):
        get, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (get.status_code, b""), path
        assert head.headers["content-length"] == str(len(get.content))
        assert head.headers["content-type"] == get.headers["content-type"]
    assert client.head("/metrics").status_code == 200
    assert client.head("/nowhere").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", PREDICT, "POST"),
        ("HEAD", EXPLAIN, "POST"),
        ("POST", "/healthz", "GET, HEAD"),
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("PUT", "/", "GET, HEAD"),
    ],
)
def test_method_not_allowed_names_the_allowed_methods(client, method, path, allowed):
    response = client.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)


def test_no_response_is_a_redirect(client):
    for path in ("/healthz/", "/v1/models/", "/docs/", "/page/"):
        response = client.get(path, follow_redirects=False)
        assert response.status_code == 404
        assert "location" not in response.headers


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:1", "[::1]", "[0:0::1]:8000"])
def test_local_hosts_are_allowed(client, host):
    assert client.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "attacker.example",
        "localhost.attacker.example",
        "127.0.0.1.attacker.example",
        "10.0.0.1",
        "",
        "localhost:x",
        "a b",
    ],
)
def test_foreign_hosts_are_refused_on_every_path(client, host):
    for path in ("/", "/healthz", "/v1/models", "/nowhere"):
        response = client.get(path, headers={"host": host})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_headers")
        assert "--allowed-hosts" in response.json()["error"]["hint"]


def test_allowed_hosts_follow_the_bind_address_and_the_flag():
    assert allowed_hosts("192.0.2.7").allows("192.0.2.7:8000")
    assert allowed_hosts("vitral.example").allows("vitral.example")
    assert not allowed_hosts("192.0.2.7").allows("192.0.2.8")
    assert allowed_hosts("0.0.0.0").allows("192.0.2.8")  # any address, but no foreign name
    assert allowed_hosts("::").allows("[2001:db8::1]:8000")
    assert not allowed_hosts("0.0.0.0").allows("attacker.example")
    named = allowed_hosts("127.0.0.1", ["Vitral.Example", "*.internal", "2001:db8::2"])
    assert all(map(named.allows, ("vitral.example:443", "a.b.internal", "[2001:db8::2]")))
    assert not any(map(named.allows, ("internal", "xinternal", "a.vitral.example")))
    assert allowed_hosts("127.0.0.1", ["*"]).allows("anything.example")
    for name in ("https://vitral.example", "vitral.example:443", "a b", "*.*", ""):
        with pytest.raises(VitralError, match="invalid host name"):
            allowed_hosts("127.0.0.1", [name])


def test_ready_between_warm_up_and_draining(predictor):
    gate = threading.Event()

    def gated_logits(images):
        assert gate.wait(60)
        return predictor.logits(images)

    with serving(with_logits(predictor, gated_logits), wait_until_ready=False) as client:
        assert client.get("/healthz").status_code == 200
        assert (client.get("/readyz").status_code, client.get("/readyz").json()) == (503, {"status": "warming_up"})
        response = client.post(PREDICT, content=make_image())
        assert (response.status_code, response.headers["retry-after"]) == (503, "2")
        gate.set()
        while client.get("/readyz").status_code != 200:
            pass
        assert "connection" not in client.post(PREDICT, content=make_image()).headers
        client.state.draining = True
        assert client.get("/readyz").json() == {"status": "draining"}
        response = client.post(PREDICT, content=make_image())
        assert (response.status_code, response.headers["connection"]) == (200, "close")


def test_every_response_has_the_security_headers(client):
    for path in ("/", "/docs", "/page/style.css", "/v1/models", "/nowhere", "/metrics"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert re.fullmatch(r"[0-9a-f]{16}", headers["x-request-id"])
        assert "server" not in headers
    assert client.get("/v1/models").headers["cache-control"] == "no-store"


def test_metrics_count_requests_images_and_batches(predictor):
    with serving(predictor) as client:
        client.post(PREDICT, files=multipart(make_image(), make_image(1), b"garbage"))
        client.post(PREDICT, content=b"garbage")
        text = client.get("/metrics").text
    route = 'route="/v1/models/{name}/predict"'
    assert f'vitral_requests_total{{{route},status="200"}} 1.0' in text
    assert f'vitral_requests_total{{{route},status="422"}} 1.0' in text
    assert 'vitral_images_total{model="insects"} 2.0' in text
    assert 'vitral_batch_size_sum{model="insects"} 2.0' in text
    assert "vitral_request_duration_seconds_bucket" in text
    assert "vitral_ready 1.0" in text
    assert "vitral_request_body_bytes 0.0" in text


def test_log_is_json_and_contains_nothing_of_the_images(client, caplog):
    content = make_image(5)
    with caplog.at_level(logging.INFO, "vitral.serve"):
        client.post(PREDICT, files=[("file", ("my-secret.png", content, "image/png"))])
        client.get("/readyz")
    lines = [LogFormatter("json").format(record) for record in caplog.records if record.name == "vitral.serve"]
    (line,) = lines  # health checks are not logged
    entry = json.loads(line)
    assert entry.keys() == {"time", "level", "event", "id", "method", "route", "status", "ms", "images", "bytes"}
    assert (entry["route"], entry["status"], entry["images"]) == ("/v1/models/{name}/predict", 200, 1)
    assert "secret" not in line
    assert LogFormatter("text").format(caplog.records[0]).startswith("POST 200")


def unpack(payload: dict, name: str, dtype: str, *shape: int) -> np.ndarray:
    return np.frombuffer(base64.b64decode(payload[name]), dtype=dtype).reshape(shape)


def test_attention_equals_the_models(client, predictor):
    content = make_image(7)
    response = client.post(f"{EXPLAIN}?attention=true", content=content).json()
    pixels = model_input(predictor, content)
    trace = predictor.model.trace(predictor.model_config.preprocessing.normalise(pixels[None]))
    packed = response["attention"]
    assert (packed["layers"], packed["heads"], packed["rows"], packed["columns"]) == ([1, 2, 3], 2, 17, 16)
    values = unpack(packed, "values", "u1", 3, 2, 17, 16) / 255
    row_max, non_patch = (unpack(packed, name, "<u2", 3, 2, 17) / 65535 for name in ("row_max", "non_patch"))
    for layer, attention in enumerate(trace.attention):
        expected = attention[0].detach().numpy()
        np.testing.assert_allclose(values[layer] * row_max[layer][..., None], expected[..., 1:], atol=0.5 / 255 + 1e-4)
        np.testing.assert_allclose(non_patch[layer], expected[..., 0], atol=1e-4)
    assert response["grid"] == [4, 4]
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(response["image"]["png"]))))
    np.testing.assert_array_equal(image, pixels.permute(1, 2, 0).numpy())
    assert response["labels"] == expected_labels(predictor, content)
    assert response["target"] == response["labels"][0]["name"]
    assert "attention" not in client.post(EXPLAIN, content=content).json()


@pytest.mark.parametrize("method", ["rollout", "relevance", "gradcam"])
def test_heatmaps_equal_the_explain_methods(client, predictor, method):
    content = make_image(8)
    response = client.post(f"{EXPLAIN}?methods={method}&target=bee", content=content).json()
    pixels = model_input(predictor, content)
    heat = METHODS[method](predictor.model, predictor.model_config.preprocessing.normalise(pixels[None])[0], 1)
    heatmap = response["heatmaps"][method]
    values = unpack(heatmap, "values", "u1", heatmap["height"], heatmap["width"]) / 255
    np.testing.assert_allclose(values, rescale_for_display(heat).numpy(), atol=0.51 / 255)
    assert response["target"] == "bee"


def test_large_attention_is_averaged_over_heads_and_then_reduced_to_the_last_layers(client, monkeypatch):
    for limit, heads, layers in ((3 * 17 * 16, 1, [1, 2, 3]), (2 * 17 * 16, 1, [2, 3]), (1, 1, [3])):
        monkeypatch.setattr("vitral.serve.explain_payload.MAX_ATTENTION_BYTES", limit)
        packed = client.post(f"{EXPLAIN}?attention=true", content=make_image()).json()["attention"]
        assert (packed["heads"], packed["layers"], packed["heads_averaged"]) == (heads, layers, True)
        assert unpack(packed, "values", "u1", len(layers), heads, 17, 16).max() == 255


def test_explain_refuses_several_images(client):
    response = client.post(EXPLAIN, files=multipart(make_image(), make_image()))
    assert (response.status_code, response.json()["error"]["code"]) == (413, "too_many_images")


def test_openapi_is_complete_and_pages_load_only_from_the_server(client):
    openapi = client.get("/openapi.json").json()
    paths = {"/v1/models", "/v1/models/{name}", "/v1/models/{name}/predict", "/v1/models/{name}/explain"}
    assert paths <= set(openapi["paths"])
    body = openapi["paths"]["/v1/models/{name}/predict"]["post"]["requestBody"]
    assert {"multipart/form-data", "application/octet-stream", "image/*", "application/json"} == {*body["content"]}
    for path in ("/", "/docs"):
        page = client.get(path)
        assert page.headers["content-type"].startswith("text/html")
        for link in re.findall(r'(?:src|href)="([^"#]+)"', page.text):
            assert link.startswith("/"), link
            assert client.get(link).status_code == 200, link


def test_cpus_are_divided_among_concurrent_batches(monkeypatch):
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [concurrent_batches(cpus, None) for cpus in (1, 2, 4, 8, 16, 64)] == [1, 2, 2, 4, 4, 16]
    assert threads == [1, 1, 2, 2, 4, 4]
    assert [concurrent_batches(16, requested) for requested in (1, 8, 32)] == [16, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert concurrent_batches(7, None) == 2


def test_engines_state_the_threads_of_a_batch(monkeypatch, tmp_path):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with thread_count(torch.get_num_threads()):
        predictor = Predictor.load(tiny_model(tmp_path), device="cpu", threads=5)
        assert predictor.engine.info()["threads"] == 5
        divide_cpus([predictor], None)
        assert predictor.engine.info()["threads"] == torch.get_num_threads() < 5


def test_model_names_are_derived_from_the_sources(tmp_path):
    (tmp_path / "runs" / "my run" / "model").mkdir(parents=True)
    (tmp_path / "weights.safetensors").touch()
    sources = [str(tmp_path / "runs" / "my run" / "model"), str(tmp_path / "weights.safetensors"), "hf:google/vit-base"]
    assert model_names(sources, ()) == ["my-run", "weights", "vit-base"]
    assert model_names(sources, ("a", "b", "c")) == ["a", "b", "c"]
    for arguments, message in (
        ((sources[:2], ("a",)), "2 models but 1 names"),
        ((sources[:2], ("a", "a")), "two models are named 'a'"),
        ((sources[:1], ("a/b",)), "invalid model name 'a/b'"),
    ):
        with pytest.raises(VitralError, match=message):
            model_names(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ([], "no model given", "vitral serve runs/mnist"),
        (["nowhere"], "nowhere", ""),
        (["mnist", "cifar10", "--name", "x"], "2 models but 1 names", "--name"),
        (["mnist", "--port", "99999"], "invalid port 99999", "any free port"),
        (["mnist", "--host", "300.1.1.1"], "cannot listen on 300.1.1.1:8000", "--host"),
        (["mnist", "--keys", "nothing.txt"], "nothing.txt", ""),
        (
            ["mnist", "--allowed-hosts", "http://x.example"],
            "invalid host name 'http://x.example'",
            "without scheme and port",
        ),
        (["mnist", "--max-queue", "0"], "--max-queue must be positive, got 0", "--help"),
    ],
)
def test_command_line_errors_are_two_lines(capsys, monkeypatch, tmp_path, arguments, message, hint):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["serve", *arguments, *(["--port", "0"] if arguments == ["nowhere"] else [])])
    lines = capsys.readouterr().err.strip().splitlines()
    assert exit_info.value.code == 2
    assert message in lines[0]
    assert hint in (lines[1] if len(lines) > 1 else "")
