"""The walk: one image from pixels to logits, step by step, with the actual values in this model.

Each step has an explanation, an equation, the shape of the result, the source code that computes it, and figures of
the actual numbers. The code is read from the running source, so that it is exactly what ran.

Shapes:  as in vit.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.explain.method import index_from_one, rescale_for_display, to_pixels
from vitral.inference.predictor import ImageInput, Predictor
from vitral.models import vit
from vitral.models.variants.class_and_mean import ClassAndMeanViT
from vitral.models.variants.distilled import DistilledViT
from vitral.models.variants.hybrid import HybridEmbedding
from vitral.models.vit import Trace, ViT
from vitral.reporting.figures.images import overlay_heatmap, patch_mosaic, to_rgb
from vitral.reporting.figures.paper import cosine_similarity, embedding_filters, filter_to_image, rope_similarity
from vitral.reporting.figures.style import Array
from vitral.reporting.walk.colours import ColourScale, enlarge, tile_images, to_colours
from vitral.reporting.walk.source import SourceExcerpt, source_excerpt
from vitral.reporting.walk.texts import CAPTIONS, STEP_TEXTS, Lang

Code = list[Callable[..., Any]]  # functions whose source is shown
MAX_FILTERS = 24
TOP_CLASSES = 5
ACTIVATION_NAMES = {
    "gelu": "GELU", "gelu_tanh": "GELU", "quick_gelu": "QuickGELU", "relu": "ReLU", "swiglu": "SwiGLU"
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class StepFigure:
    caption: str
    pixels: Array  # (h, w, 3), as drawn
    values: Array | None = None  # the numbers shown, if the figure shows numbers


@dataclass(frozen=True, kw_only=True, eq=False)
class WalkStep:
    key: str
    title: str
    text: str
    equation: str
    shape: str
    code: tuple[SourceExcerpt, ...]
    figures: tuple[StepFigure, ...]
    extra_texts: tuple[str, ...] = ()  # keys of the texts after the step's own


@dataclass(frozen=True, kw_only=True)
class ClassScore:
    name: str
    logit: float
    probability: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Walk:
    lang: Lang
    title: str
    intro: str
    steps: tuple[WalkStep, ...]
    top_classes: tuple[ClassScore, ...]  # most probable first
    is_ood: bool  # the image is unlike the training set


def walk(predictor: Predictor, image: ImageInput, lang: Lang = "en", layer: int = 1, head: int = 1) -> Walk:
    """Follow one image from pixels to logits. layer, head: the block and head to show in detail, counted from 1."""
    preprocessing = predictor.model_config.preprocessing
    pixels_CHW = preprocessing.load(image)
    image_1CHW = preprocessing.normalise(pixels_CHW[None].to(predictor.hardware.device))
    return WalkBuilder(predictor, pixels_CHW, image_1CHW, lang, layer, head).build()


@dataclass(frozen=True, kw_only=True)
class BlockDetails:
    """Intermediate results of one block that the trace does not contain, for one image."""

    z: Tensor  # (T, D) input of the block
    norm: Tensor  # (T, D) LN(z)
    q: Tensor  # (h, T, d)
    k: Tensor
    v: Tensor
    added: Tensor  # (T, D) output of the attention branch, after layer scale: the value that is added to z
    z_after: Tensor  # (T, D) z + added
    hidden: Tensor  # (T, M) after the activation


class WalkBuilder:
    """Builds the steps for one model, one image and one language from a trace."""

    def __init__(
        self, predictor: Predictor, pixels_CHW: Tensor, image_1CHW: Tensor, lang: Lang, layer: int, head: int
    ) -> None:
        if not isinstance(predictor.model, ViT):
            raise VitralError("the walk needs a ViT; this model only has logits", "Pass the run it was exported from")
        self.predictor, self.model, self.lang = predictor, predictor.model, lang
        config = self.config = predictor.model.config
        self.block = index_from_one("layer", layer, config.depth) or 0
        self.head = index_from_one("head", head, config.heads) or 0
        self.image_HW3, self.image_1CHW = to_rgb(pixels_CHW), image_1CHW
        with torch.no_grad():
            self.trace: Trace = self.model.trace(image_1CHW)
            self.details = self._block_details()
        self.pools_class_token = config.pooling == "class"
        gh, gw = self.trace.grid
        H, W = image_1CHW.shape[2:]
        has_layer_scale = config.layer_scale is not None
        self.numbers: dict[str, Any] = {
            "H": H, "W": W, "C": config.channels, "P": config.patch_size, "gh": gh, "gw": gw, "N": gh * gw,
            "E": self.trace.patches.shape[-1], "D": config.width, "T": self.trace.tokens[0].shape[1],
            "h": config.heads, "d": config.width // config.heads, "M": config.hidden_width, "L": config.depth,
            "K": config.num_classes, "l": self.block + 1, "before": self.block, "head": self.head + 1,
            "class_token": "x_{class}; " if config.has_class_token else "",
            "scale_attention": "λ ⊙ " if has_layer_scale else "",
            "scale_mlp": "λ ⊙ " if has_layer_scale else "",
            "activation": ACTIVATION_NAMES[config.activation],
            "mlp": "(SiLU(xW_{1}) ⊙ xW_{3})" if config.activation == "swiglu"
            else f"{ACTIVATION_NAMES[config.activation]}(xW_{{1}})",
            "registers": config.registers,
            "temperature": f"{predictor.model_config.calibration.temperature:.3g}",
        }  # fmt: skip

    def _block_details(self) -> BlockDetails:
        block: Any = self.model.encoder.blocks[self.block]
        z, attention = self.trace.tokens[self.block], block.attention
        x = block.norm1(z)
        q, k, v = attention.qkv(x).unflatten(-1, (3, attention.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = attention.norm_q(q), attention.norm_k(k)
        rotary = self.model.encoder.rotary_position
        rope = None if rotary is None else rotary(self.trace.grid)
        if rope is not None:
            q, k = vit.apply_rope(q, rope), vit.apply_rope(k, rope)
        attention_out = attention(x, rope)
        z_after = block.residual1(z, attention_out)
        scale = block.residual1.scale
        added = attention_out if scale is None else attention_out * scale
        hidden = block.mlp.activation(block.mlp.expand(block.norm2(z_after)))
        tensors = {"z": z, "norm": x, "q": q, "k": k, "v": v, "added": added, "z_after": z_after, "hidden": hidden}
        return BlockDetails(**{name: tensor[0] for name, tensor in tensors.items()})

    def build(self) -> Walk:
        steps = [*self.input_steps(), *self.embedding_steps(), *self.block_steps(), *self.output_steps()]
        logits = self.trace.logits[0].float().cpu()
        calibration = self.predictor.model_config.calibration
        probabilities = calibration.probabilities(logits[None])[0]
        top = probabilities.topk(min(TOP_CLASSES, len(probabilities))).indices.tolist()
        classes = self.predictor.classes
        intro = STEP_TEXTS[self.lang]["intro"]
        return Walk(
            lang=self.lang,
            title=intro["title"],
            intro=intro["text"].format(**self.numbers),
            steps=tuple(steps),
            top_classes=tuple(
                ClassScore(name=classes[i], logit=float(logits[i]), probability=float(probabilities[i])) for i in top
            ),
            is_ood=bool(calibration.is_ood(logits[None])),
        )

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────

    def input_steps(self) -> list[WalkStep]:
        """From the image to patch embeddings."""
        n, model = self.numbers, self.model
        preprocessing: Code = [Preprocessing.resize_and_crop, Preprocessing.normalise]
        image = self.step("image", f"{n['C']} × {n['H']} × {n['W']}", preprocessing, self.image_figures())
        patch_shape = f"{n['N']} × {n['P']} × {n['P']} × {n['C']}"
        embedding_code: Code = [type(model.patch_embedding).forward]
        embedding_shape = f"{n['N']} × {n['D']}"
        if isinstance(model.patch_embedding, HybridEmbedding):  # cuts the feature map instead of the pixels
            return [
                image,
                self.step("squares", patch_shape, [type(self.config).grid_for], self.patch_figures()),
                self.step("hybrid", embedding_shape, embedding_code, self.embedding_figures()),
            ]
        flat = self.matrix("flat", self.trace.patches[0])
        return [
            image,
            self.step("patches", patch_shape, [vit.patchify], self.patch_figures()),
            self.step("flatten", f"{n['N']} × {n['E']}", [vit.patchify], [flat]),
            self.step("embedding", embedding_shape, embedding_code, self.embedding_figures()),
        ]

    def embedding_steps(self) -> list[WalkStep]:
        """Class token, positions and registers."""
        n, model, steps = self.numbers, self.model, []
        code: Code
        token_shape = f"{n['T']} × {n['D']}"
        if model.class_token is not None:
            shape = f"{n['N']} × {n['D']} → {n['N'] + 1} × {n['D']}"
            figure = self.matrix("class_token", model.class_token.token[0])
            steps.append(self.step("class_token", shape, [vit.ClassToken.forward], [figure]))
        if (positions := model.position_embedding) is not None:
            key, code = "learned", [vit.PositionEmbedding.forward]
            if positions.fixed:
                key, code = "sincos", [*code, vit.PositionEmbedding.sincos_table]
            steps.append(self.step(key, token_shape, code, self.position_figures(positions)))
        extra = [name for name in ("registers", "pre_norm") if getattr(self.config, name)]
        tokens = self.matrix("tokens", self.trace.tokens[0][0])
        steps.append(self.step("embed", token_shape, [type(model).embed], [tokens], extra))
        if (rotary := model.encoder.rotary_position) is not None:
            shape = f"2 × {n['T']} × {n['d'] // 2}"
            code = [vit.RotaryPosition.rope_table, vit.apply_rope]
            steps.append(self.step("rotary", shape, code, self.rotary_figures(rotary)))
        return steps

    def block_steps(self) -> list[WalkStep]:
        """Inside one block, then all blocks."""
        n, details, head = self.numbers, self.details, self.head
        T, D = n["T"], n["D"]
        layer_scale = ["layer_scale"] if self.config.layer_scale is not None else []
        gated = ["swiglu"] if self.config.activation == "swiglu" else []
        queries = [self.matrix("norm", details.norm)]
        queries += [self.matrix(name, getattr(details, name)[head]) for name in ("q", "k", "v")]
        residual = [
            self.matrix("z", details.z),
            self.matrix("added", details.added),
            self.matrix("sum", details.z_after),
            self.change_figure(),
        ]
        block_output = self.matrix("block_output", self.trace.tokens[self.block + 1][0])
        mlp = [self.matrix("hidden", details.hidden), block_output]
        residual_code: Code = [vit.Residual.forward, vit.EncoderBlock.forward]
        encoder_key = "encoder" if self.pools_class_token else "encoder_patches"
        return [
            self.step("queries", f"{T} × {n['d']}", [vit.MultiHeadAttention.forward], queries),
            self.step("attention", f"{T} × {T}", [vit.attend], self.attention_figures()),
            self.step("residual", f"{T} × {D}", residual_code, residual, layer_scale),
            self.step("mlp", f"{T} × {D} → {T} × {n['M']} → {T} × {D}", [vit.FeedForward.forward], mlp, gated),
            self.step(encoder_key, f"{T} × {D}", [vit.Encoder.forward], self.encoder_figures()),
        ]

    def output_steps(self) -> list[WalkStep]:
        """Pooling and the classification head."""
        n, model, pooled = self.numbers, self.model, self.trace.pooled
        pooling_code: Code = [type(model).pool]
        if self.config.pooling == "attention":
            pooling_code.append(vit.AttentionPooling.forward)
        logits = self.trace.logits[0].float()
        calibration = self.predictor.model_config.calibration
        is_calibrated = n["temperature"] != "1"
        extra = [
            *(["calibrated"] if is_calibrated else []),
            *(["unknown"] if bool(calibration.is_ood(logits[None].cpu())) else []),
        ]
        shape = f"{pooled.shape[1]} → {n['K']}"
        figures = [self.matrix("logits", logits[None])]
        key = "logits" if calibration.activation == "softmax" else "labels"
        head = replace(self.step(key, shape, [type(model.head).forward], figures, extra), key="logits")
        if is_calibrated:
            equation = STEP_TEXTS["en"]["calibrated"]["equation"].format(**n)
            head = replace(head, equation=equation.replace("softmax", calibration.activation))
        return [self.step(self.pooling_key(), str(pooled.shape[1]), pooling_code, self.pooling_figures()), head]

    def pooling_key(self) -> str:
        if isinstance(self.model, ClassAndMeanViT):
            return "pool_class_and_mean"
        return "pool_distilled" if isinstance(self.model, DistilledViT) else f"pool_{self.config.pooling}"

    def step(
        self,
        key: str,
        shape: str,
        code: Code,
        figures: Sequence[StepFigure],
        extra_texts: Sequence[str] = (),
    ) -> WalkStep:
        texts = STEP_TEXTS[self.lang]
        sentences = [texts[name]["text"].format(**self.numbers) for name in (key, *extra_texts)]
        return WalkStep(
            key=key,
            title=texts[key]["title"].format(**self.numbers),
            text=" ".join(sentences),
            equation=STEP_TEXTS["en"][key]["equation"].format(**self.numbers),
            shape=shape,
            code=tuple(source_excerpt(function) for function in code),
            figures=tuple(figures),
            extra_texts=tuple(extra_texts),
        )

    # ── figures ──────────────────────────────────────────────────────────────────────────────────────────────

    def caption(self, key: str, **values: Any) -> str:
        return CAPTIONS[self.lang][key].format(**self.numbers, **values)

    def matrix(self, key: str, values: Tensor, scale: ColourScale = "signed", **caption_values: Any) -> StepFigure:
        array = values.detach().float().cpu().numpy()
        value_range = f"{array.min():.2g} … {array.max():.2g}"
        caption = f"{self.caption(key, **caption_values)} ({array.shape[0]} × {array.shape[1]}; {value_range})"
        return StepFigure(caption=caption, pixels=enlarge(to_colours(array, scale)), values=array)

    def heatmap(self, key: str, weights_N: Tensor, **caption_values: Any) -> StepFigure:
        """Attention weights of the patches as light over the image."""
        grid, margin = self.trace.grid, self.trace.margin
        heat_HW = rescale_for_display(to_pixels(weights_N[None], grid, self.image_1CHW, margin))[0].cpu().numpy()
        return StepFigure(
            caption=self.caption(key, **caption_values),
            pixels=enlarge(overlay_heatmap(self.image_HW3, heat_HW)),
            values=weights_N.view(grid).cpu().numpy(),
        )

    def image_figures(self) -> list[StepFigure]:
        channels = self.image_1CHW[0]
        names = ("red", "green", "blue") if len(channels) == 3 else ("gray",)  # of more channels, the first
        image = StepFigure(caption=self.caption("image"), pixels=enlarge(self.image_HW3))
        return [image, *(self.matrix(name, channel) for name, channel in zip(names, channels, strict=False))]

    def patch_figures(self) -> list[StepFigure]:
        mosaic = patch_mosaic(self.image_HW3, self.config.patch_size, self.trace.margin)
        return [StepFigure(caption=self.caption("patches"), pixels=mosaic)]

    def embedding_figures(self) -> list[StepFigure]:
        filters, _ = embedding_filters(self.model)
        images = [filter_to_image(weights) for weights in filters[:MAX_FILTERS]]
        rgb_images = [np.stack([image] * 3, axis=-1) if image.ndim == 2 else image for image in images]
        tiles = tile_images([(image * 255).astype(np.uint8) for image in rgb_images], columns=8)
        caption = self.caption("filters", count=len(images), all=len(filters))
        with torch.no_grad():
            tokens = self.model.patch_embedding(self.image_1CHW)[0]
        return [StepFigure(caption=caption, pixels=enlarge(tiles)), self.matrix("embedded", tokens)]

    def position_figures(self, positions: vit.PositionEmbedding) -> list[StepFigure]:
        table = positions.table_for(self.trace.grid)[0].detach()
        similarity = cosine_similarity(table[positions.num_prefix_rows :])
        return [self.matrix("position_table", table), self.central_similarity(similarity)]

    def rotary_figures(self, rotary: vit.RotaryPosition) -> list[StepFigure]:
        rope = rotary(self.trace.grid)
        similarity = rope_similarity(rope[:, rotary.num_prefix_tokens :])
        return [self.matrix("angles", rope[1]), self.central_similarity(similarity)]

    def central_similarity(self, similarity_NN: Tensor) -> StepFigure:
        """Similarity of the central position to all others."""
        gh, gw = self.trace.grid
        row, column = gh // 2, gw // 2
        similarity = similarity_NN[row * gw + column].view(gh, gw)
        return self.matrix("position_similarity", similarity, row=row + 1, column=column + 1)

    def attention_figures(self) -> list[StepFigure]:
        attention_TT = self.trace.attention[self.block][0, self.head]
        key = "class_token_attention" if self.pools_class_token else "patch_attention"
        head_output = attention_TT @ self.details.v[self.head]
        return [
            self.matrix("attention", attention_TT, "weights"),
            self.heatmap(key, self.attention_to_patches(attention_TT)),
            self.matrix("head_output", head_output),
        ]

    def attention_to_patches(self, attention_TT: Tensor) -> Tensor:
        """Attention of the class token to the patches, (N,); if it is not pooled, the mean over the patches."""
        num_prefix_tokens = self.trace.num_prefix_tokens
        row = attention_TT[0] if self.pools_class_token else attention_TT[num_prefix_tokens:].mean(dim=0)
        return row[num_prefix_tokens:]

    def change_figure(self) -> StepFigure:
        """Norm of the added vector relative to the norm of the original one, for each patch."""
        change_T = self.details.added.norm(dim=-1) / self.details.z.norm(dim=-1).clamp_min(1e-12)
        change_N = change_T[self.trace.num_prefix_tokens :]
        return self.matrix("change", change_N.view(self.trace.grid), "range")

    def encoder_figures(self) -> list[StepFigure]:
        return [
            self.heatmap("block", self.attention_to_patches(attention[0].mean(dim=0)), block=index + 1)
            for index, attention in enumerate(self.trace.attention)
        ]

    def pooling_figures(self) -> list[StepFigure]:
        figures = [self.matrix("pooled", self.trace.pooled)]
        if self.trace.pooling:
            figures.append(self.heatmap("query_attention", self.trace.pooling[0][0].mean(dim=0)[0]))
        return figures
