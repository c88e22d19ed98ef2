"""What the GPU benchmarks time: vitral's own training step and engine, and the same ViT in other libraries.

A case is LIBRARY:MODEL:MODE[:OPTION+OPTION]. `make_step` returns a function that runs one training step or one batch
of inference.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from vitral.data.preprocess import Preprocessing
    from vitral.device.select import Hardware
    from vitral.distributed.parallel import ParallelPlan
    from vitral.models.vit import ViTConfig
    from vitral.recipes.schema import Recipe

PEERS = ("timm", "torchvision", "transformers", "vit-pytorch")
BATCH_SIZES = {
    "train": {"Ti/16": 1024, "S/16": 512, "B/16": 256, "L/16": 128, "toy": 8},
    "infer": {"Ti/16": 1024, "S/16": 512, "B/16": 512, "L/16": 256, "toy": 8},
}
PEAK_MATMUL_SIDE = 8192
NO_GPU_NOTICE = """This benchmark needs a GPU that PyTorch can use, and none was found.
Running a toy version on the CPU, which only shows that everything runs.
"""

StepFn = Callable[[], None]
Info = dict[str, Any]  # reported with the speed of a case


@dataclass(frozen=True)
class Case:
    library: str
    model: str
    mode: str  # train, infer (a large batch), or latency-N (N images, from pixels on the GPU to logits on the CPU)
    options: str = ""  # joined by "+"

    @classmethod
    def parse(cls, text: str) -> Case:
        parts = text.split(":")
        if len(parts) not in (3, 4):
            raise SystemExit(f"{text!r} is not a case; expected LIBRARY:MODEL:MODE[:OPTIONS], such as timm:B/16:train")
        case = cls(*parts)
        if case.mode not in BATCH_SIZES and not case.mode.startswith("latency-"):
            raise SystemExit(f"{text!r}: unknown mode {case.mode!r}; expected train, infer or latency-N")
        return case

    def __str__(self) -> str:
        return ":".join(filter(None, (self.library, self.model, self.mode, self.options)))

    @property
    def task(self) -> str:
        """Cases of the same task do the same work and are compared with each other."""
        return f"{self.mode} {self.model}"

    @property
    def option_list(self) -> list[str]:
        return [option for option in self.options.split("+") if option]

    @property
    def batch_size(self) -> int:
        if self.mode.startswith("latency-"):
            return int(self.mode.removeprefix("latency-"))
        return BATCH_SIZES[self.mode][self.model]

    @property
    def is_comparable(self) -> bool:
        """Whether vitral is compared with it. Training bf16 weights loses small updates, so it is only shown."""
        return self.library != "vitral" and not (self.mode == "train" and "bf16-weights" in self.option_list)


def model_config(name: str) -> ViTConfig:
    from vitral.models.presets import preset
    from vitral.models.vit import ViTConfig

    if name == "toy":
        return ViTConfig(image_size=(32, 32), patch_size=8, width=32, depth=2, heads=2, num_classes=10)
    return preset(name)


def forward_gflop(config: ViTConfig) -> float:
    """GFLOP of one image's forward pass, counting the GEMMs and attention."""
    from vitral.analysis.cost import multiply_adds

    return 2 * multiply_adds(config) / 1e9


def error_summary(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:200]}"


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def synchronize() -> None:
    import torch

    if has_gpu():
        torch.cuda.synchronize()


def make_step(case: Case, info: Info) -> StepFn:
    """The function to time. Adds to `info` what is reported with its speed."""
    if case.library != "vitral":
        return make_peer_step(case, info)
    return make_vitral_training(case, info) if case.mode == "train" else make_vitral_inference(case, info)


