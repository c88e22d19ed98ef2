"""The walk: one picture from pixels to logits, step by step, with the values that this model has for it.

Each step: what happens, its equation, the tensor's shape, the lines of the source that do it, and a picture of the
actual numbers. The lines are read from the running source; what is shown is what ran.

Shapes:  as in vit.py
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib import colormaps
from torch import Tensor

from vitral.data.sequence import picture_of
from vitral.errors import VitralError
from vitral.explain.method import chosen, scaled, to_pixels
from vitral.inference.predictor import Picture as Source
from vitral.inference.predictor import Predictor
from vitral.models import vit
from vitral.models.variants.hybrid import HybridEmbedding
from vitral.models.vit import Trace, ViT
from vitral.reporting.figures.paper import as_picture, filters_of, similarity, turned_alike
from vitral.reporting.figures.training import glowing, shown, with_gaps
from vitral.reporting.walk.texts import CAPTIONS, TEXTS, Lang

Array = np.ndarray[Any, Any]
Scale = Literal["signed", "shares", "span"]
SIDE = 300  # pixels that a picture of values is enlarged to, about
MOST_FILTERS = 24
BEST = 5  # classes in the answer


@dataclass(frozen=True, kw_only=True)
class Code:
    """Lines of the source."""

    where: str  # "vit.py · PatchEmbedding.forward"
    line: int
    text: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    """Numbers as colours: `pixels` as drawn, h w 3; `values` the numbers themselves where there are any."""

    caption: str
    pixels: Array
    values: Array | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    key: str
    title: str
    text: str
    equation: str
    shape: str
    code: tuple[Code, ...]
    pictures: tuple[Picture, ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    name: str
    logit: float
    probability: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Walk:
    lang: Lang
    title: str
    lead: str
    steps: tuple[Step, ...]
    answers: tuple[Answer, ...] = field(default=())  # most probable first, with the last step
    unknown: bool = False  # the picture looks like nothing the model was trained on


def walk(predictor: Predictor, picture: Source, lang: Lang = "en", layer: int = 1, head: int = 1) -> Walk:
    """From the pixels of one picture to the logits; inside one block and one head of it, both counted from 1."""
    pixels_CHW = predictor.card.preprocessing.pixels(picture_of(picture))
    image_BCHW = predictor.card.preprocessing.normalise(pixels_CHW[None].to(predictor.hardware.device))
    return Walker(predictor, pixels_CHW, image_BCHW, lang, layer, head).walk()


class Walker:
    """One model, one picture, one language: every step is a method that reads the trace."""

    def __init__(
        self, predictor: Predictor, pixels_CHW: Tensor, image_BCHW: Tensor, lang: Lang, layer: int, head: int
    ) -> None:
        if not isinstance(predictor.model, ViT):
            raise VitralError("only a ViT can be walked through; this model only answers", "take the run it came from")
        self.predictor, self.model, self.lang = predictor, predictor.model, lang
        config = self.config = predictor.model.config
        self.block = chosen("layer", layer, config.depth) or 0
        self.head = chosen("head", head, config.heads) or 0
        self.pixels_CHW, self.picture = pixels_CHW, shown(pixels_CHW)
        with torch.no_grad():
            self.image_BCHW = image_BCHW
            self.trace: Trace = self.model.trace(image_BCHW)
            self.inside = self.look_inside()
        self.reads_one = predictor.model.class_token is not None
        gh, gw = self.trace.grid
        H, W = config.image_size
        self.numbers: dict[str, Any] = {
            "H": H, "W": W, "C": config.channels, "P": config.patch_size, "gh": gh, "gw": gw, "N": gh * gw,
            "E": self.trace.patches.shape[-1], "D": config.width, "T": self.trace.tokens[0].shape[1],
            "h": config.heads, "d": config.width // config.heads, "M": config.hidden_width, "L": config.depth,
            "K": config.classes, "l": self.block + 1, "before": self.block, "head": self.head + 1,
            "front": "x_{class}; " if self.reads_one else "",
            "registers": config.registers, "prefix": self.trace.prefix,
        }  # fmt: skip

    def look_inside(self) -> dict[str, Tensor]:
        """What the trace leaves out of one block: queries, keys, and what both branches add."""
        block: Any = self.model.encoder.blocks[self.block]
        z, attention = self.trace.tokens[self.block], block.attention
        x = block.norm1(z)
        q, k, _ = attention.qkv(x).unflatten(-1, (3, attention.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = attention.norm_q(q), attention.norm_k(k)
        rotary = self.model.encoder.rotary_position
        turn = None if rotary is None else rotary(self.trace.grid)
        if turn is not None:
            q, k = vit.rotate(q, turn), vit.rotate(k, turn)
        found = attention(x, turn)
        z1 = block.residual1(z, found)
        hidden = block.mlp.gelu(block.mlp.expand(block.norm2(z1)))
        return {"z": z, "x": x, "q": q, "k": k, "found": found, "z1": z1, "hidden": hidden}

    def walk(self) -> Walk:
        c, model, trace, inside, n = self.config, self.model, self.trace, self.inside, self.numbers
        T, D, N = n["T"], n["D"], n["N"]
        steps = [
            self.step("image", f"{n['C']} × {n['H']} × {n['W']}", [ViT.features], self.of_image()),
        ]
        squares, embedding = f"{N} × {n['P']} × {n['P']} × {n['C']}", [type(model.patch_embedding).forward]
        if isinstance(model.patch_embedding, HybridEmbedding):  # pixels are not cut: their feature map is
            steps += [
                self.step("squares", squares, [ViT.check], self.of_patches()),
                self.step("hybrid", f"{N} × {D}", embedding, self.of_embedding()),
            ]
        else:
            steps += [
                self.step("patches", squares, [ViT.check], self.of_patches()),
                self.step("flatten", f"{N} × {n['E']}", [vit.patchify], [self.matrix("flat", trace.patches[0])]),
                self.step("embedding", f"{N} × {D}", embedding, self.of_embedding()),
            ]
        if model.class_token is not None:
            token = model.class_token.token[0]
            shape = f"{N} × {D} → {n['N'] + 1} × {D}"
            steps.append(self.step("class_token", shape, [vit.ClassToken.forward], [self.matrix("token", token)]))
        if model.position_embedding is not None:
            key = "sincos" if model.position_embedding.fixed else "learned"
            code: list[Callable[..., Any]] = [vit.PositionEmbedding.forward]
            if model.position_embedding.fixed:
                code.append(vit.PositionEmbedding.waves)
            steps.append(self.step(key, f"{T} × {D}", code, self.of_positions()))
        steps.append(self.step("embed", f"{T} × {D}", [type(model).embed], [self.matrix("tokens", trace.tokens[0][0])]))
        if model.encoder.rotary_position is not None:
            steps.append(
                self.step(
                    "rotary", f"2 × {T} × {n['d'] // 2}", [vit.RotaryPosition.turn_of, vit.rotate], self.of_rotary()
                )
            )
        q, k = inside["q"][0, self.head], inside["k"][0, self.head]
        looked = trace.attention[self.block][0, self.head]
        steps += [
            self.step(
                "queries",
                f"{T} × {n['d']}",
                [vit.MultiHeadAttention.forward],
                [self.matrix("norm", inside["x"][0]), self.matrix("q", q), self.matrix("k", k)],
            ),
            self.step("attention", f"{T} × {T}", [vit.attend], self.of_attention(looked)),
            self.step(
                "residual",
                f"{T} × {D}",
                [vit.Residual.forward, vit.EncoderBlock.forward],
                [
                    self.matrix("z", inside["z"][0]),
                    self.matrix("found", inside["found"][0]),
                    self.matrix("sum", inside["z1"][0]),
                    self.share(inside["found"][0], inside["z"][0]),
                ],
            ),
            self.step(
                "mlp",
                f"{T} × {D} → {T} × {n['M']} → {T} × {D}",
                [vit.FeedForward.forward],
                [self.matrix("hidden", inside["hidden"][0]), self.matrix("out", trace.tokens[self.block + 1][0])],
            ),
            self.step(
                "encoder" if self.reads_one else "encoder_patches",
                f"{T} × {D}",
                [vit.Encoder.forward],
                self.of_encoder(),
            ),
            self.step(self.pooling(), str(trace.pooled.shape[1]), self.pooling_code(), self.of_pooling()),
        ]
        logits = trace.logits[0].float()
        calibration = self.predictor.card.calibration
        chances = calibration.probabilities(logits[None].cpu())[0]
        unknown = bool(calibration.unknown(logits[None]))
        last = self.step(
            "logits",
            f"{trace.pooled.shape[1]} → {c.classes}",
            self.head_code(),
            [self.matrix("logits", logits[None])],
        )
        n["temperature"] = f"{calibration.temperature:.3g}"
        if n["temperature"] != "1":
            last = replace(last, equation=TEXTS["en"]["calibrated"]["equation"].format(**n))
        said = {"calibrated": n["temperature"] != "1", "unknown": unknown}
        more = [TEXTS[self.lang][key]["text"].format(**n) for key, holds in said.items() if holds]
        steps.append(replace(last, text=" ".join((last.text, *more))))
        best = chances.topk(min(BEST, len(chances))).indices.tolist()
        names = self.predictor.classes
        answers = tuple(Answer(name=names[i], logit=float(logits[i]), probability=float(chances[i])) for i in best)
        told = TEXTS[self.lang]
        lead = told["lead"]["text"].format(**n)
        return Walk(
            lang=self.lang,
            title=told["lead"]["title"],
            lead=lead,
            steps=tuple(steps),
            answers=answers,
            unknown=unknown,
        )

    def step(self, key: str, shape: str, code: list[Callable[..., Any]], pictures: list[Picture]) -> Step:
        told = TEXTS[self.lang][key]
        text = told["text"].format(**self.numbers)
        if key == "embed" and self.config.registers:
            text += " " + TEXTS[self.lang]["registers"]["text"].format(**self.numbers)
        return Step(
            key=key,
            title=told["title"].format(**self.numbers),
            text=text,
            equation=TEXTS["en"][key]["equation"].format(**self.numbers),
            shape=shape,
            code=tuple(source_of(function) for function in code),
            pictures=tuple(pictures),
        )

    # ── pictures ─────────────────────────────────────────────────────────────────────────────────────────────

    def caption(self, key: str, **more: Any) -> str:
        return CAPTIONS[self.lang][key].format(**self.numbers, **more)

    def of_image(self) -> list[Picture]:
        seen = self.image_BCHW[0]
        found = [Picture(caption=self.caption("image"), pixels=enlarged(self.picture))]
        names = ("red", "green", "blue") if len(seen) == 3 else ("gray",) * len(seen)
        return found + [self.matrix(name, channel) for name, channel in zip(names, seen, strict=True)]

    def of_patches(self) -> list[Picture]:
        cut = with_gaps(self.picture, self.config.patch_size, self.trace.margin)
        return [Picture(caption=self.caption("patches"), pixels=cut)]

    def of_embedding(self) -> list[Picture]:
        weight, _ = filters_of(self.model)
        tiles = [as_picture(one) for one in weight[:MOST_FILTERS]]
        rows = [np.stack([t, t, t], axis=-1) if t.ndim == 2 else t for t in tiles]
        pictures = tiled([(tile * 255).astype(np.uint8) for tile in rows], columns=8)
        with torch.no_grad():
            tokens = self.model.patch_embedding(self.image_BCHW)[0]
        shown_filters = self.caption("filters", count=len(tiles), all=len(weight))
        return [Picture(caption=shown_filters, pixels=enlarged(pictures)), self.matrix("embedded", tokens)]

    def of_positions(self) -> list[Picture]:
        assert self.model.position_embedding is not None
        table = self.model.position_embedding.rows(self.trace.grid)[0].detach()
        front = self.model.position_embedding.front
        alike = similarity(table[front:])
        return [self.matrix("table", table), *self.from_the_middle(alike)]

    def of_rotary(self) -> list[Picture]:
        assert self.model.encoder.rotary_position is not None
        turn = self.model.encoder.rotary_position(self.trace.grid)
        prefix = self.model.encoder.rotary_position.prefix
        return [self.matrix("angles", turn[1]), *self.from_the_middle(turned_alike(turn[:, prefix:]))]

    def from_the_middle(self, alike_NN: Tensor) -> list[Picture]:
        gh, gw = self.trace.grid
        middle = gh // 2 * gw + gw // 2
        place = alike_NN[middle].view(gh, gw)
        return [self.matrix("alike", place, row=gh // 2 + 1, column=gw // 2 + 1)]

    def of_attention(self, looked_TT: Tensor) -> list[Picture]:
        prefix, grid = self.trace.prefix, self.trace.grid
        key = "row" if self.reads_one else "rows"
        row = self.asking(looked_TT)
        return [self.matrix("matrix", looked_TT, "shares"), self.glow(key, row[None, prefix:], grid)]

    def asking(self, looked_TT: Tensor) -> Tensor:
        """Where the class token looks or, where there is none, the patches on average: T."""
        return looked_TT[0] if self.reads_one else looked_TT[self.trace.prefix :].mean(dim=0)

    def glow(self, key: str, heat_1N: Tensor, grid: vit.Grid, **more: Any) -> Picture:
        heat = scaled(to_pixels(heat_1N, grid, self.image_BCHW, self.trace.margin))[0].cpu().numpy()
        values = heat_1N.view(grid).cpu().numpy()
        return Picture(caption=self.caption(key, **more), pixels=enlarged(glowing(self.picture, heat)), values=values)

    def share(self, found_TD: Tensor, z_TD: Tensor) -> Picture:
        """How long what was added is, beside what was there, place by place."""
        share = (found_TD.norm(dim=-1) / z_TD.norm(dim=-1).clamp_min(1e-12))[self.trace.prefix :]
        return self.matrix("share", share.view(self.trace.grid), "span")

    def of_encoder(self) -> list[Picture]:
        prefix, grid = self.trace.prefix, self.trace.grid
        pictures = []
        for index, looked in enumerate(self.trace.attention):
            row = self.asking(looked[0].mean(dim=0))
            pictures.append(self.glow("block", row[None, prefix:], grid, block=index + 1))
        return pictures

    def pooling(self) -> str:
        return f"pool_{self.config.pooling}"

    def pooling_code(self) -> list[Callable[..., Any]]:
        extra = [vit.AttentionPooling.forward] if self.config.pooling == "attention" else []
        return [type(self.model).pool, *extra]

    def head_code(self) -> list[Callable[..., Any]]:
        return [type(self.model.head).forward]

    def of_pooling(self) -> list[Picture]:
        pooled = [self.matrix("pooled", self.trace.pooled)]
        if self.trace.pooling:
            heat = self.trace.pooling[0][0].mean(dim=0)
            pooled.append(self.glow("asked", heat, self.trace.grid))
        return pooled

    def matrix(self, key: str, values: Tensor, scale: Scale = "signed", **more: Any) -> Picture:
        numbers = values.detach().float().cpu().numpy()
        reach = f"{numbers.min():.2g} … {numbers.max():.2g}"
        told = f"{self.caption(key, **more)} ({numbers.shape[0]} × {numbers.shape[1]}; {reach})"
        return Picture(caption=told, pixels=enlarged(coloured(numbers, scale)), values=numbers)


# ── numbers as colours, source as text ───────────────────────────────────────────────────────────────────────


def coloured(values: Array, scale: Scale = "signed") -> Array:
    """signed: orange below zero, white at it, purple above, the outermost hundredth clipped; shares: dark to light by
    their square roots, for most are small; span: dark to light from the least to the most."""
    if scale == "signed":
        most = max(float(np.quantile(np.abs(values), 0.99)), 1e-12)
        painted = colormaps["PuOr"]((values / most).clip(-1, 1) / 2 + 0.5)
    elif scale == "shares":
        painted = colormaps["cividis"](np.sqrt((values / max(float(values.max()), 1e-12)).clip(0, 1)))
    else:
        painted = colormaps["cividis"]((values - values.min()) / max(float(np.ptp(values)), 1e-12))
    pixels: Array = (painted[..., :3] * 255).round().astype(np.uint8)
    return pixels


def enlarged(pixels_hw3: Array) -> Array:
    """Every number a square of several pixels; a vector's a bar, so that it can be seen."""
    h, w, _ = pixels_hw3.shape
    times = max(SIDE // max(h, w), 1)
    tall = times if h * times >= 16 else -(-16 // h)
    bigger: Array = pixels_hw3.repeat(tall, axis=0).repeat(times, axis=1)
    return bigger


def tiled(pictures: list[Array], columns: int) -> Array:
    h, w, _ = pictures[0].shape
    gap = max(w // 8, 1)
    columns = min(columns, len(pictures))
    rows = -(-len(pictures) // columns)
    sheet: Array = np.full((rows * (h + gap) - gap, columns * (w + gap) - gap, 3), 255, dtype=np.uint8)
    for index, picture in enumerate(pictures):
        y, x = index // columns * (h + gap), index % columns * (w + gap)
        sheet[y : y + h, x : x + w] = picture
    return sheet


def source_of(function: Callable[..., Any]) -> Code:
    """The lines of a function as they stand in its file, docstring left out, not indented."""
    lines, first = inspect.getsourcelines(function)
    text = inspect.cleandoc("".join(["\n", *lines]))
    doc = inspect.getdoc(function)
    if doc:
        before, _, rest = text.partition('"""')
        _, _, after = rest.partition('"""')
        text = before.rstrip() + "\n" + after.lstrip("\n")
    file = Path(inspect.getsourcefile(function) or "").name
    return Code(where=f"{file} · {function.__qualname__}", line=first, text=text.rstrip())
