"""Images a second on this CPU: vitral against transformers, vit-pytorch and ONNX Runtime on their exports, in one run.

    python benchmarks/cpu_inference.py --init ti16.safetensors [--sizes Ti/16 S/16 B/16] [--threads 2] [--out x.json]

`--init` is a trained ViT-Ti/16 of any library. A head for CIFAR-10 is fitted on its features of 2,000 training images
at 224 px, so that predictions are real ones; S/16 and B/16 are the same function widened (copies of every channel, and
noise that the copies cancel), so that they too answer real questions with matrices of their own shape. Agreement and
accuracy are of test images. transformers is given the same weights; vit-pytorch's architecture differs, so its
weights are random. All take turns, batch by batch; a ratio is the median over the rounds of (quickest other / ours).

A busy machine: `--clock cpu --threads 1` counts the processor's time instead of the clock's.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
CLASSES = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init", required=True)
    parser.add_argument("--sizes", nargs="+", default=["Ti/16", "S/16", "B/16"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--images", type=int, default=1000, help="test images for agreement and accuracy")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--no-compiled", action="store_true", help="leave out torch.compile, which takes minutes")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(chosen.threads)
    from vitral.device.hardware import cpu_name

    print(f"{cpu_name()} · torch {torch.__version__} · {chosen.threads} threads · {chosen.clock} clock", flush=True)
    small, card, learn, images, labels = trained(chosen.init, chosen.images)
    results = {}
    for size in chosen.sizes:
        model, its_card = widened(small, card, {"Ti/16": 1, "S/16": 2, "B/16": 4}[size])
        results[size] = one_size(size, model, its_card, learn, images, labels, chosen)
    if chosen.out:
        versions = {"torch": torch.__version__, "python": platform.python_version(), "cpu": cpu_name()}
        chosen.out.write_text(json.dumps({"versions": versions, "arguments": vars(chosen), "results": results},
                                         indent=1, default=str) + "\n")  # fmt: skip


def trained(init: str, count: int) -> tuple[Any, Any, Tensor, Tensor, Tensor]:
    """A Ti/16 that knows CIFAR-10's classes, images to learn from, test images and their labels."""
    from sklearn.linear_model import LogisticRegression

    from vitral import data
    from vitral.data.preprocess import adapt
    from vitral.inference.engine import Engine
    from vitral.inference.predictor import Predictor
    from vitral.models.vit import ViT

    predictor = Predictor.load(init, device="cpu")
    preprocessing, dataset = predictor.card.preprocessing, data.load("cifar10")
    quick = Engine(predictor.model, preprocessing, "fp32")
    some = adapt(dataset.train.images[:2000], preprocessing)
    features = torch.cat([quick.features(part) for part in some.split(16)])
    fitted = LogisticRegression(max_iter=2000, C=0.1).fit(features.numpy(), dataset.train.labels[:2000].numpy())
    config = replace(predictor.card.architecture, classes=CLASSES)
    model = ViT(config)
    state = predictor.model.state_dict() | {
        "head.out.weight": torch.tensor(fitted.coef_, dtype=torch.float32),
        "head.out.bias": torch.tensor(fitted.intercept_, dtype=torch.float32),
    }
    model.load_state_dict(state)
    card = replace(predictor.card, architecture=config, classes=dataset.classes)
    test = dataset.test
    return model.eval(), card, some[:256], adapt(test.images[:count], preprocessing), test.labels[:count]


@torch.no_grad()
def widened(model: Any, card: Any, times: int) -> tuple[Any, Any]:
    """The same function with `times` as many channels and heads. Every channel is there `times` times, so columns of a
    matrix that belong to one channel may hold anything that has the right sum: noise with sum zero is added."""
    from vitral.models.vit import ViT

    old = model.config
    config = replace(old, width=old.width * times, heads=old.heads * times)
    wide, draws, state = ViT(config), torch.Generator().manual_seed(0), {}
    for name, value in model.state_dict().items():
        if name.endswith("qkv.weight") or name.endswith("qkv.bias"):
            value = torch.cat([part.repeat(times, *[1] * (part.ndim - 1)) for part in value.chunk(3)])
        elif value.ndim == 2 and not name.startswith("head"):
            value = value.repeat(times, 1)
        elif value.ndim == 3:
            value = value.repeat(1, 1, times)
        elif value.ndim == 1 and not name.startswith("head"):
            value = value.repeat(times)
        if value.ndim == 2 and not name.startswith("patch_embedding"):
            noise = torch.randn(len(value), times, value.shape[1], generator=draws) * value.std() / times
            columns = value[:, None] / times + noise - noise.mean(dim=1, keepdim=True)
            value = columns.flatten(1)
        state[name] = value
    wide.load_state_dict(state)
    return wide.eval(), replace(card, architecture=config)


