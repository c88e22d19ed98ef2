"""A served model: its name and version, its queue, and the path from uploads to predictions."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral import bundled
from vitral.data.resize_crop import PIL_MODES
from vitral.errors import VitralError
from vitral.inference.prediction import rank_labels
from vitral.inference.predictor import Predictor
from vitral.runs.model_io import published_name
from vitral.serve.batcher import Batcher, Ticket
from vitral.serve.explain_payload import SERVED_METHODS, ExplainRequest, explain_image
from vitral.serve.limits import Limits, RequestError
from vitral.serve.metrics import ServerMetrics
from vitral.serve.request_parsing import ImageError, Upload, decode_upload
from vitral.utils.json_toml import dump_json
from vitral.utils.serialization import to_dict

JsonObject = dict[str, Any]
Scores = tuple[list[float], bool]  # calibrated probabilities, and whether the image is out of distribution


def model_version(predictor: Predictor) -> str:
    """Twelve hexadecimal digits that change whenever the weights or the model configuration change."""
    digest = hashlib.sha256(dump_json(to_dict(predictor.model_config), sort_keys=True, default=str).encode())
    for name, tensor in sorted(predictor.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()[:12]


def default_name(source: str) -> str:
    """Derive a URL-safe name: runs/flowers → flowers, runs/flowers/model → flowers, hf:google/vit → vit."""
    path = Path(source.removeprefix("hf:").removeprefix(bundled.PREFIX))
    path = path.resolve() if path.exists() else path
    name = path.parent.name if path.name == "model" else path.stem if path.is_file() else path.name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


def model_names(sources: Sequence[str], names: Sequence[str]) -> list[str]:
    """One unique URL-safe name per model: the given names, or names derived from the sources."""
    if names and len(names) != len(sources):
        raise VitralError(f"{len(sources)} models but {len(names)} names", "Pass --name once per model, or not at all")
    result = list(names) or [default_name(source) for source in sources]
    for name in result:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            hint = "Use letters, digits, dots, dashes and underscores"
            raise VitralError(f"invalid model name {name!r}", hint)
    if duplicates := [name for name in result if result.count(name) > 1]:
        raise VitralError(f"two models are named {duplicates[0]!r}", "Name them with --name FIRST --name SECOND")
    return result


class ServedModel:
    """One model with its queue. Images are decoded in `decode_pool`; the model runs in `model_pool`."""

    def __init__(
        self,
        name: str,
        predictor: Predictor,
        limits: Limits,
        decode_pool: Executor,
        model_pool: Executor,
        metrics: ServerMetrics,
        workers: int = 1,
    ) -> None:
        channels = predictor.model_config.preprocessing.channels
        if channels not in PIL_MODES:
            raise VitralError(
                f"{name} expects images with {channels} channels; image files have 1, 3 or 4",
                "Use the model from Python: Predictor.logits(images)",
            )
        self.name, self.predictor, self.limits = name, predictor, limits
        self.decode_pool, self.model_pool, self.metrics = decode_pool, model_pool, metrics
        self.version = model_version(predictor)
        self.batcher: Batcher[Tensor, Scores] = Batcher(
            self._score_batch,
            model_pool,
            max_batch=limits.max_batch,
            wait_s=limits.batch_wait_ms / 1000,
            max_queue=limits.max_queue,
            workers=workers,
            on_batch=lambda size, seconds: metrics.observe_batch(name, size, seconds),
        )

    def warm_up(self) -> None:
        """Run the smallest and the largest batch once, because the first calls are slower than the others."""
        blank = torch.zeros(self.predictor.model_config.preprocessing.shape, dtype=torch.uint8)
        for size in (1, self.limits.max_batch):
            self._score_batch([blank] * size)

    def _score_batch(self, images: list[Tensor]) -> list[Scores]:
        return list(self.predictor.calibrated_rows(self.predictor.logits(torch.stack(images))))

    async def predict(self, uploads: list[Upload], top: int) -> list[JsonObject]:
        """One prediction or error per image, in order. Either all images enter the queue or none does."""
        with ExitStack() as stack:
            tickets = [stack.enter_context(self.batcher.ticket()) for _ in uploads]
            predictions = [self._predict_one(*pair, top) for pair in zip(tickets, uploads, strict=True)]
            return [await predictions[0]] if len(predictions) == 1 else await asyncio.gather(*predictions)

    async def _predict_one(self, ticket: Ticket[Tensor, Scores], upload: Upload, top: int) -> JsonObject:
        try:
            pixels = await self._decode(upload)
        except ImageError as error:
            ticket.withdraw()
            return {"file": upload.name, "error": {"code": error.code, "message": error.message}}
        probabilities, ood = await ticket.submit(pixels)
        self.metrics.images.labels(self.name).inc()
        return {"file": upload.name, "labels": self._top_labels(probabilities, top), "ood": ood}

    async def explain(self, upload: Upload, request: ExplainRequest) -> JsonObject:
        """Explain one image. It counts as one queued image, but it is not batched with others."""
        with self.batcher.ticket() as ticket:
            try:
                pixels = await self._decode(upload)
            except ImageError as error:
                raise RequestError(422, error.code, f"{upload.name}: {error.message}") from error
            finally:
                ticket.withdraw()
            loop = asyncio.get_running_loop()
            payload = await loop.run_in_executor(self.model_pool, explain_image, self.predictor, pixels, request)
        self.metrics.images.labels(self.name).inc()
        labels = self._top_labels(payload.pop("probabilities"), request.top)
        return {"file": upload.name, "labels": labels} | payload

    async def _decode(self, upload: Upload) -> Tensor:
        preprocessing = self.predictor.model_config.preprocessing
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.decode_pool, decode_upload, upload, preprocessing, self.limits)

    def _top_labels(self, probabilities: list[float], top: int) -> list[JsonObject]:
        return [vars(label) for label in rank_labels(self.predictor.classes, probabilities, top)]

    def description(self) -> JsonObject:
        """The fields of `schema.ModelInfo`."""
        config = self.predictor.model_config
        architecture = config.architecture
        return {
            "name": self.name,
            "version": self.version,
            "engine": self.predictor.engine.info(),
            "classes": list(config.classes),
            "image_size": list(config.preprocessing.image_size),
            "channels": config.preprocessing.channels,
            "patch_size": architecture.patch_size,
            "grid": list(architecture.grid),
            "depth": architecture.depth,
            "heads": architecture.heads,
            "parameters": sum(parameter.numel() for parameter in self.predictor.model.parameters()),
            "trained_on": published_name(config.trained_on),
            "mean": list(config.preprocessing.mean),
            "calibrated": config.calibration.temperature != 1,
            "detects_ood": config.calibration.ood_threshold is not None,
            "explain_methods": list(SERVED_METHODS),
            "max_images": self.limits.max_images,
            "max_body_mib": self.limits.max_body_mib,
        }


def make_model_pool(workers: int) -> ThreadPoolExecutor:
    """The threads in which all models run."""
    return ThreadPoolExecutor(workers, thread_name_prefix="model")