class VitralTraining:
    """The optimizer step of vitral.training, set up as Trainer does."""

    def __init__(
        self,
        recipe: Recipe,
        preprocessing: Preprocessing,
        hardware: Hardware,
        total_steps: int,
        parallel: ParallelPlan | None = None,
        initial_weights: dict[str, Tensor] | None = None,
    ) -> None:
        from vitral.training.backend import make_backend
        from vitral.training.hardware import parallel_plan
        from vitral.training.state import init_state
        from vitral.training.step import StepContext, StepRunner

        parallel = parallel or parallel_plan(recipe, hardware)
        self.state = init_state(recipe, hardware, total_steps, initial_weights, parallel=parallel)
        self.backend = make_backend(
            self.state.vit,
            recipe,
            preprocessing,
            hardware,
            parallel,
            micro_batch_size=recipe.batch_size // (recipe.grad_accum * hardware.world.size),
            log=partial(print, file=sys.stderr),
        )
        self.runner = StepRunner(self.state, StepContext(recipe, self.backend), total_steps)

    def step(self, images: Tensor, labels: Tensor) -> None:
        self.runner.run(images, labels)
        self.state.step += 1


def make_vitral_training(case: Case, info: Info) -> StepFn:
    import torch

    from vitral.data.preprocess import Preprocessing
    from vitral.recipes.schema import DataConfig, OptimConfig, Recipe

    config, hardware = select_vitral_hardware(case, info)
    half = (0.5,) * 3
    recipe = Recipe(
        name="throughput",
        data=DataConfig(name="noise", mean=half, std=half),
        model=config,
        optim=OptimConfig(lr=1e-4, grad_clip=0.0),
        batch_size=case.batch_size,
    )
    preprocessing = Preprocessing(image_size=config.image_size, channels=3, mean=half, std=half)
    training = VitralTraining(recipe, preprocessing, hardware, total_steps=100_000)
    info["hardware"] = str(training.backend.hardware)
    shape = (case.batch_size, 3, *config.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=hardware.device)
    labels = torch.randint(0, config.num_classes, (case.batch_size,), device=hardware.device)
    return lambda: training.step(images, labels)


def make_vitral_inference(case: Case, info: Info) -> StepFn:
    """The CUDA engine that Predictor uses."""
    import torch

    from vitral.data.preprocess import Preprocessing
    from vitral.inference.gpu_selection import select_cuda_engine
    from vitral.models.token_merging import TokenMergingViT
    from vitral.models.vit import ViT

    config, hardware = select_vitral_hardware(case, info)
    half = (0.5,) * 3
    preprocessing = Preprocessing(image_size=config.image_size, channels=3, mean=half, std=half)
    torch.manual_seed(0)
    model: Any = ViT(config).eval()
    torch.nn.init.normal_(model.head.out.weight)  # the zero initialisation would hide errors
    if r := number_option(case, "tome-"):
        model = TokenMergingViT.from_model(model, int(r))
    shape = (case.batch_size, 3, *config.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=hardware.device)
    engine: Any
    if percent := number_option(case, "recheck-"):
        engine = make_cascade(model, preprocessing, images, percent, info)
    else:
        choice = select_cuda_engine(model, preprocessing, hardware)
        info["hardware"] = str(choice)
        engine = choice.engine
    with torch.inference_mode():
        expected = model.to(hardware.device)(preprocessing.normalise(images[:32])).cpu()
        info["relative_error"] = float((engine(images)[:32] - expected).norm() / expected.norm())
    model.cpu()

    def infer() -> None:
        engine(images)

    return infer


def number_option(case: Case, prefix: str) -> float | None:
    """The number of an option such as recheck-5 or tome-8, or None."""
    options = [option for option in case.option_list if option.startswith(prefix)]
    return float(options[0].removeprefix(prefix)) if options else None


