"""Who takes part in the benchmarks on a GPU: vitral by the product's own path, and the same ViT as others have it.

A case is WHO:SIZE:WORK[:SETTING+SETTING]. What `step_of` gives does one training step, or one batch of answers.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

PEERS = ("timm", "torchvision", "transformers", "vit-pytorch")
BATCH = {
    "train": {"Ti/16": 1024, "S/16": 512, "B/16": 256, "L/16": 128, "toy": 8},
    "infer": {"Ti/16": 1024, "S/16": 512, "B/16": 512, "L/16": 256, "toy": 8},
}
SIDE = 8192  # of the matrices that the peak is measured with
NEEDS_A_GPU = """This benchmark needs a GPU, and there is none that PyTorch can use. A toy on the CPU instead: only that
everything runs can be seen from it.
"""

Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    who: str
    size: str
    work: str
    setting: str = ""

    @classmethod
    def read(cls, name: str) -> Case:
        parts = name.split(":")
        if len(parts) not in (3, 4):
            raise SystemExit(f"{name!r} is no case: WHO:SIZE:WORK[:SETTING], such as timm:B/16:train")
        case = cls(*parts)
        if case.work not in BATCH and not case.work.startswith("ask-"):
            raise SystemExit(f"{name!r}: work is train, infer or ask-N")
        return case

    def __str__(self) -> str:
        return ":".join(filter(None, (self.who, self.size, self.work, self.setting)))

    @property
    def row(self) -> str:
        return f"{self.work} {self.size}"

    @property
    def settings(self) -> list[str]:
        return [part for part in self.setting.split("+") if part]

    @property
    def batch(self) -> int:
        return int(self.work[4:]) if self.work.startswith("ask-") else BATCH[self.work][self.size]

    @property
    def counts(self) -> bool:
        """Whether vitral is compared with it."""
        return self.who != "vitral" and not (self.work == "train" and "bf16-weights" in self.settings)


def configuration(size: str) -> Any:
    from vitral.models.presets import preset
    from vitral.models.vit import ViTConfig

    if size == "toy":
        return ViTConfig(image_size=(32, 32), patch_size=8, width=32, depth=2, heads=2, classes=10)
    return preset(size)


def arithmetic(config: Any) -> float:
    """FLOP of one image's forward pass: the products of the model, an addition and a multiplication each."""
    N, D, M = math.prod(config.grid), config.width, config.hidden_width
    T = N + config.prefix
    block = 2 * T * (4 * D * D + 2 * D * M) + 4 * T * T * D
    return float(config.depth * block + 2 * N * config.channels * config.patch_size**2 * D + 2 * D * config.classes)


def what_failed(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['?'])[0][:200]}"


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def wait() -> None:
    import torch

    if on_gpu():
        torch.cuda.synchronize()


def step_of(case: Case, info: dict[str, Any]) -> Step:
    """What is timed; `info` gets what is to be known about it."""
    if case.who != "vitral":
        return peer(case, info)
    return vitral_training(case, info) if case.work == "train" else vitral_inference(case, info)


class Training:
    """The step of vitral.training.trainer.fit, with what fit does around it each time."""

    def __init__(self, recipe: Any, seen: Any, hardware: Any, steps: int) -> None:
        from vitral.distributed.parallel import forward_of, way_of
        from vitral.training.state import begin
        from vitral.training.trainer import Task, judge_of, train_step, vary_of

        self.recipe, self.steps = recipe, steps
        self.state = state = begin(recipe, hardware, steps)
        say = partial(print, file=sys.stderr)  # figures go to stdout
        way, part = way_of(recipe, hardware), recipe.batch // recipe.accumulate
        forward, hardware = forward_of(state.model, way, hardware, recipe.recompute, say, part)
        vary, judge = vary_of(recipe, seen, hardware, say), judge_of(recipe, part, hardware, say)
        task = Task(recipe, seen, hardware, vary=vary, judge=judge)

        def step_on(images: Any, labels: Any) -> None:
            train_step(forward, state, images, labels, task)

        self.take_step = hardware.recorded(step_on, state.draws)

    def step(self, images: Any, labels: Any) -> None:
        from vitral.training.optim.build import learning_rate, set_learning_rate

        set_learning_rate(self.state.optimizers, learning_rate(self.state.step, self.steps, self.recipe.optim))
        self.state.at.fill_(self.state.step)
        self.take_step(images, labels)
        self.state.step += 1


