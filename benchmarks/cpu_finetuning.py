"""Fine-tuning on a CPU: seconds from the command to a model with a target accuracy, vitral against a plain timm loop.

    python benchmarks/cpu_finetuning.py --data hymenoptera --weights vit_tiny_patch16_224.timm.safetensors --save
    python benchmarks/cpu_finetuning.py --data ... --weights ... --save --seeds 3 --contenders vitral "timm fp32"

Every measurement is a process of its own, started with an empty cache; its time begins before Python starts.

vitral: `vitral train DATA --init-from WEIGHTS --epochs 4`, with the other settings of its recipe. Row 0 is the model
with the head that is fitted before the first step: the run folder contains it from then on. The row "end" is the end of
the command, with evaluation, calibration, figures and report.

timm: a loop of the kind people write, at its best settings. RandomResizedCrop and flips in a DataLoader with two
persistent workers, AdamW (fused) with layer-wise decay, warm-up and cosine schedule over --epochs, label smoothing, a
new head with timm's initialisation. It writes no files and no report.

    timm bf16           bf16 autocast; explicit attention (TIMM_FUSED_ATTN=0), which is faster on a CPU with bf16
    timm bf16 default   bf16 autocast; PyTorch's fused attention, timm's default
    timm bf16 fitted    timm bf16 whose head is first fitted by ridge regression, with the penalty that vitral finds
    timm fp32

Contenders alternate. Rows are appended, and finished measurements are not repeated, so that the benchmark can be run in
pieces. The validation accuracy is that of the folder `val` of the data.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from _output import RESULTS, environment, hardware_slug, result_name, to_csv

PACKAGES = ("torch", "timm")
CONTENDERS = ("vitral", "timm bf16", "timm bf16 fitted", "timm bf16 default", "timm fp32")
PENALTY = 316.0  # of ridge regression on features with a mean square of 1
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}  # by the number of seeds
POLL_SECONDS = 0.05
Row = dict[str, Any]


def main() -> None:
    args = parse_args()
    if args.timm:
        run_timm_loop(args)
        return
    path = args.csv or RESULTS / result_name("cpu_finetuning", hardware_slug(), None, PACKAGES)
    rows = [row for row in read_rows(path) if row["other_cpus"] <= args.max_other_cpus]
    started = time.perf_counter()
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for contender in args.contenders:
            is_done = any(row["contender"] == contender and row["seed"] == seed for row in rows)
            if is_done or time.perf_counter() - started > args.max_seconds:
                continue
            measured = measure(args, contender, seed)
            rows += measured
            for row in measured:
                print(
                    f"{contender:>17}, seed {seed}, {row['epoch']:>3}: {row['top1']:.2%} after {row['seconds']:.1f} s"
                )
            if args.csv or args.save:
                path.write_text(to_csv(rows))
    print_summary(rows, args.target)
    print(json.dumps(environment(PACKAGES)))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train/CLASS and val/CLASS")
    parser.add_argument("--weights", type=Path, required=True, help="vit_tiny_patch16_224 of timm as safetensors")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS[:3]))
    parser.add_argument("--target", type=float, default=0.95, help="accuracy (default: 0.95)")
    parser.add_argument("--epochs", type=int, default=4, help="of all contenders (default: 4)")
    parser.add_argument("--lr", type=float, default=5e-4, help="of the timm loop (default: 5e-4, as vitral's recipe)")
    parser.add_argument("--skip-report", action="store_true", help="end the vitral process after its last epoch")
    parser.add_argument(
        "--max-other-cpus", type=float, default=math.inf, help="repeat a measurement if other programs used more cores"
    )
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="start no measurement after this time")
    parser.add_argument("--csv", type=Path, help="file to which rows are appended")
    parser.add_argument("--save", action="store_true", help="append to a file in benchmarks/results/")
    parser.add_argument("--timm", choices=CONTENDERS[1:], help=argparse.SUPPRESS)  # a process of the benchmark itself
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def read_rows(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    with path.open() as file:
        rows = list(csv.DictReader(file))
    numbers = ("top1", "seconds", "other_cpus")
    return [row | {"seed": int(row["seed"]), **{key: float(row[key]) for key in numbers}} for row in rows]


def measure(args: argparse.Namespace, contender: str, seed: int) -> list[Row]:
    """The rows of one process: accuracy and seconds since its start; and the CPU cores that other programs used."""
    rows, own, busy, started = [], own_cpu_seconds(), busy_cpu_seconds(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        events = (
            vitral_events(args, seed, Path(folder)) if contender == "vitral" else timm_events(args, contender, seed)
        )
        for epoch, top1, seconds in events:
            rows.append({"contender": contender, "seed": seed, "epoch": str(epoch), "top1": top1, "seconds": seconds})
    others = (busy_cpu_seconds() - busy) - (own_cpu_seconds() - own)
    return [row | {"other_cpus": max(others, 0.0) / (time.perf_counter() - started)} for row in rows]


def own_cpu_seconds() -> float:
    """CPU time of the measured processes, after they have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def busy_cpu_seconds() -> float:
    """CPU time of all programs since the machine was started; without /proc, that of the measured processes."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return own_cpu_seconds()
    user, nice, system, _, _, irq, softirq, *_ = map(int, stat.read_text().splitlines()[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def timm_events(args: argparse.Namespace, contender: str, seed: int) -> Iterator[tuple[int, float, float]]:
    command = [sys.executable, __file__, "--data", args.data, "--weights", args.weights, "--seed", seed]
    command += ["--timm", contender, "--epochs", args.epochs, "--lr", args.lr]
    fused_attention = "1" if contender in ("timm bf16 default", "timm fp32") else "0"
    started = time.perf_counter()
    with subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TIMM_FUSED_ATTN": fused_attention},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            values = json.loads(line)
            yield values["epoch"], values["top1"], time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"the timm loop failed with status {process.returncode}")


def vitral_events(args: argparse.Namespace, seed: int, folder: Path) -> Iterator[tuple[int | str, float, float]]:
    run = folder / "run"
    command = [sys.executable, "-m", "vitral", "train", args.data, "--init-from", args.weights]
    command += ["--epochs", args.epochs, "--seed", seed, "--out", run]
    started, num_rows, metrics = time.perf_counter(), 0, []
    with subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.DEVNULL,
        env=os.environ | {"VITRAL_HOME": str(folder / "home")},
    ) as process:
        while process.poll() is None:
            metrics = read_metrics(run / "metrics.jsonl")
            for row in metrics[num_rows:]:
                yield row["epoch"], row["validation_top1"], time.perf_counter() - started
            num_rows = len(metrics)
            if args.skip_report and num_rows == args.epochs + 1:
                process.send_signal(signal.SIGINT)
                process.wait()
                return
            time.sleep(POLL_SECONDS)
    if process.returncode:
        raise SystemExit(f"vitral failed with status {process.returncode}")
    assert json.loads((run / "model" / "config.json").read_text())["epoch"] in range(args.epochs + 1)
    yield "end", max(row["validation_top1"] for row in metrics), time.perf_counter() - started


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, which is replaced as a whole."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def run_timm_loop(args: argparse.Namespace) -> None:
    """Fine-tune with timm and print a JSON line per epoch."""
    import torch

    library = torch.library.Library("torchvision", "DEF")  # a torchvision for another torch imports with these
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import timm
    from safetensors.torch import load_file
    from timm.optim import param_groups_layer_decay
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms
    from torchvision.transforms import InterpolationMode

    torch.manual_seed(args.seed)
    to_tensor = [transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.5,) * 3)]
    bicubic = InterpolationMode.BICUBIC
    augment = [transforms.RandomResizedCrop(224, (0.4, 1.0), interpolation=bicubic), transforms.RandomHorizontalFlip()]
    centre = [transforms.Resize(248, interpolation=bicubic), transforms.CenterCrop(224)]
    train = datasets.ImageFolder(args.data / "train", transforms.Compose(augment + to_tensor))
    validation = datasets.ImageFolder(args.data / "val", transforms.Compose(centre + to_tensor))
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
    train_loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True, **options)
    validation_loader = DataLoader(validation, batch_size=64, **options)

    num_classes = len(train.classes)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=num_classes, drop_path_rate=0.05)
    weights = {name: tensor for name, tensor in load_file(args.weights).items() if not name.startswith("head.")}
    model.load_state_dict(weights, strict=False)
    groups = param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.75)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=True)
    total, warmup = args.epochs * len(train_loader), 0.1 * args.epochs * len(train_loader)

    def rate(scale: float, step: int) -> float:
        return scale * (
            min((step + 1) / warmup, 1.0) if step < warmup else 0.5 * (1 + math.cos(math.pi * step / total))
        )

    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        [partial(rate, group["lr_scale"]) for group in groups],
    )
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled="bf16" in args.timm)

    def report(epoch: int) -> None:
        model.eval()
        num_correct = 0
        with torch.inference_mode():
            for images, labels in validation_loader:
                with autocast():
                    num_correct += int((model(images).argmax(dim=1) == labels).sum())
        print(json.dumps({"epoch": epoch, "top1": num_correct / len(validation)}), flush=True)

    if args.timm == "timm bf16 fitted":
        plain = datasets.ImageFolder(args.data / "train", transforms.Compose(centre + to_tensor))
        model.eval()
        features, targets = [], []
        with torch.inference_mode():
            for images, labels in DataLoader(plain, batch_size=64, num_workers=2):
                with autocast():
                    features.append(model.forward_head(model.forward_features(images), pre_logits=True).double())
                targets.append(labels)
        x, y = torch.cat(features), 2 * torch.nn.functional.one_hot(torch.cat(targets), num_classes).double() - 1
        x_mean, y_mean = x.mean(dim=0), y.mean(dim=0)
        centred = x - x_mean
        penalty = PENALTY * centred.square().mean() * torch.eye(x.shape[1])
        weight = torch.linalg.solve(centred.T @ centred + penalty, centred.T @ (y - y_mean)).T
        with torch.no_grad():
            model.head.weight.copy_(weight)
            model.head.bias.copy_(y_mean - weight @ x_mean)
        report(0)

    for epoch in range(1, args.epochs + 1):
        model.train()
        for images, labels in train_loader:
            with autocast():
                loss = criterion(model(images), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
        report(epoch)


def print_summary(rows: list[Row], target: float) -> None:
    """Seconds to the target, seconds per epoch with validation, and accuracies, with 95% intervals over the seeds."""
    reached: dict[str, dict[int, float]] = {}
    for contender in dict.fromkeys(row["contender"] for row in rows):
        seconds_per_epoch, ends, missed, top1 = [], [], 0, defaultdict(list)
        reached[contender] = {}
        for seed in dict.fromkeys(row["seed"] for row in rows if row["contender"] == contender):
            own = [row for row in rows if row["contender"] == contender and row["seed"] == seed]
            epochs = [row for row in own if row["epoch"] != "end"]
            hits = [row["seconds"] for row in epochs if row["top1"] >= target]
            missed += not hits
            reached[contender][seed] = hits[0] if hits else epochs[-1]["seconds"]  # a lower bound if it is missed
            trained = [row["seconds"] for row in epochs if row["epoch"] != "0"]
            seconds_per_epoch.append((trained[-1] - trained[0]) / max(len(trained) - 1, 1))
            ends += [row["seconds"] for row in own if row["epoch"] == "end"]
            for row in epochs:
                top1[row["epoch"]].append(row["top1"])
        note = f" ({missed} runs did not reach it)" if missed else ""
        print(f"{contender}: {target:.0%} after {mean_text(list(reached[contender].values()))} s{note}; ", end="")
        print(f"{mean_text(seconds_per_epoch)} s per epoch" + (f"; end after {mean_text(ends)} s" if ends else ""))
        for epoch, values in top1.items():
            print(f"    epoch {epoch}: {statistics.mean(values):.2%} ({min(values):.2%} to {max(values):.2%})")
    for contender in reached.keys() - {"vitral"} if "vitral" in reached else ():
        seeds = reached["vitral"].keys() & reached[contender].keys()
        ratios = [reached[contender][seed] / reached["vitral"][seed] for seed in seeds]
        if ratios:
            print(f"vitral reaches it {mean_text(ratios)}x as fast as {contender}")


def mean_text(values: list[float]) -> str:
    """`12.3 ± 0.4 (n = 5)`, with a 95% interval."""
    interval = f" ± {half_interval(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{interval} (n = {len(values)})"


def half_interval(values: list[float]) -> float:
    return T_95.get(len(values), 2.0) * statistics.stdev(values) / math.sqrt(len(values))


if __name__ == "__main__":
    main()
