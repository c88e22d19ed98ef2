"""A model that is served: its name and version, its place in the queue, and what it says about images."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral import bundled as box
from vitral.data.decode import NotAnImage
from vitral.data.resize_crop import MODES
from vitral.errors import VitralError
from vitral.inference.predictor import Predictor
from vitral.serve.batcher import Batcher, Place
from vitral.serve.explain_payload import METHODS, Wish, look_inside
from vitral.serve.limits import Limits, Refused
from vitral.serve.metrics import Meters
from vitral.serve.request_parsing import Upload, pixels_of
from vitral.utils.serialization import to_plain

Plain = dict[str, Any]
Row = tuple[list[float], bool]  # probabilities, unknown


def version_of(predictor: Predictor) -> str:
    """Twelve letters that change when the weights or anything on the model's card does."""
    digest = hashlib.sha256(json.dumps(to_plain(predictor.card), sort_keys=True, default=str).encode())
    for name, tensor in sorted(predictor.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()[:12]


def name_of(path: str) -> str:
    """runs/flowers → flowers, runs/flowers/model → flowers, hf:google/vit → vit; letters that fit into an address."""
    place = Path(path.removeprefix("hf:").removeprefix(box.PREFIX))
    folder = place.resolve() if place.exists() else place
    name = folder.parent.name if folder.name == "model" else folder.stem if folder.is_file() else folder.name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


def name_all(paths: Sequence[str], names: Sequence[str]) -> list[str]:
    """One name a model, all different, as they stand in the addresses."""
    if names and len(names) != len(paths):
        raise VitralError(f"{len(paths)} models and {len(names)} names", "give each model a --name, or none")
    chosen = list(names) or [name_of(path) for path in paths]
    for name in chosen:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            raise VitralError(f"a model cannot be called {name!r}", "letters, digits, dots, dashes and underscores")
    if twice := [name for name in chosen if chosen.count(name) > 1]:
        raise VitralError(f"two models are called {twice[0]!r}", "tell them apart with --name ONE --name OTHER")
    return chosen


class Served:
    """One model behind its addresses. Decoding is spread over `decoders`; the model computes in `threads`."""

    def __init__(
        self,
        name: str,
        predictor: Predictor,
        limits: Limits,
        decoders: Executor,
        threads: Executor,
        meters: Meters,
        workers: int = 1,
    ) -> None:
        channels = predictor.card.preprocessing.channels
        if channels not in MODES:
            raise VitralError(
                f"{name} wants images with {channels} channels; a picture has 1, 3 or 4",
                "such a model answers in Python: Predictor.logits(images)",
            )
        self.name, self.predictor, self.limits = name, predictor, limits
        self.decoders, self.threads, self.meters = decoders, threads, meters
        self.version = version_of(predictor)
        self.batcher: Batcher[Tensor, Row] = Batcher(
            self._answer,
            threads,
            batch=limits.batch,
            wait_s=limits.wait_ms / 1000,
            queue=limits.queue,
            workers=workers,
            seen=lambda size, seconds: meters.batch(name, size, seconds),
        )

    def warm_up(self) -> None:
        """The first batches cost more than the others; nobody should wait for that."""
        preprocessing = self.predictor.card.preprocessing
        blank = torch.zeros(preprocessing.channels, *preprocessing.image_size, dtype=torch.uint8)
        for size in (1, self.limits.batch):
            self._answer([blank] * size)

    def _answer(self, images: list[Tensor]) -> list[Row]:
        """In a model thread: calibrated probabilities, and whether the image is unlike all it was trained on."""
        logits = self.predictor.logits(torch.stack(images))
        calibration = self.predictor.card.calibration
        rows = zip(calibration.probabilities(logits).tolist(), calibration.unknown(logits).tolist(), strict=True)
        return list(rows)

    async def predict(self, uploads: list[Upload], top: int) -> list[Plain]:
        """An answer for each image, in order, or what is wrong with it. All of them find room in the queue, or none."""
        with ExitStack() as stack:
            places = [stack.enter_context(self.batcher.place()) for _ in uploads]
            asked = [self._ask(place, upload, top) for place, upload in zip(places, uploads, strict=True)]
            return [await asked[0]] if len(asked) == 1 else await asyncio.gather(*asked)

    async def _ask(self, place: Place[Tensor, Row], upload: Upload, top: int) -> Plain:
        try:
            pixels = await self.pixels(upload)
        except NotAnImage as error:
            place.leave()
            return {"name": upload.name, "error": error.what}
        probabilities, unknown = await place.ask(pixels)
        self.meters.images.labels(self.name).inc()
        return {"name": upload.name, "labels": self.ranked(probabilities, top), "unknown": unknown}

    async def explain(self, upload: Upload, wish: Wish) -> Plain:
        """One image, looked at from inside. It waits in the queue like the others, and runs alone."""
        with self.batcher.place() as place:
            try:
                pixels = await self.pixels(upload)
            except NotAnImage as error:
                raise Refused(422, f"{upload.name}: {error.what}") from error
            finally:
                place.leave()
            loop = asyncio.get_running_loop()
            seen = await loop.run_in_executor(self.threads, look_inside, self.predictor, pixels, wish)
        self.meters.images.labels(self.name).inc()
        labels = self.ranked(seen.pop("probabilities"), wish.top)
        return {"name": upload.name, "labels": labels} | seen

    async def pixels(self, upload: Upload) -> Tensor:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self.decoders, pixels_of, upload, self.predictor.card.preprocessing, self.limits
        )

    def ranked(self, probabilities: list[float], top: int) -> list[Plain]:
        named = zip(self.predictor.classes, probabilities, strict=True)
        best = sorted(named, key=lambda item: -item[1])[:top]
        return [{"name": name, "probability": probability} for name, probability in best]

    @property
    def described(self) -> Plain:
        """What the page and programs need to know of it."""
        card = self.predictor.card
        architecture = card.architecture
        return {
            "name": self.name,
            "version": self.version,
            "classes": list(card.classes),
            "image_size": list(card.preprocessing.image_size),
            "channels": card.preprocessing.channels,
            "patch_size": architecture.patch_size,
            "grid": list(architecture.grid),
            "depth": architecture.depth,
            "heads": architecture.heads,
            "parameters": sum(parameter.numel() for parameter in self.predictor.model.parameters()),
            "trained_on": card.trained_on,
            "mean": list(card.preprocessing.mean),
            "calibrated": card.calibration.temperature != 1,
            "methods": list(METHODS),
            "knows_unknown": card.calibration.unknown_below is not None,
            "most_images": self.limits.images,
            "most_mib": self.limits.body_mib,
        }


def model_threads(workers: int) -> ThreadPoolExecutor:
    """Where all models compute."""
    return ThreadPoolExecutor(workers, thread_name_prefix="model")