def vitral_training(case: Case, info: dict[str, Any]) -> Step:
    import torch

    from vitral.data.preprocess import Preprocessing
    from vitral.recipes.schema import Data, Optim, Recipe

    config, hardware = vitral_choice(case, info)
    half = (0.5,) * 3
    recipe = Recipe(
        name="throughput",
        data=Data(name="noise", mean=half, std=half),
        model=config,
        optim=Optim(lr=1e-4, clip=0.0),
        batch=case.batch,
    )
    seen = Preprocessing(image_size=config.image_size, channels=3, mean=half, std=half)
    training = Training(recipe, seen, hardware, steps=100_000)
    images = torch.randint(0, 256, (case.batch, 3, *config.image_size), dtype=torch.uint8, device=hardware.device)
    labels = torch.randint(0, config.classes, (case.batch,), device=hardware.device)
    return lambda: training.step(images, labels)


def vitral_inference(case: Case, info: dict[str, Any]) -> Step:
    """What a Predictor asks on a GPU."""
    import torch

    from vitral.data.preprocess import Preprocessing
    from vitral.inference.engine_selection import choose_on_gpu
    from vitral.models.vit import ViT

    config, hardware = vitral_choice(case, info)
    half = (0.5,) * 3
    seen = Preprocessing(image_size=config.image_size, channels=3, mean=half, std=half)
    torch.manual_seed(0)
    model = ViT(config).eval()
    torch.nn.init.normal_(model.head.out.weight)  # zeros would hide how far answers are off
    choice = choose_on_gpu(model, seen, hardware)
    if choice.run is None:
        raise RuntimeError(choice.why)
    info["chosen"] = str(choice)
    ask = choice.run
    images = torch.randint(0, 256, (case.batch, 3, *config.image_size), dtype=torch.uint8, device=hardware.device)
    with torch.inference_mode():
        exact = model.to(hardware.device)(seen.normalise(images[:32])).cpu()
        info["off_fp32"] = float((ask(images)[:32] - exact).norm() / exact.norm())
    model.cpu()

    def answer() -> None:
        ask(images)

    return answer


def vitral_choice(case: Case, info: dict[str, Any]) -> tuple[Any, Any]:
    from vitral.device.hardware import choose

    config, precision, compile = configuration(case.size), "auto", "auto"
    for setting in case.settings:
        if setting == "tanh":
            config = replace(config, gelu="tanh")
        elif setting == "mean":
            config = replace(config, pooling="mean")
        elif setting == "eager":
            compile = "no"
        elif setting not in ("auto", "unfused"):
            precision = setting
    wishes: Any = {"precision": precision, "compile": compile, "scratch": case.work == "train"}
    hardware = choose(**wishes, width=config.width)
    if "unfused" in case.settings:
        hardware = replace(hardware, fused=False, fp8=False, yields=False)
    info["chosen"] = str(hardware)
    info["reasons"] = hardware.reasons
    info["gflop"] = arithmetic(config) / 1e9
    return config, hardware


def mend_torchvision() -> None:
    """Beside another build of torch than its own, its compiled operators do not load; the models need none of them."""
    import torch

    try:
        import torchvision  # noqa: F401 - timm, transformers and vit-pytorch import it too
    except ImportError:
        pass
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        MENDED.append(operators)


MENDED: list[Any] = []  # what is defined is gone when nobody holds it


