"""What goes over the wire, for the OpenAPI description."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Exact(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Error(BaseModel):
    error: str = Field(description="what is wrong, in a sentence")
    hint: str | None = Field(None, description="what to do about it")


class Label(Exact):
    name: str
    probability: float = Field(ge=0, le=1, description="calibrated, where the model is")


class Answer(Exact):
    name: str = Field(description="the file's name, or its place in the request")
    labels: list[Label] | None = Field(None, description="most probable first")
    unknown: bool | None = Field(None, description="it looks like nothing the model was trained on")
    error: str | None = Field(None, description="why this image got no answer")


class Answers(Exact):
    model: str
    version: str
    answers: list[Answer] = Field(description="one for each image, in the order sent")


class AllUnreadable(Error):
    answers: list[Answer] | None = None


class Picture(Exact):
    width: int
    height: int
    png: str = Field(description="base64: what the model saw, scaled and cropped")


class Heatmap(Exact):
    width: int
    height: int
    levels: str = Field(description="base64 of width × height bytes, row by row, 255 the most")


class Attention(Exact):
    """levels[layer][head][row][column]: how much a row's token looks at a patch, its largest scaled to 255."""

    layers: list[int] = Field(description="counted from 1")
    heads: int
    averaged: bool = Field(description="heads were averaged, because all of them would be too much to send")
    class_token: bool = Field(description="whether the first row is the class token's; the others are the patches'")
    rows: int
    columns: int
    levels: str = Field(description="base64 of bytes")
    peaks: str = Field(description="base64, 16 bits little-endian: each row's largest share, 65535 for all of it")
    elsewhere: str = Field(description="the same for what a row looks at in tokens that are no patches")


class Explanation(Exact):
    model: str
    version: str
    name: str
    labels: list[Label]
    unknown: bool
    target: str = Field(description="the class that was explained")
    image: Picture
    grid: list[int] = Field(description="patches down, patches across")
    heatmaps: dict[str, Heatmap]
    attention: Attention | None = None


class Model(Exact):
    name: str
    version: str = Field(description="changes with the weights and with anything on the model's card")
    classes: list[str]
    image_size: list[int] = Field(description="height, width")
    channels: int
    patch_size: int
    grid: list[int] = Field(description="patches down, patches across")
    depth: int
    heads: int
    parameters: int
    trained_on: str
    mean: list[float] = Field(description="brightness of the images it learned from, channel by channel, 0…1")
    calibrated: bool = Field(description="whether its probabilities were set right by a temperature")
    knows_unknown: bool = Field(description="whether it can say that it does not know an image")
    methods: list[str] = Field(description="what …/explain takes")
    most_images: int
    most_mib: int


class Models(Exact):
    models: list[Model]


class Status(Exact):
    status: str


BINARY = {"type": "string", "format": "binary"}
IMAGES: dict[str, Any] = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {"file": {"type": "array", "items": BINARY, "minItems": 1}},
                "required": ["file"],
            }
        },
        "application/octet-stream": {"schema": BINARY},
        "image/*": {"schema": BINARY},
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
