"""A served model: its name and version, its queues, and the path from uploads to predictions."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral import bundled
from vitral.data.variable_images import stack_images
from vitral.errors import VitralError
from vitral.inference.prediction import (
    label_to_dict,
    prediction_set,
    prediction_set_to_dict,
    rank_labels,
    target_value_to_dict,
    target_values,
)
from vitral.inference.predictor import Predictor
from vitral.runs.model_io import published_name
from vitral.serve.admission import LowPriorityTurns
from vitral.serve.batcher import Batcher, Ticket
from vitral.serve.explain_payload import SERVED_METHODS, ExplainRequest, explain_image
from vitral.serve.limits import Budget, Limits, RequestError
from vitral.serve.metrics import ServerMetrics
from vitral.serve.request_parsing import ImageError, Upload, decode_upload
from vitral.utils.json_toml import dump_json
from vitral.utils.serialization import to_dict

JsonObject = dict[str, Any]
Scores = tuple[list[float], bool]  # probabilities, or values of a regression; whether the image is OOD


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


@dataclass(frozen=True, kw_only=True)
class ModelThreads:
    """The threads that all models share. Explain requests run one at a time, after predict requests of any model."""

    decode: ThreadPoolExecutor
    predict: ThreadPoolExecutor
    explain: ThreadPoolExecutor
    decoders: int
    workers: int  # predict batches at a time
    explain_turns: LowPriorityTurns = field(default_factory=LowPriorityTurns)


@contextmanager
def start_model_threads(*, decoders: int, workers: int, on_cpu: bool = True) -> Iterator[ModelThreads]:
    with ExitStack() as stack:

        def start(name: str, count: int) -> ThreadPoolExecutor:
            return stack.enter_context(ThreadPoolExecutor(count, thread_name_prefix=name))

        predict = start("predict", workers)
        yield ModelThreads(
            decode=start("decode", decoders),
            predict=predict,
            # On a GPU, no other thread may start kernels while a CUDA graph is captured.
            explain=start("explain", 1) if on_cpu else predict,
            decoders=decoders,
            workers=workers,
        )


class ServedModel:
    """One model with a queue for predict requests and a queue for explain requests."""

    def __init__(
        self, name: str, predictor: Predictor, limits: Limits, threads: ModelThreads, metrics: ServerMetrics
    ) -> None:
        self.name, self.predictor, self.limits, self.threads, self.metrics = name, predictor, limits, threads, metrics
        self.version = model_version(predictor)
        self.in_explorer = False  # whether /explorer/ shows the model
        self.decode_slots = asyncio.Semaphore(threads.decoders)  # of this model: the others' images need not wait long
        self.predict_queue: Batcher[Tensor, Scores] = Batcher(
            self._score_batch,
            threads.predict,
            max_batch=limits.max_batch,
            wait_s=limits.batch_wait_ms / 1000,
            max_queue=limits.max_queue,
            queue_timeout_s=limits.queue_timeout_s,
            workers=threads.workers,
            batch_key=lambda pixels: pixels.shape,  # native inputs differ in size
            on_batch=lambda size, seconds: metrics.observe_batch(name, size, seconds),
        )
        self.explain_queue: Batcher[tuple[Upload, ExplainRequest], JsonObject] = Batcher(
            self._explain_batch,
            threads.explain,
            max_batch=1,
            wait_s=0,
            max_queue=limits.max_explain_queue,
            queue_timeout_s=limits.explain_queue_timeout_s,
            turn=threads.explain_turns.turn,
        )
        threads.explain_turns.queues.append(self.predict_queue.admission)
        self.predict_slots, self.explain_slots = (
            Budget(limits.max_requests, "too many requests in progress") for _ in range(2)
        )

    def warm_up(self) -> None:
        """Run the smallest and the largest batch once, because the first calls are slower than the others."""
        preprocessing = self.predictor.model_config.preprocessing
        blank = torch.zeros(preprocessing.shape, dtype=preprocessing.torch_dtype)
        for size in (1, self.limits.max_batch):
            self._score_batch([blank] * size)

    def _score_batch(self, images: list[Tensor]) -> list[Scores]:
        logits = self.predictor.logits(stack_images(images))
        if self.predictor.is_regression:
            return [(values, False) for values in self.predictor.to_units(logits).tolist()]
        return list(self.predictor.calibrated_rows(logits))

    async def predict(self, ticket: Ticket[Tensor, Scores], uploads: list[Upload], top: int) -> list[JsonObject]:
        """One prediction or error per image, in order."""
        predictions = [self._predict_one(ticket, upload, top) for upload in uploads]
        return [await predictions[0]] if len(predictions) == 1 else await asyncio.gather(*predictions)

    async def _predict_one(self, ticket: Ticket[Tensor, Scores], upload: Upload, top: int) -> JsonObject:
        loop = asyncio.get_running_loop()
        try:
            async with self.decode_slots:
                ticket.pause_timeout()
                pixels = await loop.run_in_executor(self.threads.decode, self._decode, upload)
        except ImageError as error:
            ticket.withdraw()
            return {"file": upload.name, "error": {"code": error.code, "message": error.message}}
        probabilities, ood = await ticket.submit(pixels)
        self.metrics.images.labels(self.name).inc()
        result = {"file": upload.name} | self._prediction(probabilities, top)
        return result if self.predictor.is_regression else result | {"ood": ood}

    async def explain(self, ticket: Ticket[Any, JsonObject], upload: Upload, request: ExplainRequest) -> JsonObject:
        """Explain one image."""
        try:
            payload = await ticket.submit((upload, request))
        except ImageError as error:
            raise RequestError(422, error.code, f"{upload.name}: {error.message}") from error
        self.metrics.images.labels(self.name).inc()
        return {"file": upload.name} | self._prediction(payload.pop("probabilities"), request.top) | payload

    def _explain_batch(self, batch: list[tuple[Upload, ExplainRequest]]) -> list[JsonObject]:
        """Decodes in the same thread, so that large images of explain requests do not occupy the decoders."""
        return [explain_image(self.predictor, self._decode(upload), request) for upload, request in batch]

    def _decode(self, upload: Upload) -> Tensor:
        return decode_upload(upload, self.predictor.model_config.preprocessing, self.limits)

    def _prediction(self, probabilities: list[float], top: int) -> JsonObject:
        """The most probable labels and, if the model has prediction sets, the set of the image.

        For a regression, its values.
        """
        if self.predictor.is_regression:
            intervals = self.predictor.model_config.calibration.prediction_intervals
            values = target_values(self.predictor.classes, probabilities, intervals)
            return {"values": [target_value_to_dict(value) for value in values]}
        classes, sets = self.predictor.classes, self.predictor.model_config.calibration.prediction_sets
        labels = rank_labels(classes, probabilities, top, self.predictor.model_config.thresholds)
        result: JsonObject = {"labels": [label_to_dict(label) for label in labels]}
        if (label_set := prediction_set(sets, classes, probabilities)) is not None:
            result["prediction_set"] = prediction_set_to_dict(label_set)
        return result

    def description(self) -> JsonObject:
        """The fields of `schema.ModelInfo`."""
        config = self.predictor.model_config
        architecture = config.architecture
        sets = config.calibration.prediction_sets or config.calibration.prediction_intervals
        return {
            "name": self.name,
            "version": self.version,
            "engine": self.predictor.engine.info(),
            "task": config.task,
            "classes": list(config.classes),
            "image_size": list(config.preprocessing.image_size),
            "resize": config.preprocessing.resize,
            "channels": config.preprocessing.channels,
            "dtype": config.preprocessing.dtype,
            "channel_names": list(config.preprocessing.channel_names),
            "patch_size": architecture.patch_size,
            "grid": list(architecture.grid),
            "depth": architecture.depth,
            "heads": architecture.heads,
            "parameters": sum(parameter.numel() for parameter in self.predictor.model.parameters()),
            "trained_on": published_name(config.trained_on),
            "mean": list(config.preprocessing.mean),
            "calibrated": config.calibration.temperature != 1,
            "detects_ood": config.calibration.ood_threshold is not None,
            "coverage": None if sets is None else sets.coverage,
            "explain_methods": list(SERVED_METHODS),
            "explorer": self.in_explorer,
            "max_images": self.limits.max_images,
            "max_body_mib": self.limits.max_body_mib,
        }
