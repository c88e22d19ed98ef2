"""What is left of a model's speed when it is asked over HTTP, on this machine.

    python benchmarks/serve.py [--preset Ti/16 S/16] [--images FOLDER] [--clients 32] [--seconds 20] [--rounds 3]

For each model: the raw model at its best batch (uint8 images that are already decoded, in a process of its own), then
`vitral serve` in another process, asked by a third: clients that send one JPEG a request on connections that stay, each
as soon as it is answered. Raw and served take turns, `--rounds` times. The ratio is served over raw, in the same run.
Decoding, HTTP and the clients themselves need the same cores as the model; what the clients took of them is printed.
Weights are random: the arithmetic is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BATCHES = (1, 2, 4, 8, 16, 32, 64)


def make_model(folder: Path, name: str) -> None:
    import torch

    from vitral.data.preprocess import Preprocessing
    from vitral.models.presets import preset
    from vitral.models.vit import ViT
    from vitral.runs.run import ModelCard, save_model

    torch.manual_seed(0)
    config = preset(name)
    seen = Preprocessing(
        image_size=config.image_size, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3, crop=0.9, interpolation="bicubic"
    )
    classes = tuple(f"class {index}" for index in range(config.classes))
    card = ModelCard(architecture=config, preprocessing=seen, classes=classes, trained_on="nothing", epoch=1)
    save_model(folder, ViT(config), card)


def photographs(folder: Path | None, count: int = 32) -> list[bytes]:
    """JPEGs of a person's, or made: 500×375, smooth shapes and some grain, about 40 KiB each."""
    if folder is not None:
        found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))[:count]
        if not found:
            sys.exit(f"no JPEGs in {folder}")
        return [path.read_bytes() for path in found]
    import numpy as np
    from PIL import Image

    draws, files = np.random.default_rng(0), []
    for _ in range(count):
        shapes = Image.fromarray(draws.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((500, 375), 3)
        grain = np.asarray(shapes).astype(float) + draws.normal(0, 6, (375, 500, 3))
        file = io.BytesIO()
        Image.fromarray(grain.clip(0, 255).astype(np.uint8)).save(file, format="JPEG", quality=85)
        files.append(file.getvalue())
    return files


def raw(model: Path, seconds: float) -> dict[str, Any]:
    """Images a second for each batch size, the time divided among them: one batch on all cores, as PyTorch does it,
    and one on each core side by side, as the server does it."""
    import torch

    from vitral.inference.predictor import Predictor

    predictor = Predictor.load(model)
    C, (H, W) = predictor.card.preprocessing.channels, predictor.card.preprocessing.image_size
    cores = torch.get_num_threads()
    speeds: dict[str, dict[int, float]] = {"one": {}, "each": {}}
    for way, workers in (("one", 1), ("each", cores)):
        torch.set_num_threads(cores // workers)
        with ThreadPoolExecutor(workers) as threads:
            for batch in BATCHES if workers == 1 else BATCHES[2::2]:
                images = torch.randint(0, 256, (batch, C, H, W), dtype=torch.uint8)
                predictor.logits(images)
                started = time.perf_counter()
                until = started + seconds / (len(BATCHES) if workers == 1 else len(BATCHES[2::2]))

                def work(images: torch.Tensor = images, until: float = until) -> int:
                    done = 0
                    while time.perf_counter() < until:
                        done += len(predictor.logits(images))
                    return done

                done = sum(threads.map(lambda _, work=work: work(), range(workers)))
                speeds[way][batch] = done / (time.perf_counter() - started)
    return speeds


async def ask(port: int, bodies: list[bytes], clients: int, seconds: float, warm: float) -> dict[str, Any]:
    statuses: Counter[int] = Counter()
    times: list[float] = []
    started = time.perf_counter()
    counts_from, until = started + warm, started + warm + seconds

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        turn = number
        while (asked := time.perf_counter()) < until:
            body = bodies[turn % len(bodies)]
            turn += 1
            head = f"POST /v1/models/model/predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            lines = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(lines.partition(b"content-length: ")[2].split(b"\r")[0]))
            answered = time.perf_counter()
            if counts_from <= answered <= until:
                statuses[int(lines.split()[1])] += 1
                times.append(answered - asked)
        writer.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    used = resource.getrusage(resource.RUSAGE_SELF)
    times.sort()
    return {
        "requests_s": statuses[200] / seconds,
        "p50_ms": 1000 * times[len(times) // 2],
        "p99_ms": 1000 * times[int(0.99 * len(times))],
        "errors": sum(count for status, count in statuses.items() if status != 200),
        "client_cores": (used.ru_utime + used.ru_stime) / (time.perf_counter() - started),
    }


def served(model: Path, bodies: Path, clients: int, seconds: float, words: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "vitral", "serve", str(model), "--name", "model", "--port", "0", "--log", "json"]
    server = subprocess.Popen([*command, *words], stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        line = next(line for line in server.stderr if '"listening"' in line)
        port = json.loads(line)["at"].rpartition(":")[2]
        asking = [sys.executable, __file__, "--one", "ask", port, str(bodies), str(clients), str(seconds)]
        log = subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)  # it must go somewhere
        answer = subprocess.run(asking, stdout=subprocess.PIPE, text=True, check=True)
        server.send_signal(signal.SIGINT)
        server.wait(60)
        log.wait(10)
        return json.loads(answer.stdout.splitlines()[-1])
    finally:
        if server.poll() is None:
            server.kill()


def one(words: list[str]) -> None:
    """A part of the measurement, in this process."""
    if words[0] == "raw":
        print(json.dumps(raw(Path(words[1]), float(words[2]))))
        return
    import urllib.request

    port, bodies, clients, seconds = int(words[1]), Path(words[2]), int(words[3]), float(words[4])
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).close()
            break
        except OSError:
            time.sleep(0.1)
    files = [path.read_bytes() for path in sorted(bodies.iterdir())]
    print(json.dumps(asyncio.run(ask(port, files, clients, seconds, warm=3))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", nargs="+", default=["Ti/16", "S/16"])
    parser.add_argument("--images", type=Path, help="a folder with JPEGs; default: made ones")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20, help="of asking, a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", default="", help="more flags for vitral serve")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return one(arguments.one)
    results = {}
    with tempfile.TemporaryDirectory() as place:
        bodies = Path(place) / "bodies"
        bodies.mkdir()
        for index, content in enumerate(photographs(arguments.images)):
            (bodies / f"{index:03d}.jpg").write_bytes(content)
        mean = statistics.mean(path.stat().st_size for path in bodies.iterdir()) / 1024
        print(f"{platform.machine()}, {os.cpu_count()} cores, {arguments.clients} clients, JPEGs of {mean:.0f} KiB")
        for name in arguments.preset:
            model = Path(place) / name.replace("/", "-")
            make_model(model, name)
            rounds = []
            for _ in range(arguments.rounds):
                words = [sys.executable, __file__, "--one", "raw", str(model), str(arguments.seconds)]
                done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
                speeds = json.loads(done.stdout.splitlines()[-1])
                best = max(speeds["one"], key=lambda batch: speeds["one"][batch])
                one_way, each = speeds["one"][best], max(speeds["each"].values())
                found = served(model, bodies, arguments.clients, arguments.seconds, arguments.serve.split())
                rounds.append({"raw": speeds, "best": one_way, "each": each, "batch": int(best)} | found)
                print(
                    f"{name}  raw {one_way:6.1f} images/s at batch {best:>2}, {each:6.1f} with a batch on each core   "
                    f"served {found['requests_s']:6.1f}/s   "
                    f"p50 {found['p50_ms']:.0f} ms   p99 {found['p99_ms']:.0f} ms   "
                    f"errors {found['errors']}   clients used {found['client_cores']:.2f} cores",
                    flush=True,
                )
            for against, what in (("best", "the raw model's best batch"), ("each", "… with a batch on each core")):
                ratio = sum(r["requests_s"] for r in rounds) / sum(r[against] for r in rounds)
                spread = statistics.stdev(r["requests_s"] / r[against] for r in rounds) if len(rounds) > 1 else 0.0
                print(f"{name}  {ratio:.1%} of {what} (± {spread:.1%}, n = {len(rounds)})", flush=True)
            results[name] = rounds
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