def make_cascade(model: Any, preprocessing: Preprocessing, images: Tensor, percent: float, info: Info) -> Any:
    """The engine fp8-cascade with the margin that makes it compute this percentage of the batch twice.

    Random weights have no meaningful margins, so the percentage comes from a measurement of a trained model.
    """
    import torch

    from vitral.device.select import select_hardware
    from vitral.inference.cuda_cascade import build_fp8_cascade

    hardware = select_hardware(device="gpu", precision="fp32", compile="no")
    engine = build_fp8_cascade(model.to(hardware.device), preprocessing, hardware, margin=0.0)
    top = engine.fast(images).topk(2, dim=1).values
    gaps = (top[:, 0] - top[:, 1]).sort().values
    count = round(percent / 100 * len(gaps))
    engine.margin = float(gaps[count])
    rechecked = int(engine.is_ambiguous(engine.fast(images)).sum())
    info["hardware"] = f"fp8-cascade, {rechecked} of {len(gaps)} images computed again in fp16"
    torch.cuda.empty_cache()
    return engine


def select_vitral_hardware(case: Case, info: Info) -> tuple[ViTConfig, Hardware]:
    """Options: bf16, fp8, fp32 (precision), recheck-PERCENT, tome-R, eager, unfused, tanh (GELU), mean (pooling)."""
    from vitral.device.select import select_hardware

    config, precision, compile_option = model_config(case.model), "auto", "auto"
    for option in case.option_list:
        if option == "tanh":
            config = replace(config, activation="gelu_tanh")
        elif option == "mean":
            config = replace(config, pooling="mean")
        elif option == "eager":
            compile_option = "no"
        elif option not in ("auto", "unfused") and not option.startswith(("recheck-", "tome-")):
            precision = option
    tokens = case.batch_size * config.num_tokens if case.mode == "train" else 0
    settings: Any = {"precision": precision, "compile": compile_option, "fp8_tokens": tokens}
    hardware = select_hardware(**settings, width=config.width)
    if "unfused" in case.option_list:
        hardware = replace(hardware, use_triton=False, fp8=False, fp8_is_auto=False)
    info["hardware"] = str(hardware)
    info["reasons"] = hardware.reasons
    info["gflop"] = forward_gflop(config)
    return config, hardware


_registered_libraries: list[Any] = []  # operators are unregistered when their library is collected


def register_torchvision_ops() -> None:
    """Let torchvision be imported next to a build of torch that its binary operators do not load with.

    timm, transformers and vit-pytorch import it. The models use none of these operators.
    """
    import torch

    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _registered_libraries.append(library)


