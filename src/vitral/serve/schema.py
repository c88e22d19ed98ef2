"""JSON bodies of the HTTP API. FastAPI derives the OpenAPI description from these classes and their field descriptions.

Requests carry images in one of three forms: `multipart/form-data` with one file part per image, the bytes of one image
with an `image/*` or `application/octet-stream` content type, or JSON with base64 strings: `{"images": ["..."]}`.
Every response with a status of 400 or above has the body of `ErrorBody`.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from vitral.serve.limits import ErrorCode


class StrictModel(BaseModel):
    """Base class that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid")


class ErrorInfo(StrictModel):
    """One error: a stable code for programs and a message for people."""

    code: ErrorCode = Field(description="machine-readable error code")
    message: str = Field(description="description of the problem in one sentence")
    hint: str | None = Field(None, description="what to do about it")


class ErrorBody(StrictModel):
    """Body of every error response."""

    error: ErrorInfo


class LabelScore(StrictModel):
    """One class and its probability."""

    name: str = Field(description="class name")
    probability: float = Field(ge=0, le=1, description="calibrated if the model is calibrated")
    threshold: float | None = Field(
        None, ge=0, le=1, description="probability from which the label is predicted; only of a multi-label model"
    )
    present: bool | None = Field(None, description="the label is predicted; only of a multi-label model")


class LabelSet(StrictModel):
    """Classes that contain the true one for a share `coverage` of all images like the training set."""

    labels: list[str] = Field(min_length=1, description="class names, most probable first")
    coverage: float = Field(gt=0, lt=1, description="the coverage that the sets of the model were fitted for")


class ValueInterval(StrictModel):
    """Value of one target of a regression, in its units, with its prediction interval."""

    name: str = Field(description="name of the target")
    value: float
    low: float | None = Field(None, description="lower end of the prediction interval")
    high: float | None = Field(None, description="upper end of the prediction interval")
    coverage: float | None = Field(None, description="share of images whose true value is in the interval")


VALUES_DESCRIPTION = "one per target; only of a regression, which has no labels"
LABELS_DESCRIPTION = "most probable class first; of a multi-label model, all labels above their thresholds first"
SET_DESCRIPTION = "prediction set, which may have more classes than `labels`; only if the model has prediction sets"


class ImagePrediction(StrictModel):
    """Prediction for one image, or the error that prevented it."""

    file: str = Field(description="name of the uploaded file, or its position in the request")
    labels: list[LabelScore] | None = Field(None, description=LABELS_DESCRIPTION)
    ood: bool | None = Field(None, description="the image is unlike the training set (out of distribution)")
    prediction_set: LabelSet | None = Field(None, description=SET_DESCRIPTION)
    values: list[ValueInterval] | None = Field(None, description=VALUES_DESCRIPTION)
    error: ErrorInfo | None = Field(None, description="reason why this image could not be classified")


class PredictResponse(StrictModel):
    """Response of `POST /v1/models/{name}/predict`."""

    model: str = Field(description="model name")
    version: str = Field(description="model version")
    engine: str = Field(description="inference engine that computed the predictions")
    predictions: list[ImagePrediction] = Field(description="one per image, in the order sent")


class UnreadableImages(ErrorBody):
    """Response of `predict` if no image could be read: the first error, and the error of each image."""

    predictions: list[ImagePrediction] | None = None


class ModelInputImage(StrictModel):
    """The image after resizing and cropping, as the model receives it."""

    width: int
    height: int
    png: str = Field(description="PNG file, base64")


class EncodedHeatmap(StrictModel):
    """Importance of each pixel."""

    width: int
    height: int
    values: str = Field(description="width × height bytes, row by row, 255 for the largest value; base64")


