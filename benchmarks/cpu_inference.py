"""CPU inference speed of vitral, OpenVINO, transformers, vit-pytorch, and ONNX Runtime with exports of the latter two.

    python benchmarks/cpu_inference.py --init-from ti16.safetensors [--sizes Ti/16 S/16 B/16] [--threads 2] [--save]

`--init-from` is a trained ViT-Ti/16 of any supported library. A CIFAR-10 head is fitted on its features of training
images at 224 px, so that the predictions are meaningful. S/16 and B/16 are the same function widened: every
channel is copied, with noise that cancels between the copies, so that GEMM shapes are those of the larger model.
Agreement and accuracy are measured on test images. transformers gets the same weights; the architecture of vit-pytorch
differs, so its weights are random. OpenVINO converts the same PyTorch model itself, with its preprocessing API for
uint8 images, in every precision that the CPU has; for int8 its weights and activations are quantized by NNCF if that is
installed. The fp32 rows of PyTorch also exist in bf16, if the CPU has it. `--both` also measures our fp32 engine on
PyTorch. Our engines are called as `predict` calls them: a batch is shared among the threads.

All implementations take turns, batch by batch. A ratio is the median time of the fastest other implementation divided
by the median time of an engine. On a busy machine, `--clock cpu --threads 1` measures processor time.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from _output import add_output_arguments, write_results
from vitral import data, weights
from vitral.data.preprocess import to_model_input
from vitral.device.cpu import cpu_has_bf16, cpu_name
from vitral.inference.bench import SETTLE_SECONDS, CpuEngines, build_engines, run_batched, shared
from vitral.inference.cascade import CascadeEngine
from vitral.inference.cpu_engine import CpuEngine
from vitral.inference.openvino_engine import openvino_core
from vitral.inference.parallel_batches import share_batch
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT
from vitral.runs.model_io import ModelConfig

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
NUM_CLASSES = 10
CALIBRATION_IMAGES = 64  # of int8, for us and for NNCF, and of the margins of the cascades
WIDTH_FACTORS = {"Ti/16": 1, "S/16": 2, "B/16": 4}
PACKAGES = ("torch", "openvino", "transformers", "vit-pytorch", "onnxruntime")
ForwardFn = Callable[[Tensor], Any]  # uint8 images to logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init-from", required=True, help="trained ViT-Ti/16")
    parser.add_argument(
        "--folder", type=Path, help="photographs to compare on, with the model's own head, not CIFAR-10"
    )
    parser.add_argument("--sizes", nargs="+", default=[*WIDTH_FACTORS], choices=[*WIDTH_FACTORS])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--images", type=int, default=1000, help="test images for agreement and accuracy")
    parser.add_argument("--train-images", type=int, default=2000, help="that the head is fitted on")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--both", action="store_true", help="also measure our fp32 engine on PyTorch")
    parser.add_argument("--openvino-only", action="store_true", help="OpenVINO as the only peer")
    parser.add_argument("--no-compile", action="store_true", help="skip torch.compile, which takes minutes")
    add_output_arguments(parser)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    print(f"{cpu_name()}, torch {torch.__version__}, {args.threads} threads, {args.clock} clock", flush=True)
    labels: Tensor | None = None
    if args.folder is not None:
        tiny, tiny_config, calibration_images, images = load_photographs(args.init_from, args.folder, args.images)
    else:
        tiny, tiny_config, calibration_images, images, labels = fit_cifar10_model(
            args.init_from, args.train_images, args.images
        )
    rows: list[dict[str, Any]] = []
    for size in args.sizes:
        model, model_config = widen(tiny, tiny_config, WIDTH_FACTORS[size])
        built = build_engines(model, model_config.preprocessing, calibration_images, None, log=print)
        peers = build_peers(model, model_config, args, calibration_images)
        print(f"\n{size}: {len(images)} test images, backends {built.backends}", flush=True)
        quality = measure_quality(built.engines, peers, images, labels)
        engines: dict[str, ForwardFn] = {f"vitral {name}": engine for name, engine in shared(built.engines).items()}
        if args.both and built.backends["fp32"] == "openvino":
            engines["vitral fp32, PyTorch"] = partial(share_batch, CpuEngine(model, model_config.preprocessing, "fp32"))
        for batch_size in args.batch_sizes:
            speed = measure_speed(engines, peers, images, batch_size, args)
            rows += [
                {"size": size, "batch_size": batch_size, "threads": args.threads, "implementation": name}
                | values
                | quality.get(name, {})
                for name, values in speed.items()
            ]
            write_results(args, rows, packages=PACKAGES)


def fit_cifar10_model(init_from: str, num_train: int, count: int) -> tuple[ViT, ModelConfig, Tensor, Tensor, Tensor]:
    """A Ti/16 with a CIFAR-10 head, its configuration, calibration images, test images and test labels."""
    from sklearn.linear_model import LogisticRegression

    predictor = Predictor.load(init_from, device="cpu")
    preprocessing, dataset = predictor.model_config.preprocessing, data.load("cifar10")
    engine = CpuEngine(predictor.model, preprocessing, "fp32")
    train_images, train_labels = (
        to_model_input(dataset.train.images[:num_train], preprocessing),
        dataset.train.labels[:num_train],
    )
    features = run_batched(engine.features, train_images)
    classifier = LogisticRegression(max_iter=2000, C=0.1).fit(features.numpy(), train_labels.numpy())
    config = replace(predictor.model_config.architecture, num_classes=NUM_CLASSES)
    model = ViT(config)
    head = {
        "head.out.weight": torch.tensor(classifier.coef_, dtype=torch.float32),
        "head.out.bias": torch.tensor(classifier.intercept_, dtype=torch.float32),
    }
    model.load_state_dict(predictor.model.state_dict() | head)
    model_config = replace(predictor.model_config, architecture=config, classes=dataset.classes)
    test_images = to_model_input(dataset.test.images[:count], preprocessing)
    return model.eval(), model_config, train_images[:CALIBRATION_IMAGES], test_images, dataset.test.labels[:count]


def load_photographs(init_from: str, folder: Path, count: int) -> tuple[ViT, ModelConfig, Tensor, Tensor]:
    """The model as it is, its configuration, calibration images (every fourth) and up to `count` others."""
    predictor = Predictor.load(init_from, device="cpu", engine="reference")
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    images = torch.stack([torch.as_tensor(predictor.decode_image(file)[1]) for file in files[: count * 4 // 3 + 1]])
    is_calibration = torch.arange(len(images)) % 4 == 0
    return predictor.model, predictor.model_config, images[is_calibration], images[~is_calibration]


@torch.no_grad()
def widen(model: ViT, model_config: ModelConfig, factor: int) -> tuple[ViT, ModelConfig]:
    """The same function with `factor` times as many channels and heads.

    Every channel exists `factor` times, so only the sum of the weight columns of its copies matters: noise with sum
    zero is added to them.
    """
    config = replace(model.config, width=model.config.width * factor, heads=model.config.heads * factor)
    wide, generator, state = ViT(config), torch.Generator().manual_seed(0), {}
    for name, value in model.state_dict().items():
        if name.endswith(("qkv.weight", "qkv.bias")):
            value = torch.cat([part.repeat(factor, *[1] * (part.ndim - 1)) for part in value.chunk(3)])
        elif value.ndim == 2 and not name.startswith("head"):
            value = value.repeat(factor, 1)
        elif value.ndim == 3:
            value = value.repeat(1, 1, factor)
        elif value.ndim == 1 and not name.startswith("head"):
            value = value.repeat(factor)
        if value.ndim == 2 and not name.startswith("patch_embedding"):
            noise = torch.randn(len(value), factor, value.shape[1], generator=generator) * value.std() / factor
            value = (value[:, None] / factor + noise - noise.mean(dim=1, keepdim=True)).flatten(1)
        state[name] = value
    wide.load_state_dict(state)
    return wide.eval(), replace(model_config, architecture=config)


def measure_quality(
    engines: CpuEngines, peers: Mapping[str, ForwardFn], images: Tensor, labels: Tensor | None
) -> dict[str, dict[str, float]]:
    """Agreement with our fp32, accuracy, and share of images that a cascade computes twice."""
    logits: dict[str, Tensor] = {}
    recheck_rate: dict[str, float] = {}
    for name, engine in engines.items():
        if isinstance(engine, CascadeEngine):  # follows from the logits of its two engines
            fast = logits["vitral " + name.removesuffix("-cascade")]
            accurate = logits.get("vitral bf16-cascade", logits["vitral fp32"])
            ambiguous = engine.is_ambiguous(fast)
            logits[f"vitral {name}"] = torch.where(ambiguous[:, None], accurate, fast)
            recheck_rate[f"vitral {name}"] = float(ambiguous.double().mean())
        else:
            logits[f"vitral {name}"] = run_batched(engine, images)
    expected = logits["vitral fp32"]
    for name, peer in peers.items():
        if name in ("OpenVINO bf16", "OpenVINO int8"):
            logits[name] = run_batched(peer, images)
        elif name in ("OpenVINO fp32", "transformers"):
            max_abs_diff = (run_batched(peer, images[:64]) - expected[:64]).abs().max()
            print(f"  {name} has the same weights: max abs diff of the logits {max_abs_diff:.1e}")
    quality = {}
    for name, values in logits.items():
        top1 = values.argmax(dim=1)
        quality[name] = {
            "agreement": float((top1 == expected.argmax(dim=1)).double().mean()),
            "accuracy": math.nan if labels is None else float((top1 == labels).double().mean()),
            "recheck_rate": recheck_rate.get(name, 0.0),
        }
        print("  {:<20} agreement {agreement:.2%}  accuracy {accuracy:.2%}  recheck rate {recheck_rate:.1%}".format(
            name, **quality[name]), flush=True)  # fmt: skip
    return quality


def measure_speed(
    engines: Mapping[str, ForwardFn],
    peers: Mapping[str, ForwardFn],
    images: Tensor,
    batch_size: int,
    args: argparse.Namespace,
) -> dict[str, dict[str, float]]:
    """Time and throughput of each implementation, and its speed relative to the fastest peer."""
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    times = time_in_turns({**peers, **engines}, images, batch_size, args.rounds, clock)
    fastest_per_round = [min(times[name][i] for name in peers) for i in range(args.rounds)]
    fastest = min(peers, key=lambda name: statistics.median(times[name]))
    print(f"  batch size {batch_size}, {args.rounds} rounds; fastest peer: {fastest}")
    speed = {}
    for name, seconds in times.items():
        median = statistics.median(seconds)
        ratios = sorted(peer / own for peer, own in zip(fastest_per_round, seconds, strict=True))
        speed[name] = {
            "median_ms": median * 1e3,
            "mean_ms": statistics.mean(seconds) * 1e3,  # includes the images that a cascade repeats
            "min_ms": min(seconds) * 1e3,
            "images_per_second": batch_size / median,
            "ratio": statistics.median(times[fastest]) / median,
            "ratio_per_round": statistics.median(ratios),
            "ratio_per_round_q1": ratios[len(ratios) // 4],
            "ratio_per_round_q3": ratios[3 * len(ratios) // 4],
        }
        print(
            "    {:<26} {median_ms:8.1f} ms (mean {mean_ms:.1f}, min {min_ms:.1f})  {images_per_second:7.1f} images/s  "
            "{ratio:.2f}x fastest peer; per round {ratio_per_round:.2f}x "
            "({ratio_per_round_q1:.2f}-{ratio_per_round_q3:.2f})".format(name, **speed[name]),
            flush=True,
        )
    return speed


def build_peers(
    model: ViT, model_config: ModelConfig, args: argparse.Namespace, calibration_images: Tensor
) -> dict[str, ForwardFn]:
    """The other libraries. Normalisation is included in their time."""
    openvino = openvino_peers(openvino_graphs(model, model_config, calibration_images), args.threads, args.batch_sizes)
    if args.openvino_only:
        return openvino
    from support.references import transformers, vit_pytorch

    config, folder = model_config.architecture, Path(tempfile.mkdtemp())
    weights.write((model, model_config), folder / "transformers", to="transformers")
    hf = transformers.ViTForImageClassification.from_pretrained(folder / "transformers").eval()
    vp = vit_pytorch.ViT(
        image_size=224,
        patch_size=16,
        num_classes=config.num_classes,
        dim=config.width,
        depth=config.depth,
        heads=config.heads,
        mlp_dim=config.hidden_width,
        dim_head=config.width // config.heads,
    ).eval()
    forwards: dict[str, ForwardFn] = {"transformers": hf, "vit-pytorch": vp}
    if cpu_has_bf16():
        forwards["transformers, bf16"] = copy.deepcopy(hf).bfloat16()
        forwards["vit-pytorch, bf16"] = copy.deepcopy(vp).bfloat16()
    if not args.no_compile:
        forwards |= {f"{name}, compiled": torch.compile(module) for name, module in forwards.items()}
    for name, module in (("transformers", hf), ("vit-pytorch", vp)):
        forwards[f"{name}, ONNX Runtime"] = onnx_forward(module, folder / f"{name}.onnx", args.threads)
    normalise = model_config.preprocessing.normalise

    def from_uint8(forward: ForwardFn, dtype: torch.dtype) -> ForwardFn:
        def run(images: Tensor) -> Any:
            with torch.inference_mode():
                output = forward(normalise(images).to(dtype))
            return output if isinstance(output, Tensor) else output.logits

        return run

    return openvino | {
        name: from_uint8(forward, torch.bfloat16 if "bf16" in name else torch.float32)
        for name, forward in forwards.items()
    }


def openvino_graphs(model: ViT, model_config: ModelConfig, calibration_images: Tensor) -> dict[str, tuple[Any, str]]:
    """OpenVINO's own conversion of the model by name, with the precision to compile it for."""
    import openvino as ov

    preprocessing = model_config.preprocessing
    (H, W), C = preprocessing.image_size, preprocessing.channels
    shape = ov.PartialShape([-1, C, H, W])
    graph = ov.convert_model(model, example_input=torch.zeros(2, C, H, W), input=[shape])
    steps = ov.preprocess.PrePostProcessor(graph)
    steps.input().tensor().set_element_type(ov.Type.u8).set_layout(ov.Layout("NCHW"))
    steps.input().model().set_layout(ov.Layout("NCHW"))
    mean, std = ([255 * value for value in values] for values in (preprocessing.mean, preprocessing.std))
    steps.input().preprocess().convert_element_type(ov.Type.f32).mean(mean).scale(std)
    graph = steps.build()
    capabilities = openvino_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    graphs = {"OpenVINO fp32": (graph, "f32")}
    if "BF16" in capabilities:
        graphs["OpenVINO bf16"] = (graph, "bf16")
    if "INT8" in capabilities and find_spec("nncf") is not None:
        import nncf

        samples = nncf.Dataset([image.numpy() for image in calibration_images.split(1)])
        quantized = nncf.quantize(graph, samples, model_type=nncf.ModelType.TRANSFORMER)
        graphs["OpenVINO int8"] = (quantized, "bf16" if "BF16" in capabilities else "f32")
    return graphs