def make_peer_model(library: str, config: ViTConfig) -> Any:
    """The same Vision Transformer in another library."""
    register_torchvision_ops()
    side, D, L, h = config.image_size[0], config.width, config.depth, config.heads
    K, P, M = config.num_classes, config.patch_size, config.hidden_width
    if library == "timm":
        from timm.models.vision_transformer import VisionTransformer

        return VisionTransformer(img_size=side, patch_size=P, embed_dim=D, depth=L, num_heads=h, num_classes=K)
    if library == "torchvision":
        from torchvision.models.vision_transformer import VisionTransformer as TorchvisionViT

        return TorchvisionViT(side, P, L, h, D, M, num_classes=K)
    if library == "transformers":
        return make_transformers_model(config)
    if library == "vit-pytorch":
        from vit_pytorch import ViT

        return ViT(image_size=side, patch_size=P, num_classes=K, dim=D, depth=L, heads=h, dim_head=D // h, mlp_dim=M)
    raise ValueError(f"unknown library {library!r}; expected vitral, {', '.join(PEERS)}")


def make_transformers_model(config: ViTConfig) -> Any:
    import torch
    from transformers import ViTConfig as TransformersConfig
    from transformers import ViTForImageClassification

    make_config: Any = TransformersConfig  # its type stubs lack arguments
    transformers_config = make_config(
        image_size=config.image_size[0],
        patch_size=config.patch_size,
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        intermediate_size=config.hidden_width,
        num_labels=config.num_classes,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )

    class LogitsOnly(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = ViTForImageClassification(transformers_config)

        def forward(self, images: Tensor) -> Any:
            return self.model(pixel_values=images).logits

    return LogitsOnly()


FLOAT8_RECIPES = {"float8": "tensorwise", "float8-rowwise": "rowwise"}  # torchao's names


def to_float8(model: Any, recipe: str) -> Any:
    """The model with torchao's FP8 training in all linear layers whose sides FP8 GEMMs support: not in the head."""
    import torch
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_supported(module: torch.nn.Module, name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and not (module.in_features % 16 or module.out_features % 16)

    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(model, config=config, module_filter_fn=is_supported)


def make_peer_step(case: Case, info: Info) -> StepFn:
    """Options: eager, graphs (CUDA graphs), channels-last, autocast, bf16-weights, float8, float8-rowwise (torchao)."""
    import torch
    import torch.nn.functional as F

    device = torch.device("cuda" if has_gpu() else "cpu")
    config, options = model_config(case.model), case.option_list
    if unknown := set(options) - {"eager", "graphs", "channels-last", "autocast", "bf16-weights", *FLOAT8_RECIPES}:
        raise ValueError(f"unknown options for {case.library}: {', '.join(sorted(unknown))}")
    training = case.mode == "train"
    bf16_weights = has_gpu() and ("bf16-weights" in options or not (training or "autocast" in options))
    info["gflop"] = forward_gflop(config)
    torch.manual_seed(0)
    model = make_peer_model(case.library, config).to(device)
    images = torch.randn(case.batch_size, 3, *config.image_size, device=device)
    labels = torch.randint(0, config.num_classes, (case.batch_size,), device=device)
    if bf16_weights:
        model, images = model.bfloat16(), images.bfloat16()
    if "channels-last" in options:
        model = model.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    for option in FLOAT8_RECIPES.keys() & options:
        model = to_float8(model, FLOAT8_RECIPES[option])
    autocast: Any = torch.autocast(device.type, torch.bfloat16) if has_gpu() and not bf16_weights else nullcontext()
    use_compile = has_gpu() and "eager" not in options
    mode = "reduce-overhead" if "graphs" in options else None
    precision = "bf16 weights" if bf16_weights else "autocast" if has_gpu() else "fp32"
    other_options = [option for option in options if option not in ("autocast", "bf16-weights")]
    info["hardware"] = ", ".join([precision, *(["compiled"] if use_compile else []), *other_options])

    def maybe_compile(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, mode=mode) if use_compile else function

    if not training:
        forward = maybe_compile(model.eval())

        def infer() -> None:
            with torch.inference_mode(), autocast:
                forward(images).float().cpu()

        return infer

    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, weight_decay=0.05, fused=True)
    compute_loss = maybe_compile(lambda images, labels: F.cross_entropy(model(images).float(), labels))

    def train_step() -> None:
        if mode:
            torch.compiler.cudagraph_mark_step_begin()
        with autocast:
            loss = compute_loss(images, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return train_step


def measure_peak() -> Info:
    """TFLOP/s of one large GEMM in bf16 and, where the GPU supports it, in FP8."""
    import torch

    if not has_gpu():
        return {}
    a, b = (torch.randn(PEAK_MATMUL_SIDE, PEAK_MATMUL_SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def bf16_matmul() -> None:
        torch.mm(a, b, out=out)

    info: Info = {"gpu": torch.cuda.get_device_name(), "bf16_tflops": matmul_tflops(bf16_matmul)}
    with suppress(Exception):
        one = torch.ones((), device="cuda")
        a_fp8, b_fp8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t().contiguous().t()

        def fp8_matmul() -> None:
            torch._scaled_mm(a_fp8, b_fp8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

        info["fp8_tflops"] = matmul_tflops(fp8_matmul)
    return info


def matmul_tflops(matmul: StepFn) -> float:
    """Median rate of 15 groups of 10 multiplications."""
    seconds = []
    for _ in range(5):
        matmul()
    for _ in range(15):
        synchronize()
        start = time.perf_counter()
        for _ in range(10):
            matmul()
        synchronize()
        seconds.append((time.perf_counter() - start) / 10)
    return 2 * PEAK_MATMUL_SIDE**3 / statistics.median(seconds) / 1e12
