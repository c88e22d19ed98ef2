"""A small model and a real server process, for the tests of the server, the page and the deployment."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
from PIL import Image

from support.processes import Process
from vitral.data.preprocess import Preprocessing
from vitral.evaluation.calibration import Calibration
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.run import ModelCard, save_model


def tiny_model(
    folder: Path, *, channels: int = 3, size: int = 32, unknown_below: float | None = None, mean: float = 0.5
) -> Path:
    """A ViT with 4 × 4 patches, 3 layers, 2 heads and random weights, a head that has opinions included."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=(size, size), patch_size=size // 4, channels=channels, classes=4, width=32, depth=3, heads=2
    )
    model = ViT(config)
    torch.nn.init.normal_(model.head.out.weight)
    card = ModelCard(
        architecture=config,
        preprocessing=Preprocessing(
            image_size=(size, size), channels=channels, mean=(mean,) * channels, std=(0.25,) * channels
        ),
        classes=("ant", "bee", "<b>wasp</b>", "나비"),
        trained_on="noise",
        epoch=1,
        calibration=Calibration(temperature=1.5, unknown_below=unknown_below),
    )
    save_model(folder, model, card)
    return folder


def picture(seed: int = 0, size: tuple[int, int] = (60, 40), format: str = "PNG") -> bytes:
    """Noise, enlarged: every seed another picture."""
    draws = torch.Generator().manual_seed(seed)
    small = torch.randint(0, 256, (6, 9, 3), generator=draws, dtype=torch.uint8).numpy()
    file = io.BytesIO()
    Image.fromarray(small).resize(size).save(file, format=format)
    return file.getvalue()


class Server:
    """A process that runs `vitral serve`, on a free port of this machine."""

    def __init__(self, *words: object) -> None:
        heard, said = os.pipe()
        self.process = Process("serve", *words, "--port", 0, "--log", "json", stderr=said)
        os.close(said)
        self.stderr = os.fdopen(heard, encoding="utf-8")
        self.lines: list[str] = []
        self.listening = threading.Event()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        assert self.listening.wait(60), "".join(self.lines)
        assert self.logged("listening"), "".join(self.lines)
        self.url: str = self.logged("listening")[0]["at"]
        self.port = int(self.url.rpartition(":")[2])
        until = time.monotonic() + 60
        while httpx.get(f"{self.url}/readyz", timeout=30).status_code != 200:
            assert time.monotonic() < until
            time.sleep(0.05)

    def _read(self) -> None:
        for line in self.stderr:
            self.lines.append(line)
            if '"listening"' in line:
                self.listening.set()
        self.listening.set()

    def logged(self, event: str) -> list[dict]:
        return [said for line in self.lines if line.startswith("{") and (said := json.loads(line))["event"] == event]

    @property
    def memory_mib(self) -> float:
        """What it has in memory now."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def ended(self, seconds: float = 30) -> int:
        code = self.process.wait(seconds)
        self.reader.join(5)
        return code


@contextmanager
def server(*words: object) -> Iterator[Server]:
    running = Server(*words)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate(10)
        running.reader.join(5)
        running.stderr.close()
