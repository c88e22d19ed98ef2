"""Small models of every kind that the engine supports, on one page that is opened from file://."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.explorer import EnginePage, write_engine_page
from vitral.data.preprocess import Preprocessing
from vitral.inference.predictor import Predictor
from vitral.models.variants import VARIANTS
from vitral.models.variants.hybrid import ConvStemConfig, HybridConfig
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.model_io import ModelConfig, save_model

PLAIN = ViTConfig(
    image_size=(24, 24), patch_size=8, channels=1, num_classes=5, width=24, depth=3, heads=3, mlp_width=40
)
HYBRID = HybridConfig(
    image_size=(32, 32), patch_size=4, num_classes=5, width=24, depth=2, heads=3, pooling="mean",
    positions="learned+rotary", qk_norm=True, activation="gelu_tanh",
    conv=ConvStemConfig(widths=(8, 16, 24), strides=(1, 2, 2), same_padding=False),
)  # fmt: skip
CONFIGS: dict[str, ViTConfig] = {
    "plain": PLAIN,
    "rotary": replace(PLAIN, positions="learned+rotary", qk_norm=True, registers=2, layer_scale=0.3),
    "mean": replace(PLAIN, pooling="mean", positions="sincos", activation="swiglu", head="mlp", channels=3),
    "clip": replace(
        PLAIN, pre_norm=True, activation="quick_gelu", key_bias=False, registers=1, register_positions=True
    ),
    "unusual": replace(
        PLAIN, image_size=(16, 40), pooling="mean", class_token=True, positions="rotary", final_norm=False,
        activation="relu", qkv_bias=False,
    ),
    "hybrid": HYBRID,
    "hybrid-same": replace(HYBRID, conv=replace(HYBRID.conv, same_padding=True), pooling="class"),
}  # fmt: skip


def random_model(config: ViTConfig) -> ViT:
    """Random weights of a size that makes every part of the model matter."""
    torch.manual_seed(0)
    model = VARIANTS["hybrid" if isinstance(config, HybridConfig) else "plain"](config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name and name.endswith("weight") else 0.0, std=0.3)
    return model


@pytest.fixture(scope="session")
def predictors(tmp_path_factory) -> dict[str, Predictor]:
    folder = tmp_path_factory.mktemp("explorer-models")
    for name, config in CONFIGS.items():
        channels = config.channels
        preprocessing = Preprocessing(
            image_size=config.image_size, channels=channels, mean=(0.4,) * channels, std=(0.2,) * channels
        )
        model_config = ModelConfig(
            architecture=config,
            preprocessing=preprocessing,
            classes=("a", "b", "c", "d", "e"),
            trained_on="noise",
            epoch=3,
            variant="hybrid" if isinstance(config, HybridConfig) else "plain",
        )
        save_model(folder / name, random_model(config), model_config)
    return {name: Predictor.load(folder / name, device="cpu", engine="reference") for name in CONFIGS}


@pytest.fixture(scope="session")
def engine_file(predictors, tmp_path_factory):
    return write_engine_page(tmp_path_factory.mktemp("engine"), predictors)


@pytest.fixture(scope="module")
def shared_engine(browser, engine_file):
    """The engine page on file://, and the problems it reported: script errors, and requests beyond its own files."""
    page, problems = browser.new_page(), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    own = engine_file.parent.as_uri()
    page.on("request", lambda request: problems.append(request.url) if is_foreign(request.url, own) else None)
    page.goto(engine_file.as_uri())
    yield EnginePage(page), problems
    page.close()


def is_foreign(url: str, own: str) -> bool:
    return not url.startswith((own, "blob:", "data:"))


@pytest.fixture
def engine(shared_engine):
    page, problems = shared_engine
    yield page
    assert problems == []


def random_image(config: ViTConfig) -> torch.Tensor:
    return torch.randn(config.channels, *config.image_size, generator=torch.Generator().manual_seed(1))