def peer_model(who: str, config: Any) -> Any:
    """The same Vision Transformer, as `who` has it."""
    import torch

    mend_torchvision()
    side, D, L, h = config.image_size[0], config.width, config.depth, config.heads
    if who == "timm":
        from timm.models.vision_transformer import VisionTransformer

        return VisionTransformer(
            img_size=side, patch_size=config.patch_size, embed_dim=D, depth=L, num_heads=h, num_classes=config.classes
        )
    if who == "torchvision":
        from torchvision.models.vision_transformer import VisionTransformer as Torchvision

        return Torchvision(side, config.patch_size, L, h, D, config.hidden_width, num_classes=config.classes)
    if who == "transformers":
        from transformers import ViTConfig, ViTForImageClassification

        asked = ViTConfig(
            image_size=side,
            patch_size=config.patch_size,
            hidden_size=D,
            num_hidden_layers=L,
            num_attention_heads=h,
            intermediate_size=config.hidden_width,
            num_labels=config.classes,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="sdpa",
        )

        class Logits(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = ViTForImageClassification(asked)

            def forward(self, images: Any) -> Any:
                return self.model(pixel_values=images).logits

        return Logits()
    if who == "vit-pytorch":
        from vit_pytorch import ViT

        return ViT(
            image_size=side,
            patch_size=config.patch_size,
            num_classes=config.classes,
            dim=D,
            depth=L,
            heads=h,
            dim_head=D // h,
            mlp_dim=config.hidden_width,
        )
    raise ValueError(f"nobody here is called {who!r}: vitral, {', '.join(PEERS)}")


def peer(case: Case, info: dict[str, Any]) -> Step:
    import torch
    import torch.nn.functional as F

    device = torch.device("cuda" if on_gpu() else "cpu")
    config, settings = configuration(case.size), case.settings
    unknown = set(settings) - {"eager", "graphs", "channels-last", "autocast", "bf16-weights"}
    if unknown:
        raise ValueError(f"a peer has no setting {', '.join(sorted(unknown))}")
    training = case.work == "train"
    pure = on_gpu() and ("bf16-weights" in settings or not (training or "autocast" in settings))
    info["gflop"] = arithmetic(config) / 1e9
    torch.manual_seed(0)
    model = peer_model(case.who, config).to(device)
    images = torch.randn(case.batch, 3, *config.image_size, device=device)
    labels = torch.randint(0, config.classes, (case.batch,), device=device)
    if pure:
        model, images = model.bfloat16(), images.bfloat16()
    if "channels-last" in settings:
        model, images = (
            model.to(memory_format=torch.channels_last),
            images.contiguous(memory_format=torch.channels_last),
        )
    autocast = torch.autocast(device.type, torch.bfloat16) if on_gpu() and not pure else nullcontext()
    compiles = on_gpu() and "eager" not in settings
    mode = "reduce-overhead" if "graphs" in settings else None
    info["chosen"] = ", ".join(
        [
            "bf16 weights" if pure else "autocast" if on_gpu() else "fp32",
            *(["compiled"] if compiles else []),
            *(part for part in settings if part not in ("autocast", "bf16-weights")),
        ]
    )

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, mode=mode) if compiles else function

    if not training:
        ask = compiled(model.eval())

        def answer() -> None:
            with torch.inference_mode(), autocast:
                ask(images).float().cpu()

        return answer

    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, weight_decay=0.05, fused=True)
    loss_of = compiled(lambda images, labels: F.cross_entropy(model(images).float(), labels))

    def step() -> None:
        if mode:
            torch.compiler.cudagraph_mark_step_begin()
        with autocast:
            loss = loss_of(images, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def peak() -> dict[str, Any]:
    """TFLOP/s of one large product, in bf16 and, where there are such units, in FP8."""
    import torch

    if not on_gpu():
        return {}
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def rate(product: Step) -> float:
        seconds = []
        for _ in range(5):
            product()
        for _ in range(15):
            wait()
            began = time.perf_counter()
            for _ in range(10):
                product()
            wait()
            seconds.append((time.perf_counter() - began) / 10)
        return 2 * SIDE**3 / statistics.median(seconds) / 1e12

    into = torch.empty_like(a)

    def plain() -> None:
        torch.mm(a, b, out=into)

    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "bf16_tflops": rate(plain)}
    with suppress(Exception):
        one = torch.ones((), device="cuda")
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t().contiguous().t()

        def product() -> None:
            torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

        found["fp8_tflops"] = rate(product)
    return found
