"""Serve an exported model on a Ray cluster: `serve run config.yaml` in this folder.

Each replica runs the file in ONNX Runtime. Requests that reach a replica together are decoded in parallel and run as
one batch; Ray starts and stops replicas with the load.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

from vitral.data.decode import ImageDecodeError
from vitral.inference.onnx_runtime import OnnxModel
from vitral.inference.prediction import rank_labels

MAX_BODY_BYTES = 32 * 2**20


@serve.deployment
class Classifier:
    def __init__(self, path: str, threads: int) -> None:
        import numpy as np

        self.model, self.np = OnnxModel(path, threads), np

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.005)
    async def predict(self, images: list[Any]) -> list[Any]:
        """Probabilities and OOD decision of each image."""
        logits, probabilities = await asyncio.to_thread(self.model.logits, self.np.stack(images))
        return list(zip(probabilities.tolist(), self.model.is_ood(logits).tolist(), strict=True))

    async def __call__(self, request: Request) -> JSONResponse:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                return JSONResponse({"error": "the body exceeds 32 MiB"}, 413)
        try:
            pixels = await asyncio.to_thread(self.model.decode, bytes(body))
        except ImageDecodeError as error:
            return JSONResponse({"error": error.what}, 422)
        probabilities, is_ood = await self.predict(pixels)
        labels = rank_labels(self.model.classes, probabilities, 5)
        return JSONResponse({"labels": [vars(label) for label in labels], "ood": is_ood})


def app(arguments: dict[str, str]) -> Any:
    return Classifier.bind(arguments["model"], int(arguments.get("threads", "2")))