def one_size(
    size: str, model: Any, card: Any, learn: Tensor, images: Tensor, labels: Tensor, chosen: argparse.Namespace
) -> dict[str, Any]:
    from vitral.inference.bench import ways_of

    ways, margins = ways_of(model, card.preprocessing, learn, None)
    others = rivals(model, card, chosen)
    clock = time.perf_counter if chosen.clock == "wall" else time.process_time
    found: dict[str, Any] = {"margins": margins, "speed": {}}
    print(f"\n{size}: {len(images)} test images", flush=True)
    said = {}
    for name, way in ways.items():
        if name.endswith("-checked"):  # its answers follow from those of its two engines
            quick, sure = said[name.removesuffix("-checked")], said.get("bf16-checked", said["fp32"])
            said[name] = torch.where(way.close(quick)[:, None], sure, quick)
        else:
            said[name] = torch.cat([way(part) for part in images.split(16)])
    theirs = torch.cat([torch.as_tensor(others["transformers"](part)) for part in images[:64].split(16)])
    print(f"  transformers has the same weights: logits within {(theirs - said['fp32'][:64]).abs().max():.1e}")
    for name, logits in said.items():
        first = logits.argmax(dim=1)
        same = float((first == said["fp32"].argmax(dim=1)).double().mean())
        right = float((first == labels).double().mean())
        again = float(ways[name].close(said[name[:4]]).double().mean()) if name.endswith("-checked") else 0.0
        found[name] = {"agreement": same, "accuracy": right, "asked_twice": again}
        print(f"  {name:<13} as fp32 {same:.2%}   accuracy {right:.2%}   asked twice {again:.1%}", flush=True)
    for batch in chosen.batches:
        times = in_turns({**others, **ways}, images, batch, chosen.rounds, clock)
        best = [min(times[name][i] for name in others) for i in range(chosen.rounds)]
        quickest = min(others, key=lambda name: statistics.median(times[name]))
        print(f"  batch {batch}, {chosen.rounds} rounds; quickest other: {quickest}")
        rows = {}
        for name, each in times.items():
            ratios = sorted(b / t for b, t in zip(best, each, strict=True))
            fixed = statistics.median(times[quickest]) / statistics.median(each)
            rows[name] = {
                "median_ms": statistics.median(each) * 1e3,
                "min_ms": min(each) * 1e3,
                "images_per_second": batch / statistics.median(each),
                "ratio": fixed,
                "ratio_of_best_in_round": statistics.median(ratios),
                "spread": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
            }
            print(
                f"    {name:<26} {statistics.median(each) * 1e3:8.1f} ms (min {min(each) * 1e3:.1f})   "
                f"{batch / statistics.median(each):7.1f} images/s   {fixed:.2f} × quickest other   "
                f"by round {statistics.median(ratios):.2f} ({ratios[len(ratios) // 4]:.2f} – "
                f"{ratios[3 * len(ratios) // 4]:.2f})",
                flush=True,
            )
        found["speed"][batch] = rows
    return found


def rivals(model: Any, card: Any, chosen: argparse.Namespace) -> dict[str, Callable[[Tensor], Any]]:
    """uint8 images → logits, by the others: normalised, as each wants it, inside their time."""
    import onnxruntime

    from support.references import transformers, vit_pytorch
    from vitral import weights

    config = card.architecture
    folder = Path(tempfile.mkdtemp())
    weights.write((model, card), folder / "transformers", to="transformers")
    hf = transformers.ViTForImageClassification.from_pretrained(folder / "transformers").eval()
    vp = vit_pytorch.ViT(
        image_size=224,
        patch_size=16,
        num_classes=CLASSES,
        dim=config.width,
        depth=config.depth,
        heads=config.heads,
        mlp_dim=config.hidden_width,
        dim_head=config.width // config.heads,
    ).eval()
    normalise = card.preprocessing.normalise

    def asked(call: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def ask(images: Tensor) -> Any:
            with torch.inference_mode():
                answer = call(normalise(images))
            return answer if isinstance(answer, Tensor) else answer[0] if isinstance(answer, list) else answer.logits

        return ask

    found = {"transformers": asked(hf), "vit-pytorch": asked(vp)}
    if not chosen.no_compiled:
        found |= {"transformers, compiled": asked(torch.compile(hf)), "vit-pytorch, compiled": asked(torch.compile(vp))}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = chosen.threads
    options.log_severity_level = 3
    for name, module in (("transformers", hf), ("vit-pytorch", vp)):
        file = folder / f"{name}.onnx"
        example = torch.zeros(2, 3, 224, 224)
        batch = {0: torch.export.Dim("batch", min=1, max=4096)}
        torch.onnx.export(
            module, (example,), str(file), dynamo=True, dynamic_shapes=(batch,), opset_version=18, verbose=False,
            external_data=False, input_names=["x"], output_names=["y"],
        )  # fmt: skip
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

        def run(x: Tensor, session: Any = session) -> Any:
            return session.run(None, {session.get_inputs()[0].name: x.numpy()})

        found[f"{name}, ONNX Runtime"] = asked(run)
    return found


def in_turns(
    contestants: dict[str, Callable[[Tensor], Any]], images: Tensor, batch: int, rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for call in contestants.values():  # warm: torch.compile, oneDNN's kernels
        for _ in range(2):
            call(images[:batch])
    for turn in range(rounds):
        some = images[turn * batch % (len(images) - batch) :][:batch]
        for name, call in contestants.items():
            start = clock()
            call(some)
            times[name].append(clock() - start)
    return times


if __name__ == "__main__":
    main()