def openvino_peers(
    graphs: Mapping[str, tuple[Any, str]], threads: int, batch_sizes: Sequence[int], per_core: bool = False
) -> dict[str, ForwardFn]:
    """OpenVINO's graphs with a fixed batch size for the timed batches. `per_core`: a share of a batch on each core."""
    core, parts = openvino_core(), threads if per_core else 1
    options = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": parts, "PERFORMANCE_HINT": "LATENCY"}

    def forward(graph: Any, precision: str) -> ForwardFn:
        @cache
        def requests(batch_size: int) -> list[Any]:
            sized = graph.clone()
            sized.reshape([batch_size, *list(graph.input().get_partial_shape())[1:]])
            compiled = core.compile_model(sized, "CPU", options | {"INFERENCE_PRECISION_HINT": precision})
            return [compiled.create_infer_request() for _ in range(parts)]

        def run(x: Tensor) -> Tensor:
            shares = x.split(-(-len(x) // parts))
            is_timed = len(x) in batch_sizes and len(x) % parts == 0
            used = requests(len(shares[0]) if is_timed else -1)[: len(shares)]
            if parts == 1:
                return torch.from_numpy(used[0].infer([x.numpy()], share_inputs=True)[0])
            for request, share in zip(used, shares, strict=True):
                request.start_async([share.numpy()], share_inputs=True)
            for request in used:
                request.wait()
            return torch.cat([torch.from_numpy(request.get_output_tensor().data) for request in used])

        return run

    suffix = ", per core" if per_core else ""
    return {name + suffix: forward(*graph) for name, graph in graphs.items()}


def onnx_forward(module: torch.nn.Module, file: Path, threads: int) -> ForwardFn:
    """Export a module and run it with ONNX Runtime."""
    import onnxruntime

    batch = {0: torch.export.Dim("batch", min=1, max=4096)}
    torch.onnx.export(
        module, (torch.zeros(2, 3, 224, 224),), str(file), dynamo=True, dynamic_shapes=(batch,), opset_version=18,
        verbose=False, external_data=False, input_names=["x"], output_names=["y"],
    )  # fmt: skip
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    input_name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {input_name: x.numpy()})[0])


def time_in_turns(
    forwards: Mapping[str, ForwardFn], images: Tensor, batch_size: int, rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds per batch of each implementation, with other images in each round."""
    times: dict[str, list[float]] = {name: [] for name in forwards}
    for forward in forwards.values():
        for _ in range(2):  # warm-up: torch.compile, oneDNN's kernels
            forward(images[:batch_size])
    for index in range(rounds):
        batch = images[index * batch_size % (len(images) - batch_size) :][:batch_size]
        for name, forward in forwards.items():
            if torch.get_num_threads() > 1:
                time.sleep(SETTLE_SECONDS)
            start = clock()
            forward(batch)
            times[name].append(clock() - start)
    return times


if __name__ == "__main__":
    main()