class EncodedAttention(StrictModel):
    """Attention weights, with indices [layer][head][row][column].

    Rows are the attending tokens: the class token, if there is one, then the patches. Columns are the patches attended
    to. Each row is divided by its largest weight, which is in `row_max`. The weights that a row gives to tokens other
    than patches sum to `non_patch`.
    """

    layers: list[int] = Field(description="layer numbers, counted from 1")
    heads: int
    heads_averaged: bool = Field(description="heads were averaged because the complete attention is too large to send")
    has_class_token: bool = Field(description="the first row is the class token")
    rows: int
    columns: int
    values: str = Field(description="uint8, 255 for the largest weight of the row; base64")
    row_max: str = Field(description="uint16 little-endian per row, 65535 for 1.0; base64")
    non_patch: str = Field(description="uint16 little-endian per row, 65535 for 1.0; base64")


class ExplainResponse(StrictModel):
    """Response of `POST /v1/models/{name}/explain`."""

    model: str = Field(description="model name")
    version: str = Field(description="model version")
    file: str = Field(description="name of the uploaded file")
    labels: list[LabelScore] | None = Field(None, description=LABELS_DESCRIPTION)
    ood: bool | None = Field(None, description="the image is unlike the training set (out of distribution)")
    prediction_set: LabelSet | None = Field(None, description=SET_DESCRIPTION)
    values: list[ValueInterval] | None = Field(None, description=VALUES_DESCRIPTION)
    target: str = Field(description="the class, or the target of a regression, that was explained")
    image: ModelInputImage
    grid: list[int] = Field(description="number of patch rows, number of patch columns")
    heatmaps: dict[str, EncodedHeatmap] = Field(description="one per requested method")
    attention: EncodedAttention | None = Field(None, description="only if requested")


class EngineInfo(StrictModel):
    """The inference engine of a model."""

    name: str = Field(description="engine, e.g. fp32, bf16 or int8")
    precision: str = Field(description="precision of the matrix multiplications")
    device: str = Field(description="cpu or cuda")
    threads: int | None = Field(None, description="CPU threads per batch")
    backend: str | None = Field(None, description="library that computes it, e.g. pytorch or openvino")


class ModelInfo(StrictModel):
    """Description of one model."""

    name: str
    version: str = Field(description="hash of the weights and the model configuration")
    engine: EngineInfo
    task: str = Field(description="classification, multilabel or regression")
    classes: list[str] = Field(description="names of the classes, or of the targets of a regression")
    image_size: list[int] = Field(description="height, width; of native models those of a square image")
    resize: str = Field(description="how images become model input: crop, pad, stretch or native (any patch grid)")
    channels: int
    dtype: str = Field(description="type of the pixels: uint8, uint16 or float32")
    channel_names: list[str] = Field(description="in order; empty if unknown")
    patch_size: int
    grid: list[int] = Field(description="number of patch rows, number of patch columns, for image_size")
    depth: int = Field(description="number of encoder blocks")
    heads: int = Field(description="attention heads per block")
    parameters: int
    trained_on: str = Field(description="name of the training set")
    mean: list[float] = Field(description="per-channel mean of the training images, in [0, 1]")
    calibrated: bool = Field(description="probabilities are calibrated by temperature scaling")
    detects_ood: bool = Field(description="the model has a threshold for out-of-distribution images")
    coverage: float | None = Field(None, description="coverage of the prediction sets or intervals; null: none")
    explain_methods: list[str] = Field(description="methods accepted by /explain")
    explorer: bool = Field(description="/explorer/ runs the model in the browser")
    max_images: int = Field(description="images per request")
    max_body_mib: int = Field(description="size of a request body in MiB")


class ModelList(StrictModel):
    """Response of `GET /v1/models`."""

    models: list[ModelInfo]


class Status(StrictModel):
    """Response of the health checks."""

    status: str


_BINARY = {"type": "string", "format": "binary"}
IMAGE_REQUEST_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {"file": {"type": "array", "items": _BINARY, "minItems": 1}},
                "required": ["file"],
            }
        },
        "application/octet-stream": {"schema": _BINARY},
        "image/*": {"schema": _BINARY},
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {
                    "images": {"type": "array", "items": {"type": "string", "format": "byte"}, "minItems": 1}
                },
                "required": ["images"],
                "additionalProperties": False,
            }
        },
    },
}
