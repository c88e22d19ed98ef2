"""Predictor: the single path from an image to a prediction.

image → decode → preprocess → engine → logits → calibration → Prediction
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitral import bundled, weights
from vitral.data.datasets import Split
from vitral.data.decode import SUPPORTED_FORMATS, ImageDecodeError
from vitral.data.files.walk import SkipFn, SkippedFile, find_images, ignore_skipped
from vitral.data.lazy_images import Images, LazyImages
from vitral.data.names import read_class_names
from vitral.data.variable_images import stack_images
from vitral.device.cpu import available_cpus
from vitral.device.select import CompileOption, DeviceOption, Hardware, select_hardware
from vitral.distributed.world import init_distributed
from vitral.errors import VitralError, shell_quote, truncate_list
from vitral.inference.engine import EngineName, reference_engine
from vitral.inference.engine_selection import select_engine
from vitral.inference.forward import check_images, gather_shards, require_images
from vitral.inference.inputs import ImageInput as ImageInput
from vitral.inference.inputs import is_single_image, iter_inputs
from vitral.inference.prediction import Label as Label
from vitral.inference.prediction import Prediction as Prediction
from vitral.inference.prediction import (
    Predictions,
    assemble_predictions,
    assemble_values,
    rank_labels,
    source_name,
)
from vitral.models.vit import ViT
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.runs.model_io import ModelConfig, load_model
from vitral.runs.run import find_model_dir, is_checkpoint
from vitral.utils.progress import ProgressFn, no_progress
from vitral.weights.checkpoint import NO_HEAD
from vitral.weights.interpretation import check_options

if TYPE_CHECKING:
    from vitral.evaluation.metrics import Metrics
    from vitral.explain.api import Explanation

DecodedImage = tuple[str, Tensor | str]  # source, and pixels (C, H, W) or an error message
CALLS_WITH_A_MODEL = {  # by the attribute that people try
    "bench": "vitral.bench(model)",
    "calibrate": "vitral.calibrate(model)",
    "classify": "model.predict(image)",
    "embed": "vitral.embed(model, files, out)",
    "export": "vitral.api.export(model)",
    "fit": "vitral.train(data, init_from=folder)",
    "predict_proba": "model.probabilities(batch)",
    "push": "vitral.push(model, 'hf:owner/name')",
    "report": "vitral.report(model)",
    "train": "vitral.train(data, init_from=folder)",
}
# Thresholds for `predict_inverted`, shared with the web page: mean pixel of a training set of bright strokes on a dark
# background, and border brightness of an image with dark strokes on a bright background.
DARK_MEAN, BRIGHT_BORDER = 0.45, 0.6


class Predictor:
    """A trained model with its preprocessing, class names, calibration and inference engine."""

    def __init__(self, model: ViT, model_config: ModelConfig, hardware: Hardware, path: Path | None = None) -> None:
        self.model, self.model_config = model.to(hardware.device).eval(), model_config
        self.model.accepts_any_grid = model_config.preprocessing.resize == "native"
        self.hardware, self.path = hardware, path
        self.notes: tuple[str, ...] = ()  # how the name or the format of the checkpoint was interpreted
        self.engine = reference_engine(self.model, model_config.preprocessing, hardware, "default")

    @classmethod
    def load(
        cls,
        path: Path | str,
        device: DeviceOption = "auto",
        labels: Path | None = None,
        options: CheckpointOptions = NO_OPTIONS,
        engine: EngineName = "auto",
        threads: int | None = None,
        compile: CompileOption = "no",
        throughput: bool = False,
        tome_r: int = 0,
    ) -> Predictor:
        """Load a run folder, a model folder, a checkpoint of a supported library, or a bundled model by its name.

        Args:
            labels: Text file with one class name per line, for a checkpoint without class names.
            options: What the files of a checkpoint of another library do not contain.
            engine: "auto" uses what `vitral bench` recommends on this CPU or GPU; without it, fp32 on a CPU and bf16
                on a GPU. "reference" is the plain fp32 module. `Predictor.engine` states which engine is in use, and
                why.
            threads: CPU threads of the process.
            compile: On a GPU, use torch.compile where there are no fused kernels; takes about a minute.
            throughput: For many images: on a GPU the fused kernels, which take a few seconds to start, on a CPU
                OpenVINO if it is installed, which takes up to a second.
            tome_r: Tokens that each block merges (ToMe): faster and less accurate. `model` is not affected.
        """
        source, notes = bundled.resolve(path), list(bundled.shadowing_notes(path))
        if is_checkpoint(source) or options.adapter:
            checkpoint = weights.read(source, options)
            notes = checkpoint.notes
            model, model_config, folder = checkpoint.build(), checkpoint.model_config, None
        else:
            model, model_config = load_model(source)
            check_options(path, options, model_config)
            folder = bundled.measurement_dir(find_model_dir(Path(source)))
        if labels is not None:
            classes = load_class_names(labels, model_config.architecture.num_classes)
            model_config = replace(model_config, classes=classes)
        hardware = select_hardware(device=device, precision="fp32", compile="no")
        init_distributed(hardware.world, hardware.device)
        predictor = cls(model, model_config, hardware, Path(options.adapter or source))
        predictor.notes = tuple(notes)
        predictor.engine = select_engine(
            predictor.model,
            model_config.preprocessing,
            hardware,
            engine,
            folder=folder,
            threads=threads,
            compile=compile,
            throughput=throughput,
            tome_r=tome_r,
        )
        return predictor

    def reference(self) -> Predictor:
        """A copy on the CPU with the reference engine, to compare other implementations with."""
        if self.engine.name == "reference" and self.hardware.device.type == "cpu":
            return self
        hardware = select_hardware(device="cpu", precision="fp32", compile="no")
        return Predictor(copy.deepcopy(self.model).cpu(), self.model_config, hardware, self.path)

    def __repr__(self) -> str:
        H, W = self.model_config.preprocessing.image_size
        path = f"{str(self.path)!r}, " if self.path is not None else ""
        trained_on, outputs = self.model_config.trained_on, f"{len(self.classes)} classes"
        if not self.has_head:
            outputs = "features only"
        elif self.is_regression:
            outputs = f"regression of {truncate_list(self.classes, 3)}"
        return f"Predictor({path}{outputs}, {H}×{W} pixels, trained on {trained_on!r})"

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, or of the targets of a regression."""
        return self.model_config.classes

    @property
    def is_regression(self) -> bool:
        """Whether the model predicts numbers instead of labels."""
        return self.model_config.task == "regression"

    @property
    def has_head(self) -> bool:
        """Whether the model predicts something. A pretrained model has features only."""
        return self.classes != (NO_HEAD,)

    def require_head(self) -> None:
        """Raise VitralError if the model has features only."""
        if not self.has_head:
            source = "MODEL" if self.path is None else shell_quote(self.path)
            raise VitralError(
                f"{'the model' if self.path is None else self.path} has no classification head",
                f"Train one: vitral train DATA --init-from {source}; measure its features: vitral probe DATA "
                f"--init-from {source}; or extract them: vitral embed {source} FILES... --out features.npy",
            )

    @overload
    def predict(self, images: bytes | Image.Image, top: int | None = None) -> Prediction: ...
    @overload
    def predict(
        self, images: str | Path | np.ndarray[Any, Any] | Tensor, top: int | None = None
    ) -> Any: ...  # depends on the value: a folder and a batch hold several images
    @overload
    def predict(self, images: Iterable[ImageInput], top: int | None = None) -> Predictions: ...
    def predict(self, images: Any, top: int | None = None) -> Prediction | Predictions:
        """Predict one image, which returns a Prediction, or several, which returns Predictions.

        One image that cannot be read raises ImageDecodeError. Among several it is a Prediction with `error` set.

        Args:
            images: One image: a path, the bytes of a file, a Pillow image, or an array or tensor (H, W), (H, W, C) or
                (C, H, W), with integers from 0 to 255 or floats from 0 to 1; for a model of 16-bit or float images,
                with such values. Several images: a folder, a batch (B, H, W, C) or (B, C, H, W), or a list or other
                iterable of images and folders.
            top: Number of labels per image, most probable first. Default: all. A multi-label model always returns the
                labels above their thresholds (`Prediction.present`).

        Examples:
            >>> model = vitral.load("mnist")
            >>> model.predict("photo.png").best.name
            >>> [prediction.best.name for prediction in model.predict("folder/")]
        """
        channels = self.model_config.preprocessing.channels
        if not is_single_image(images, channels):
            skipped: list[SkippedFile] = []
            inputs = iter_inputs(images, skipped.append, channels)
            return Predictions(self.predict_many(inputs, top=top), skipped)
        return next(self.predict_batch([self._decode(images)], top))

    def explain(
        self,
        image: ImageInput,
        methods: str | Sequence[str] = ("rollout", "relevance"),
        targets: str | int | Sequence[str | int] = (),
        **options: Any,
    ) -> Explanation:
        """Compute heatmaps of the image regions that the prediction depends on.

        Args:
            image: One image, as for `predict`.
            methods: Names from `vitral.explain.METHODS`.
            targets: Class names or indices. Default: the predicted class.
            options: Options such as `layer`, `head` or `fusion`, passed to the methods that have them.
        """
        from vitral.explain.api import explain

        if not is_single_image(image, self.model_config.preprocessing.channels):
            raise VitralError("explain takes one image, got several", "Use [model.explain(image) for image in images]")
        return explain(self, image, methods, targets, options)

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise VitralError(
            "a Predictor is not callable",
            "Use model.predict(image) for labels, or model.logits(batch) for the logits of image tensors",
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            call = CALLS_WITH_A_MODEL.get(name)
            hint = f"; use {call}" if call else ""
            raise AttributeError(f"'{type(self).__name__}' object has no attribute {name!r}{hint}", name=name, obj=self)

    def predict_many(
        self, images: Iterable[ImageInput], top: int | None = None, batch_size: int = 64
    ) -> Iterator[Prediction]:
        """Yield one prediction per image, in order. An unreadable image yields a Prediction with `error` set."""
        batch: list[DecodedImage] = []
        for image in images:
            batch.append(self.decode_image(image))
            if len(batch) == batch_size:
                yield from self.predict_batch(batch, top)
                batch = []
        yield from self.predict_batch(batch, top)

    def predict_files(self, paths: Sequence[Path | str], top: int | None = None) -> Predictions:
        """Predict image files, and all images in folders; `skipped` of the result names the other files there."""
        skipped: list[SkippedFile] = []
        files = find_images([Path(path) for path in paths], skipped.append)
        if not files:
            raise VitralError(f"no images in {', '.join(map(str, paths))}", SUPPORTED_FORMATS)
        return Predictions(self.predict_many(files, top=top), skipped)

    def embed_files(
        self, paths: Sequence[Path | str], on_skip: SkipFn = ignore_skipped
    ) -> tuple[list[str], Tensor, list[str]]:
        """File names and features (N, D) of the readable images, and error messages of the others.

        `on_skip` is called for each file in the given folders that is not an image.
        """
        names: list[str] = []
        features: list[Tensor] = []
        errors: list[str] = []
        for batch in self.decode_batches(iter(find_images([Path(path) for path in paths], on_skip))):
            images = [pixels for _, pixels in batch if isinstance(pixels, Tensor)]
            names += [name for name, pixels in batch if isinstance(pixels, Tensor)]
            features += [self.features(stack_images(images))] if images else []
            errors += [pixels for _, pixels in batch if isinstance(pixels, str)]
        if not names:
            what = errors[0] if len(errors) == 1 else f"no readable images in {', '.join(map(str, paths))}"
            raise VitralError(what, SUPPORTED_FORMATS)
        return names, torch.cat(features), errors

    def features(self, images_NCHW: Images, progress: ProgressFn = no_progress) -> Tensor:
        """Images (uint8 for photographs) of the model's input size to pooled features (N, D), the input of the head."""
        require_images(images_NCHW)
        return self.engine.features(images_NCHW, progress)

    @torch.inference_mode()
    def logits(self, images_NCHW: Images, progress: ProgressFn = no_progress) -> Tensor:
        """Images (uint8 for photographs) of the model's input size to logits (N, K), fp32, on the CPU. Thread-safe."""
        check_images(images_NCHW, self.model_config.preprocessing)
        return self.engine.logits(images_NCHW, progress)

    @torch.inference_mode()
    def logits_distributed(self, images_NCHW: Images, progress: ProgressFn = no_progress) -> Tensor:
        """Logits (N, K) computed by all ranks together. Every rank must call it and receives all logits."""
        world, device = self.hardware.world, self.hardware.device
        if world.size == 1:
            return self.logits(images_NCHW, progress)
        return gather_shards(images_NCHW, world, lambda shard: self.logits(shard, progress).to(device)).cpu()

    def probabilities(self, images_NCHW: Images) -> Tensor:
        """Images (uint8 for photographs) of the model's input size to calibrated probabilities (N, K)."""
        if self.is_regression:
            raise VitralError("a regression predicts values, not probabilities", "Use model.values(batch)")
        return self.model_config.calibration.probabilities(self.logits(images_NCHW))

    def values(self, images_NCHW: Images) -> Tensor:
        """Images of the model's input size to the values of a regression (N, T), in units of the targets."""
        return self.to_units(self.logits(images_NCHW))

    def to_units(self, outputs_NT: Tensor) -> Tensor:
        """Outputs of a regression model to values in units of the targets."""
        if (scaling := self.model_config.target_scaling) is None:
            raise VitralError("the model predicts classes, not values", "Use model.probabilities(batch)")
        return scaling.to_units(outputs_NT)

    def evaluate(self, split: Split) -> Metrics:
        """Loss, accuracy, per-class metrics and confusion matrix of a classifier on labelled images."""
        from vitral.evaluation.metrics import compute_metrics

        if not isinstance(split, Split):
            raise VitralError(
                f"expected labelled images such as vitral.data.load('mnist').test, got {split!r}",
                "To evaluate on a dataset or folder by name: vitral.evaluate(model, data=NAME)",
            )
        if self.model_config.task != "classification":
            raise VitralError(
                f"only models that predict one class per image have an accuracy; the task is {self.model_config.task}",
                "Use vitral.evaluate(model), which has metrics for every task",
            )
        images = split.to_model_input(self.model_config.preprocessing).images
        return compute_metrics(self.logits(images), split.labels, self.classes)

    def decode_image(self, image: ImageInput) -> DecodedImage:
        """Decode, resize and crop one image. Returns the message of an ImageDecodeError instead of the pixels."""
        try:
            return self._decode(image)
        except ImageDecodeError as error:
            return source_name(image), error.what

    def _decode(self, image: ImageInput) -> DecodedImage:
        return source_name(image), self.model_config.preprocessing.load(image)

    def decode_batches(self, images: Iterator[ImageInput]) -> Iterator[list[DecodedImage]]:
        """Yield decoded batches. Threads decode a bounded number of images ahead: Pillow releases the GIL."""
        batch_size = max(self.engine.batch_size, 8)
        pending: deque[Future[DecodedImage]] = deque()
        with ThreadPoolExecutor(max(2, available_cpus()), thread_name_prefix="decode") as pool:
            try:
                while True:
                    while len(pending) < 4 * batch_size and (image := next(images, None)) is not None:
                        pending.append(pool.submit(self.decode_image, image))
                    if not pending:
                        return
                    yield [pending.popleft().result() for _ in range(min(batch_size, len(pending)))]
            finally:
                for future in pending:
                    future.cancel()

    def predict_batch(self, batch: Sequence[DecodedImage], top: int | None) -> Iterator[Prediction]:
        """Predict decoded images."""
        self.require_head()
        readable = [pixels for _, pixels in batch if isinstance(pixels, Tensor)]
        if self.is_regression:
            values = self.values(stack_images(readable)).tolist() if readable else []
            intervals = self.model_config.calibration.prediction_intervals
            yield from assemble_values(batch, values, self.classes, self.engine.name, intervals)
            return
        if readable:
            images = stack_images(readable)
            rows, inverted = self.calibrated_rows(self.logits(images)), iter(self.predict_inverted(images))
        else:
            rows, inverted = iter(()), iter(())
        sets, thresholds = self.model_config.calibration.prediction_sets, self.model_config.thresholds
        for prediction in assemble_predictions(batch, rows, self.classes, top, self.engine.name, sets, thresholds):
            yield prediction if prediction.error is not None else replace(prediction, inverted=next(inverted))

    def predict_inverted(self, images_BCHW: Images) -> list[Label | None]:
        """Best label of the negative of each image whose brightness is inverted with respect to the training set.

        Applies to greyscale models trained on bright strokes on a dark background (MNIST) or the reverse. None for
        all other images, and where the negative is out-of-distribution too.
        """
        labels: list[Label | None] = [None] * len(images_BCHW)
        mean, dtype = self.model_config.preprocessing.mean, self.model_config.preprocessing.dtype
        is_classifier = self.model_config.task == "classification"
        if not is_classifier or dtype != "uint8" or len(mean) > 1 or 1 - DARK_MEAN >= mean[0] >= DARK_MEAN:
            return labels
        if isinstance(images_BCHW, LazyImages):
            return [label for image in images_BCHW.split(1) for label in self.predict_inverted(image)]
        border = border_brightness(images_BCHW)
        is_inverted = border > BRIGHT_BORDER if mean[0] < DARK_MEAN else border < 1 - BRIGHT_BORDER
        indices = is_inverted.nonzero().flatten()
        if len(indices):
            rows = self.calibrated_rows(self.logits(255 - images_BCHW[indices]))
            for index, (probabilities, is_ood) in zip(indices.tolist(), rows, strict=True):
                labels[index] = None if is_ood else rank_labels(self.classes, probabilities, 1)[0]
        return labels

    def calibrated_rows(self, logits_BK: Tensor) -> Iterator[tuple[list[float], bool]]:
        """Calibrated probabilities and OOD decision of each image."""
        calibration = self.model_config.calibration
        return zip(calibration.probabilities(logits_BK).tolist(), calibration.is_ood(logits_BK).tolist(), strict=True)


def load_class_names(path: Path, num_classes: int) -> tuple[str, ...]:
    names = read_class_names(path)
    if len(names) != num_classes:
        raise VitralError(
            f"{path} has {len(names)} names, but the model has {num_classes} classes",
            "Write one name per line, in the order of the classes",
        )
    return names


def border_brightness(images_BCHW: Tensor) -> Tensor:
    """Mean of the outermost pixels of each image, (B,), in [0, 1]."""
    interior = images_BCHW[:, :, 1:-1, 1:-1]
    total, interior_sum = (images.double().sum(dim=(1, 2, 3)) for images in (images_BCHW, interior))
    return (total - interior_sum) / (255 * (images_BCHW.shape[1:].numel() - interior.shape[1:].numel()))
