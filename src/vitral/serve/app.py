"""The addresses: what each takes, and what it answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from vitral import __version__
from vitral.errors import VitralError, unknown
from vitral.serve import schema
from vitral.serve.explain_payload import METHODS, Wish
from vitral.serve.limits import Refused
from vitral.serve.middleware import Guard, State, refusal
from vitral.serve.models import Served
from vitral.serve.request_parsing import Upload, body_of, uploads

PAGE = Path(__file__).parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schema.Error, "description": said}
    for status, said in {
        400: "the body cannot be read",
        401: "an API key is missing",
        404: "no such model",
        408: "the body took too long",
        413: "too much in one request",
        415: "a type that is not read",
        429: "too busy: try again after Retry-After seconds",
        503: "not ready, or out of time: try again after Retry-After seconds",
    }.items()
}
SETTINGS: dict[int | str, dict[str, Any]] = {
    422: {"model": schema.AllUnreadable, "description": "no image could be read, or a setting is wrong"}
}

Top = Annotated[int, Query(ge=1, le=1000, description="labels an image")]


def as_json(content: Any, status: int = 200) -> Response:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return Response(text, status_code=status, media_type="application/json")


def make_app(models: Sequence[Served], state: State) -> Guard:
    """The whole server as an ASGI application, not yet ready: it warms up when it starts."""
    by_name = {served.name: served for served in models}

    async def warm_up() -> None:
        loop = asyncio.get_running_loop()
        for served in models:
            await loop.run_in_executor(served.threads, served.warm_up)
        state.ready = True

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        for served in models:
            served.batcher.start()
        warming = asyncio.create_task(warm_up())  # while /healthz already answers and /readyz does not yet
        yield
        warming.cancel()
        for served in models:
            await served.batcher.stop()

    app = FastAPI(
        title="vitral",
        version=__version__,
        description="Vision Transformers: ranked labels for images, and what the model looked at.",
        docs_url=None,  # FastAPI's page fetches its scripts from elsewhere
        redoc_url=None,
        lifespan=life,
    )

    def model(name: str) -> Served:
        if name not in by_name:
            said = unknown("model", name[:64], by_name)
            raise Refused(404, said.what, said.hint)
        return by_name[name]

    @asynccontextmanager
    async def images_in(request: Request) -> AsyncIterator[list[Upload]]:
        """The images of a request, which then has `request_s` left to be answered."""
        if not state.ready:
            raise Refused(503, "the server is warming up: try again in a moment", retry_after=2)
        limits = state.limits
        try:
            async with body_of(request, limits, state.held) as body, asyncio.timeout(limits.request_s):
                kind, size = request.headers.get("content-type", ""), len(body)
                if size < 2**18:
                    found = uploads(kind, body, limits)
                else:  # long enough to be noticed by those who wait
                    found = await asyncio.get_running_loop().run_in_executor(None, uploads, kind, body, limits)
                body.clear()
                request.scope["seen"] |= {"images": len(found), "bytes": size}
                yield found
        except TimeoutError as error:
            raise Refused(503, f"no answer in {limits.request_s:g} seconds", retry_after=2) from error

    path = "/v1/models/{name}"

    @app.get("/v1/models", response_model=schema.Models, responses={401: ERRORS[401], 429: ERRORS[429]})
    async def list_models() -> Response:
        """Every model here."""
        return as_json({"models": [served.described for served in models]})

    @app.get(path, response_model=schema.Model, responses={key: ERRORS[key] for key in (401, 404, 429)})
    async def describe_model(name: str) -> Response:
        """Classes, sizes and version of one model."""
        return as_json(model(name).described)

    @app.post(
        f"{path}/predict",
        response_model=schema.Answers,
        responses=ERRORS | SETTINGS,
        openapi_extra={"requestBody": schema.IMAGES},
    )
    async def predict(request: Request, name: str, top: Top = 5) -> Response:
        """Ranked labels for one image or many. One that cannot be read gets an error and stops nothing."""
        served = model(name)
        async with images_in(request) as found:
            answers = await served.predict(found, top)
        if all("error" in answer for answer in answers):
            first = answers[0]
            return as_json({"error": f"{first['name']}: {first['error']}", "answers": answers}, 422)
        return as_json({"model": served.name, "version": served.version, "answers": answers})

    @app.post(
        f"{path}/explain",
        response_model=schema.Explanation,
        responses=ERRORS | SETTINGS,
        openapi_extra={"requestBody": schema.IMAGES},
    )
    async def explain(
        request: Request,
        name: str,
        top: Top = 5,
        target: Annotated[str | None, Query(description="the class to explain; default: the most probable")] = None,
        methods: Annotated[str, Query(description=f"with commas between: {', '.join(METHODS)}")] = "rollout",
        attention: Annotated[bool, Query(description="send every layer's and head's attention too")] = False,
    ) -> Response:
        """One image, looked at from inside: heatmaps, and where each patch looked."""
        served = model(name)
        wish = Wish(target=_target(target, served), methods=_methods(methods), attention=attention, top=top)
        async with images_in(request) as found:
            if len(found) > 1:
                raise Refused(413, "one image at a time is explained", "send the others by themselves")
            answer = await served.explain(found[0], wish)
        return as_json({"model": served.name, "version": served.version} | answer)

    @app.get("/healthz", response_model=schema.Status)
    async def health() -> Response:
        """The process is alive."""
        return as_json({"status": "alive"})

    @app.get("/readyz", response_model=schema.Status, responses={503: {"model": schema.Status}})
    async def readiness() -> Response:
        """It should be sent requests: warmed up, and not on its way out."""
        status = "draining" if state.draining else "ready" if state.ready else "warming up"
        return as_json({"status": status}, 200 if status == "ready" else 503)

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}, 401: ERRORS[401]})
    async def metrics() -> Response:
        """Figures for Prometheus."""
        meters = state.meters
        for served in models:
            meters.waiting.labels(served.name).set(served.batcher.places)
        meters.under_way.set(state.under_way.taken)
        meters.held.set(state.held.taken)
        meters.ready.set(state.ready and not state.draining)
        return Response(meters.text(), media_type=CONTENT_TYPE_LATEST)

    _add_page(app)
    _add_errors(app)
    return Guard(app, state)


def _target(name: str | None, served: Served) -> int | None:
    if name is None:
        return None
    if name not in served.predictor.classes:
        said = unknown("class", name[:64], served.predictor.classes)
        raise Refused(422, said.what)
    return served.predictor.classes.index(name)


def _methods(said: str) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(word.strip() for word in said.split(",") if word.strip()))
    for method in chosen:
        if method not in METHODS:
            mistake = unknown("method", method[:64], METHODS)
            raise Refused(422, mistake.what, mistake.hint)
    return chosen


def _add_page(app: FastAPI) -> None:
    """The page's files, read once: nothing a client says becomes a path."""
    files = {file.name: file.read_bytes() for file in sorted(PAGE.iterdir()) if file.suffix in TYPES}

    def page(name: str) -> Response:
        if name not in files:
            raise Refused(404, "there is no such file")
        return Response(
            files[name], media_type=TYPES[Path(name).suffix], headers={"Cache-Control": "no-cache, max-age=0"}
        )

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return page("index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return page("docs.html")

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return page("icon.svg")

    @app.get("/page/{file}", include_in_schema=False)
    async def part(file: str) -> Response:
        return page(file)


def _add_errors(app: FastAPI) -> None:
    """Whatever goes wrong is JSON with a sentence."""

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return refusal(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return refusal(Refused(422, f"{first['loc'][-1]}: {first['msg']}"))

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        return as_json({"error": HTTPStatus(error.status_code).phrase.lower()}, error.status_code)

    @app.exception_handler(VitralError)
    async def known(request: Request, error: VitralError) -> Response:
        return refusal(Refused(422, error.what, error.hint))

    @app.exception_handler(Exception)
    async def mistake(request: Request, error: Exception) -> Response:
        said = "the server made a mistake; its log says more"
        return refusal(Refused(500, said, f"request {request.scope['request_id']}"))
