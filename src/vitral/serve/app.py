"""The HTTP routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from vitral import __version__
from vitral.errors import VitralError, unknown_name_error
from vitral.serve import schema
from vitral.serve.batcher import Batcher, Item, Result, Ticket
from vitral.serve.explain_payload import SERVED_METHODS, ExplainRequest
from vitral.serve.explorer import EXPLORER_POLICY, ServedExplorer
from vitral.serve.limits import Budget, ErrorCode, RequestError
from vitral.serve.middleware import RequestMiddleware, ServerState, error_response
from vitral.serve.models import ServedModel
from vitral.serve.request_parsing import Upload, parse_uploads
from vitral.utils.json_toml import dump_json

PAGE_DIR = Path(__file__).parent / "page"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": schema.ErrorBody, "description": description}
    for status, description in {
        400: "invalid request body",
        401: "missing or wrong API key",
        404: "no such model",
        408: "the body arrived too slowly",
        413: "the body is too large or has too many images",
        415: "unsupported content type",
        429: "too many requests; retry after Retry-After seconds",
        503: "not ready or timed out; retry after Retry-After seconds",
    }.items()
}
UNPROCESSABLE_RESPONSE: dict[int | str, dict[str, Any]] = {
    422: {"model": schema.UnreadableImages, "description": "no image could be read, or a parameter is invalid"}
}
INLINE_PARSE_BYTES = 2**18  # larger bodies are parsed in a thread, so that they do not block the event loop

TopParameter = Annotated[int, Query(ge=1, le=1000, description="number of labels per image")]
TargetParameter = Annotated[str | None, Query(description="class to explain; default: the most probable class")]
MethodsParameter = Annotated[str, Query(description=f"comma-separated list of: {', '.join(SERVED_METHODS)}")]
AttentionParameter = Annotated[bool, Query(description="include the attention of all layers and heads")]


def json_response(content: Any, status: int = 200) -> Response:
    text = dump_json(content, ensure_ascii=False, separators=(",", ":"))
    return Response(text, status_code=status, media_type="application/json")


def create_app(models: Sequence[ServedModel], state: ServerState) -> RequestMiddleware:
    """The complete server as an ASGI application. It warms up when it starts and is ready afterwards."""
    app = FastAPI(
        title="vitral",
        version=__version__,
        description="Image classification with Vision Transformers: ranked labels, heatmaps and attention.",
        docs_url=None,  # FastAPI's own page loads scripts from a CDN
        redoc_url=None,
        redirect_slashes=False,  # the redirects would be built from the Host header
        lifespan=lambda app: _lifespan(models, state),
    )
    _add_model_routes(app, models, state)
    _add_status_routes(app, models, state)
    _add_page_routes(app)
    if state.offers_explorer:
        _add_explorer_routes(app, ServedExplorer(models))
    _add_error_handlers(app)
    return RequestMiddleware(app, state)


@asynccontextmanager
async def _lifespan(models: Sequence[ServedModel], state: ServerState) -> AsyncIterator[None]:
    async def warm_up() -> None:
        loop = asyncio.get_running_loop()
        for model in models:
            await loop.run_in_executor(model.threads.predict, model.warm_up)
        state.ready = True

    queues: list[Batcher[Any, Any]] = [
        queue for model in models for queue in (model.predict_queue, model.explain_queue)
    ]
    for queue in queues:
        queue.start()
    warm_up_task = asyncio.create_task(warm_up())  # meanwhile /healthz succeeds and /readyz fails
    yield
    warm_up_task.cancel()
    for queue in queues:
        await queue.stop()


@asynccontextmanager
async def _receive_uploads(
    request: Request, state: ServerState, queue: Batcher[Item, Result], slots: Budget
) -> AsyncIterator[tuple[Ticket[Item, Result], list[Upload]]]:
    """The images of a request, and a ticket for them in the queue of a model.

    The slot and the ticket are taken when the body is complete. From then on the context must be left within
    `request_timeout_s` seconds.
    """
    if not state.ready:
        raise RequestError(503, "not_ready", "the server is warming up; retry in a moment", retry_after=2)
    limits = state.limits
    try:
        async with AsyncExitStack() as stack:
            body = await stack.enter_async_context(state.bodies.receive(request))
            stack.enter_context(slots.hold(1))
            await stack.enter_async_context(asyncio.timeout(limits.request_timeout_s))
            ticket = await stack.enter_async_context(queue.ticket())
            content_type, size = request.headers.get("content-type", ""), len(body)
            if size < INLINE_PARSE_BYTES:
                uploads = parse_uploads(content_type, body, limits)
            else:
                loop = asyncio.get_running_loop()
                uploads = await loop.run_in_executor(None, parse_uploads, content_type, body, limits)
            body.clear()
            request.scope["log_fields"] |= {"images": len(uploads), "bytes": size}
            ticket.add(len(uploads) - 1)  # all images are queued, or none
            yield ticket, uploads
    except TimeoutError as error:
        message = f"no result within {limits.request_timeout_s:g} seconds"
        raise RequestError(503, "timeout", message, retry_after=queue.admission.retry_after()) from error


def _add_model_routes(app: FastAPI, models: Sequence[ServedModel], state: ServerState) -> None:
    models_by_name = {model.name: model for model in models}
    path = "/v1/models/{name}"
    for model in models:
        state.queues[f"/v1/models/{model.name}/predict"] = model.predict_queue.admission
        state.queues[f"/v1/models/{model.name}/explain"] = model.explain_queue.admission

    def find_model(name: str) -> ServedModel:
        if name not in models_by_name:
            error = unknown_name_error("model", name[:64], models_by_name)
            raise RequestError(404, "not_found", error.what, error.hint)
        return models_by_name[name]

    @app.get("/v1/models", response_model=schema.ModelList, responses=_error_responses(401))
    async def list_models() -> Response:
        """List all models."""
        return json_response({"models": [model.description() for model in models]})

    @app.get(path, response_model=schema.ModelInfo, responses=_error_responses(401, 404))
    async def describe_model(name: str) -> Response:
        """Describe one model: classes, sizes, version and engine."""
        return json_response(find_model(name).description())

    @app.post(
        f"{path}/predict",
        response_model=schema.PredictResponse,
        responses=ERROR_RESPONSES | UNPROCESSABLE_RESPONSE,
        openapi_extra={"requestBody": schema.IMAGE_REQUEST_BODY},
    )
    async def predict(request: Request, name: str, top: TopParameter = 5) -> Response:
        """Classify one or more images. An unreadable image gets an error; the other images are classified."""
        model = find_model(name)
        async with _receive_uploads(request, state, model.predict_queue, model.predict_slots) as (ticket, uploads):
            predictions = await model.predict(ticket, uploads, top)
        if all("error" in prediction for prediction in predictions):
            first = predictions[0]
            error = first["error"] | {"message": f"{first['file']}: {first['error']['message']}"}
            return json_response({"error": error, "predictions": predictions}, 422)
        header = {"model": model.name, "version": model.version, "engine": model.predictor.engine.name}
        return json_response(header | {"predictions": predictions})

    @app.post(
        f"{path}/explain",
        response_model=schema.ExplainResponse,
        responses=ERROR_RESPONSES | UNPROCESSABLE_RESPONSE,
        openapi_extra={"requestBody": schema.IMAGE_REQUEST_BODY},
    )
    async def explain(
        request: Request,
        name: str,
        top: TopParameter = 5,
        target: TargetParameter = None,
        methods: MethodsParameter = "rollout",
        attention: AttentionParameter = False,
    ) -> Response:
        """Classify one image and explain the prediction with heatmaps and, on request, the attention weights."""
        model = find_model(name)
        explain_request = ExplainRequest(
            target=_parse_target(target, model), methods=_parse_methods(methods), attention=attention, top=top
        )
        async with _receive_uploads(request, state, model.explain_queue, model.explain_slots) as (ticket, uploads):
            if len(uploads) > 1:
                hint = "Send one request per image"
                raise RequestError(413, "too_many_images", "explain takes one image per request", hint)
            explanation = await model.explain(ticket, uploads[0], explain_request)
        return json_response({"model": model.name, "version": model.version} | explanation)


def _error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: ERROR_RESPONSES[status] for status in statuses}


def _parse_target(class_name: str | None, model: ServedModel) -> int | None:
    if class_name is None:
        return None
    classes = model.predictor.classes
    if class_name not in classes:
        error = unknown_name_error("class", class_name[:64], classes)
        raise RequestError(422, "invalid_parameter", error.what)  # the hint would list all classes
    return classes.index(class_name)


def _parse_methods(text: str) -> tuple[str, ...]:
    methods = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for method in methods:
        if method not in SERVED_METHODS:
            error = unknown_name_error("method", method[:64], SERVED_METHODS)
            raise RequestError(422, "invalid_parameter", error.what, error.hint)
    return methods


def _add_status_routes(app: FastAPI, models: Sequence[ServedModel], state: ServerState) -> None:
    @app.get("/healthz", response_model=schema.Status)
    async def health() -> Response:
        """Liveness: succeeds while the process runs."""
        return json_response({"status": "ok"})

    @app.get("/readyz", response_model=schema.Status, responses={503: {"model": schema.Status}})
    async def readiness() -> Response:
        """Readiness: succeeds between warm-up and shutdown."""
        status = "draining" if state.draining else "ready" if state.ready else "warming_up"
        return json_response({"status": status}, 200 if status == "ready" else 503)

    plain_text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}

    @app.get("/metrics", response_class=Response, responses=plain_text | _error_responses(401))
    async def metrics() -> Response:
        """Prometheus metrics."""
        gauges = state.metrics
        for model in models:
            gauges.queued_images.labels(model.name).set(model.predict_queue.pending)
            gauges.queued_explanations.labels(model.name).set(model.explain_queue.pending)
        gauges.in_flight.set(sum(model.predict_slots.used + model.explain_slots.used for model in models))
        gauges.body_bytes.set(state.body_bytes.used)
        gauges.ready.set(state.ready and not state.draining)
        return Response(gauges.render(), media_type=CONTENT_TYPE_LATEST)


def _add_page_routes(app: FastAPI) -> None:
    """Serve the files of the page from memory, so that no request path ever becomes a file path."""
    files = {file.name: file.read_bytes() for file in sorted(PAGE_DIR.iterdir()) if file.suffix in MEDIA_TYPES}

    def serve_file(name: str) -> Response:
        if name not in files:
            raise RequestError(404, "not_found", "no such file")
        return Response(
            files[name], media_type=MEDIA_TYPES[Path(name).suffix], headers={"Cache-Control": "no-cache, max-age=0"}
        )

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return serve_file("index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return serve_file("docs.html")

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return serve_file("icon.svg")

    @app.get("/page/{file}", include_in_schema=False)
    async def page_file(file: str) -> Response:
        return serve_file(file)


def _add_explorer_routes(app: FastAPI, explorer: ServedExplorer) -> None:
    @app.get("/explorer", include_in_schema=False)
    async def explorer_redirect() -> Response:
        return Response(status_code=308, headers={"Location": "/explorer/"})

    @app.get("/explorer/{file:path}", include_in_schema=False)
    async def explorer_file(file: str) -> Response:
        name = file or "index.html"
        content = await explorer.file(name)
        if content is None:
            raise RequestError(404, "not_found", "no such file")
        headers = {"Cache-Control": "no-cache, max-age=0", "Content-Security-Policy": EXPLORER_POLICY}
        return Response(content, media_type=MEDIA_TYPES[Path(name).suffix], headers=headers)


def _add_error_handlers(app: FastAPI) -> None:
    """Turn every exception into the JSON body of `schema.ErrorBody`."""

    @app.exception_handler(RequestError)
    async def request_error(request: Request, error: RequestError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return error_response(RequestError(422, "invalid_parameter", f"{first['loc'][-1]}: {first['msg']}"))

    @app.exception_handler(HTTPException)
    async def http_exception(request: Request, error: HTTPException) -> Response:
        codes: dict[int, ErrorCode] = {404: "not_found", 405: "method_not_allowed"}
        phrase = HTTPStatus(error.status_code).phrase.lower()
        code = codes.get(error.status_code, "invalid_body")
        headers = dict(error.headers or {})
        if headers.get("Allow") == "GET":
            headers["Allow"] = "GET, HEAD"
        return error_response(RequestError(error.status_code, code, phrase, headers=headers))

    @app.exception_handler(VitralError)
    async def vitral_error(request: Request, error: VitralError) -> Response:
        return error_response(RequestError(422, "invalid_parameter", error.what, error.hint))

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        hint = f"Search for request id {request.scope['request_id']}"
        return error_response(RequestError(500, "internal_error", "internal server error; see the server log", hint))
