"""An exported model on a Ray cluster: `serve run config.yaml`, with this file beside it.

Every replica holds the file in ONNX Runtime. Requests that reach one together are decoded side by side and run as one
batch; Ray starts and stops replicas with the load.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse
from vitral.runtime import OnnxModel

from vitral.data.decode import ImageDecodeError

MOST_BYTES = 32 * 2**20


@serve.deployment
class Classifier:
    def __init__(self, path: str, threads: int) -> None:
        import numpy as np

        self.model, self.np = OnnxModel(path, threads), np

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.005)
    async def answers(self, images: list[Any]) -> list[Any]:
        logits, probabilities = await asyncio.to_thread(self.model.logits, self.np.stack(images))
        return list(zip(probabilities.tolist(), self.model.unknown(logits).tolist(), strict=True))

    async def __call__(self, request: Request) -> JSONResponse:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_BYTES:
                return JSONResponse({"error": "the body is longer than 32 MiB"}, 413)
        try:
            pixels = await asyncio.to_thread(self.model.pixels, bytes(body))
        except ImageDecodeError as error:
            return JSONResponse({"error": error.what}, 422)
        probabilities, unknown = await self.answers(pixels)
        ranked = sorted(zip(self.model.classes, probabilities, strict=True), key=lambda pair: -pair[1])[:5]
        labels = [{"name": name, "probability": probability} for name, probability in ranked]
        return JSONResponse({"labels": labels, "unknown": unknown})


def app(arguments: dict[str, str]) -> Any:
    return Classifier.bind(arguments["model"], int(arguments.get("threads", "2")))
