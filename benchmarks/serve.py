"""Throughput and latency of `vitral serve`, compared with the model alone, on this machine.

    python benchmarks/serve.py [--preset Ti/16 S/16] [--images FOLDER] [--clients 32] [--seconds 20] [--rounds 3]

For each model: the model alone at its best batch size, on uint8 images that are already decoded, in its own process;
then `vitral serve` in a second process with load from a third. The clients send one JPEG per request over persistent
connections, each as soon as it has received the previous response. Both measurements alternate `--rounds` times; the
ratio is served over alone. Decoding, HTTP and the clients use the same cores as the model, so the CPU time of the
clients is reported too. The weights are random, which does not affect the speed.
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

from _output import add_output_arguments, write_results

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
WARM_UP_SECONDS = 3.0


def make_model(folder: Path, name: str) -> None:
    import torch

    from vitral.data.preprocess import Preprocessing
    from vitral.models.presets import preset
    from vitral.models.vit import ViT
    from vitral.runs.model_io import ModelConfig, save_model

    torch.manual_seed(0)
    config = preset(name)
    preprocessing = Preprocessing(
        image_size=config.image_size, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3, crop=0.9, interpolation="bicubic"
    )
    classes = tuple(f"class {index}" for index in range(config.num_classes))
    model_config = ModelConfig(
        architecture=config, preprocessing=preprocessing, classes=classes, trained_on="nothing", epoch=1
    )
    save_model(folder, ViT(config), model_config)


def load_photographs(folder: Path | None, count: int = 32) -> list[bytes]:
    """JPEG files of a folder, or synthetic ones: 500×375 pixels, smooth shapes with noise, about 40 KiB each."""
    if folder is not None:
        paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))[:count]
        if not paths:
            sys.exit(f"no JPEG files in {folder}")
        return [path.read_bytes() for path in paths]
    import numpy as np
    from PIL import Image

    rng, files = np.random.default_rng(0), []
    for _ in range(count):
        shapes = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((500, 375), 3)
        noisy = np.asarray(shapes).astype(float) + rng.normal(0, 6, (375, 500, 3))
        file = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, format="JPEG", quality=85)
        files.append(file.getvalue())
    return files


def measure_model(model: Path, seconds: float) -> dict[str, dict[int, float]]:
    """Images per second for each batch size.

    "all_cores": one batch on all cores, as PyTorch runs by default; "one_core": one batch per core, as the server runs.
    """
    import torch

    from vitral.inference.predictor import Predictor

    predictor = Predictor.load(model)
    shape = predictor.model_config.preprocessing.shape
    cores = torch.get_num_threads()
    speeds: dict[str, dict[int, float]] = {"all_cores": {}, "one_core": {}}
    for mode, workers, batch_sizes in (("all_cores", 1, BATCH_SIZES), ("one_core", cores, BATCH_SIZES[2::2])):
        torch.set_num_threads(cores // workers)
        with ThreadPoolExecutor(workers) as pool:
            for batch_size in batch_sizes:
                images = torch.randint(0, 256, (batch_size, *shape), dtype=torch.uint8)
                predictor.logits(images)
                started = time.perf_counter()
                deadline = started + seconds / len(batch_sizes)

                def run(_: int, images: torch.Tensor = images, deadline: float = deadline) -> int:
                    count = 0
                    while time.perf_counter() < deadline:
                        count += len(predictor.logits(images))
                    return count

                count = sum(pool.map(run, range(workers)))
                speeds[mode][batch_size] = count / (time.perf_counter() - started)
    return speeds


async def generate_load(port: int, bodies: list[bytes], clients: int, seconds: float) -> dict[str, Any]:
    statuses: Counter[int] = Counter()
    latencies: list[float] = []
    started = time.perf_counter()
    measure_from, deadline = started + WARM_UP_SECONDS, started + WARM_UP_SECONDS + seconds

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        index = number
        while (sent := time.perf_counter()) < deadline:
            body = bodies[index % len(bodies)]
            index += 1
            head = f"POST /v1/models/model/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            headers = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(headers.partition(b"content-length: ")[2].split(b"\r")[0]))
            received = time.perf_counter()
            if measure_from <= received <= deadline:
                statuses[int(headers.split()[1])] += 1
                latencies.append(received - sent)
        writer.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    latencies.sort()
    return {
        "requests_per_second": statuses[200] / seconds,
        "p50_ms": 1000 * latencies[len(latencies) // 2],
        "p99_ms": 1000 * latencies[int(0.99 * len(latencies))],
        "errors": sum(count for status, count in statuses.items() if status != 200),
        "client_cores": (usage.ru_utime + usage.ru_stime) / (time.perf_counter() - started),
    }


def measure_server(model: Path, bodies: Path, clients: int, seconds: float, flags: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "vitral", "serve", str(model), "--name", "model", "--port", "0", "--log", "json"]
    server = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        line = next(line for line in server.stderr if '"listening"' in line)
        port = json.loads(line)["url"].rpartition(":")[2]
        load_command = [sys.executable, __file__, "--worker", "load", port, str(bodies), str(clients), str(seconds)]
        log_reader = subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)  # keeps the pipe empty
        load = subprocess.run(load_command, stdout=subprocess.PIPE, text=True, check=True)
        server.send_signal(signal.SIGINT)
        server.wait(60)
        log_reader.wait(10)
        result: dict[str, Any] = json.loads(load.stdout.splitlines()[-1])
        return result
    finally:
        if server.poll() is None:
            server.kill()


def run_worker(arguments: list[str]) -> None:
    """One measurement, in this process."""
    if arguments[0] == "model":
        print(json.dumps(measure_model(Path(arguments[1]), float(arguments[2]))))
        return
    import urllib.request

    port, bodies, clients, seconds = int(arguments[1]), Path(arguments[2]), int(arguments[3]), float(arguments[4])
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).close()
            break
        except OSError:
            time.sleep(0.1)
    files = [path.read_bytes() for path in sorted(bodies.iterdir())]
    print(json.dumps(asyncio.run(generate_load(port, files, clients, seconds))))


def measure_round(preset: str, model: Path, bodies: Path, args: argparse.Namespace) -> dict[str, Any]:
    worker = [sys.executable, __file__, "--worker", "model", str(model), str(args.seconds)]
    output = subprocess.run(worker, stdout=subprocess.PIPE, text=True, check=True).stdout
    speeds = json.loads(output.splitlines()[-1])
    best_batch = max(speeds["all_cores"], key=lambda batch_size: speeds["all_cores"][batch_size])
    row = {
        "preset": preset,
        "batch_size": int(best_batch),
        "all_cores_images_per_second": speeds["all_cores"][best_batch],
        "one_core_images_per_second": max(speeds["one_core"].values()),
        **measure_server(model, bodies, args.clients, args.seconds, args.serve.split()),
    }
    print(
        f"{preset}  alone {row['all_cores_images_per_second']:6.1f} images/s at batch size {best_batch:>2}, "
        f"{row['one_core_images_per_second']:6.1f} with one batch per core   "
        f"served {row['requests_per_second']:6.1f}/s   p50 {row['p50_ms']:.0f} ms   p99 {row['p99_ms']:.0f} ms   "
        f"errors {row['errors']}   clients used {row['client_cores']:.2f} cores",
        flush=True,
    )
    return row


def print_ratios(preset: str, rounds: list[dict[str, Any]]) -> None:
    for key, name in (("all_cores", "one batch on all cores"), ("one_core", "one batch per core")):
        ratios = [row["requests_per_second"] / row[f"{key}_images_per_second"] for row in rounds]
        served, alone = (
            sum(row[column] for row in rounds) for column in ("requests_per_second", f"{key}_images_per_second")
        )
        spread = statistics.stdev(ratios) if len(ratios) > 1 else 0.0
        print(f"{preset}  {served / alone:.1%} of {name} (± {spread:.1%}, n = {len(rounds)})", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", nargs="+", default=["Ti/16", "S/16"])
    parser.add_argument("--images", type=Path, help="folder with JPEG files (default: synthetic images)")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20, help="duration of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", default="", help="additional flags for vitral serve")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    add_output_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.worker:
        return run_worker(args.worker)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        bodies = Path(folder) / "bodies"
        bodies.mkdir()
        for index, content in enumerate(load_photographs(args.images)):
            (bodies / f"{index:03d}.jpg").write_bytes(content)
        mean_kib = statistics.mean(path.stat().st_size for path in bodies.iterdir()) / 1024
        print(f"{platform.machine()}, {os.cpu_count()} cores, {args.clients} clients, JPEG files of {mean_kib:.0f} KiB")
        for preset in args.preset:
            model = Path(folder) / preset.replace("/", "-")
            make_model(model, preset)
            rounds = [measure_round(preset, model, bodies, args) for _ in range(args.rounds)]
            print_ratios(preset, rounds)
            rows += rounds
            write_results(args, rows, {"clients": args.clients, "jpeg_kib": mean_kib})


if __name__ == "__main__":
    main()
