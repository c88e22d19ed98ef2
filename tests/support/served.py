"""A tiny model, test images, and a real `vitral serve` process."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch
from PIL import Image

from support.processes import Process
from vitral.data.preprocess import Preprocessing
from vitral.models.calibration import Calibration
from vitral.models.conformal import ConformalIntervals, ConformalSets
from vitral.models.target_scaling import TargetScaling
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.model_io import ModelConfig, load_model, save_model


def tiny_model(
    folder: Path,
    *,
    channels: int = 3,
    size: int = 32,
    ood_threshold: float | None = None,
    prediction_sets: ConformalSets | None = None,
    mean: float = 0.5,
) -> Path:
    """Save a ViT with 4 × 4 patches, 3 blocks, 2 heads and random weights, including the classification head."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=(size, size), patch_size=size // 4, channels=channels, num_classes=4, width=32, depth=3, heads=2
    )
    model = ViT(config)
    torch.nn.init.normal_(model.get_parameter("head.out.weight"))
    model_config = ModelConfig(
        architecture=config,
        preprocessing=Preprocessing(
            image_size=(size, size), channels=channels, mean=(mean,) * channels, std=(0.25,) * channels
        ),
        classes=("ant", "bee", "<b>wasp</b>", "나비"),
        trained_on="noise",
        epoch=1,
        calibration=Calibration(temperature=1.5, ood_threshold=ood_threshold, prediction_sets=prediction_sets),
    )
    save_model(folder, model, model_config)
    return folder


def tiny_regression(folder: Path) -> Path:
    """Save a regression of age and mass with random weights, standardised targets and prediction intervals."""
    model, config = load_model(tiny_model(folder))
    torch.manual_seed(1)
    architecture = replace(config.architecture, num_classes=2)
    model = ViT(architecture)
    torch.nn.init.normal_(model.get_parameter("head.out.weight"))
    intervals = ConformalIntervals(coverage=0.9, half_widths=(6.4, 250.0), images=99)
    regression = replace(
        config,
        architecture=architecture,
        classes=("age", "mass"),
        task="regression",
        target_scaling=TargetScaling(mean=(31.0, 1000.0), std=(9.0, 300.0)),
        calibration=Calibration(prediction_intervals=intervals),
    )
    save_model(folder, model, regression)
    return folder


def tiny_multilabel(folder: Path) -> Path:
    """Save a multi-label model with random weights and thresholds that differ between the labels."""
    model, config = load_model(tiny_model(folder))
    calibration = Calibration(temperature=2.0, activation="sigmoid", thresholds=(0.5, 0.9, 0.3, 0.99))
    save_model(folder, model, replace(config, task="multilabel", calibration=calibration))
    return folder


def make_image(seed: int = 0, size: tuple[int, int] = (60, 40), format: str = "PNG") -> bytes:
    """An image file of enlarged noise, different for every seed."""
    rng = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 256, (6, 9, 3), generator=rng, dtype=torch.uint8).numpy()
    file = io.BytesIO()
    Image.fromarray(noise).resize(size).save(file, format=format)
    return file.getvalue()


class Server:
    """A `vitral serve` process on a free port, ready to serve."""

    def __init__(self, *arguments: object) -> None:
        read_end, write_end = os.pipe()
        self.process = Process("serve", *arguments, "--port", 0, "--log", "json", stderr=write_end)
        os.close(write_end)
        self.stderr = os.fdopen(read_end, encoding="utf-8")
        self.lines: list[str] = []
        self.listening = threading.Event()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        assert self.listening.wait(240), "".join(self.lines)
        assert self.log_entries("listening"), "".join(self.lines)
        self.url: str = self.log_entries("listening")[0]["url"]
        self.port = int(self.url.rpartition(":")[2])
        deadline = time.monotonic() + 240
        while httpx.get(f"{self.url}/readyz", timeout=30).status_code != 200:
            assert time.monotonic() < deadline, "".join(self.lines)
            time.sleep(0.05)

    def _read(self) -> None:
        for line in self.stderr:
            self.lines.append(line)
            if '"listening"' in line:
                self.listening.set()
        self.listening.set()

    def log_entries(self, event: str) -> list[dict[str, Any]]:
        entries = [json.loads(line) for line in self.lines if line.startswith("{")]
        return [entry for entry in entries if entry["event"] == event]

    @property
    def memory_mib(self) -> float:
        """Resident memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float = 120) -> int:
        code = self.process.wait(seconds)
        self.reader.join(60)
        return code


@contextmanager
def server(*arguments: object) -> Iterator[Server]:
    running = Server(*arguments)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate(60)
        running.reader.join(60)
        running.stderr.close()
