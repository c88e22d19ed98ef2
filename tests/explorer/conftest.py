"""Small models of every kind that the engine supports, on one page that is opened from file://."""

from __future__ import annotations

import pytest

from support.explorer import EnginePage, write_engine_page
from support.explorer_models import CONFIGS, random_model
from vitral.data.preprocess import Preprocessing
from vitral.inference.predictor import Predictor
from vitral.models.variants.hybrid import HybridConfig
from vitral.runs.model_io import ModelConfig, save_model


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
