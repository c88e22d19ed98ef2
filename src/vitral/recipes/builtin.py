"""Built-in recipes: one function per recipe, whose docstring states the measured accuracy and time.

Recipes from papers are in papers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from vitral.data.augment import AugmentConfig
from vitral.data.autoaugment import AutoAugmentPolicy
from vitral.errors import unknown_name_error
from vitral.models.variants.hybrid import ConvStemConfig, HybridConfig
from vitral.models.vit import ViTConfig
from vitral.recipes import papers
from vitral.recipes.schema import DataConfig, OptimConfig, Recipe
from vitral.ssl.config import PretrainConfig
from vitral.ssl.lejepa import LeJEPAConfig
from vitral.ssl.views import ViewConfig


def digits() -> Recipe:
    """scikit-learn's digits, 8x8 pixels: about a minute on two CPU cores."""
    return Recipe(
        name="digits",
        data=DataConfig(name="digits", validation=0.1),
        model=greyscale_vit(
            image_size=(8, 8), patch_size=2, width=64, depth=4, heads=4, positions="learned+rotary", qk_norm=True
        ),
        augment=AugmentConfig(shift=1, rotate=10.0, scale=0.1, border="black"),
        optim=OptimConfig(lr=6e-3, weight_decay=0.1),
        epochs=150,
        batch_size=64,
        ema=0.1,
    )


def mnist() -> Recipe:
    """MNIST, 99.4%: a few minutes on two CPU cores."""
    return Recipe(
        name="mnist",
        data=DataConfig(name="mnist", validation=1 / 12),
        model=greyscale_vit(patch_size=7, width=96, depth=4, heads=4, mlp_width=192, positions="learned+rotary"),
        augment=AugmentConfig(shift=2, rotate=10.0, scale=0.1, border="black"),
        optim=OptimConfig(name="muon", lr=5e-3, weight_decay=0.1),
        epochs=20,
        batch_size=128,
        label_smoothing=0.1,
        ema=0.05,
    )


def mnist_quick() -> Recipe:
    """MNIST, above 98%: half a minute on two CPU cores. Used by `vitral demo`."""
    return Recipe(
        name="mnist-quick",
        data=DataConfig(name="mnist", validation=1 / 12),
        model=greyscale_vit(patch_size=7, width=64, depth=3, heads=4, mlp_width=128),
        augment=AugmentConfig(shift=1, border="black"),
        optim=OptimConfig(name="muon", lr=1e-2, weight_decay=0.1, schedule="linear"),
        epochs=3,
        batch_size=128,
        ema=0.05,
    )


def fashion_mnist() -> Recipe:
    """Fashion-MNIST, 93%: minutes on a GPU, most of an hour on two CPU cores."""
    return Recipe(
        name="fashion-mnist",
        data=DataConfig(name="fashion-mnist", validation=1 / 12),
        model=greyscale_vit(
            patch_size=4, width=96, depth=4, heads=4, mlp_width=192, positions="learned+rotary", qk_norm=True
        ),
        augment=AugmentConfig(shift=1, flip=True, border="black"),
        optim=OptimConfig(name="muon", lr=4e-3, weight_decay=0.1),
        epochs=30,
        batch_size=128,
        label_smoothing=0.1,
        ema=0.05,
    )


def cifar10() -> Recipe:
    """CIFAR-10 from scratch with 4x4 patches: a minute on a large GPU. Accuracy not measured yet."""
    return Recipe(
        name="cifar10",
        data=DataConfig(name="cifar10", validation=0.1),
        model=ViTConfig(
            image_size=(32, 32),
            patch_size=4,
            num_classes=10,
            width=256,
            depth=6,
            heads=4,
            pooling="mean",
            positions="learned+rotary",
            qk_norm=True,
            activation="gelu_tanh",
            drop_path=0.1,
        ),
        init_schemes=("identity", "local_heads", "qk_similar", "whitened_patches"),
        augment=AugmentConfig(shift=2, flip=True, cutmix=1.0, mix_prob=0.5),
        optim=OptimConfig(
            name="muon", lr=5e-3, weight_decay=0.05, betas=(0.9, 0.95), grad_clip=0.0, schedule="linear", warmup=0.15
        ),
        epochs=60,
        batch_size=256,
        label_smoothing=0.1,
    )


def cifar10_94() -> Recipe:
    """CIFAR-10 speed run, 94.0%: 7.1 s on an H200. Three small convolutions, then 4 blocks."""
    base = cifar10()
    plain = {field.name: getattr(base.model, field.name) for field in fields(base.model)}
    stem = ConvStemConfig(widths=(32, 128, 256), strides=(1, 2, 2), same_padding=False)  # 49 tokens
    return replace(
        base,
        name="cifar10-94",
        data=DataConfig(name="cifar10", validation=0.0),
        model=HybridConfig(**plain | {"drop_path": 0.0, "depth": 4, "mlp_width": 768}, conv=stem),
        variant="hybrid",
        init_schemes=("identity", "local_heads", "qk_similar"),
        optim=replace(base.optim, muon_weight_decay=0.3),
        augment=replace(base.augment, mix_prob=0.4),
        epochs=20,
        tta="six",
        checkpoint_epochs=0,
    )


def cifar10_95() -> Recipe:
    """CIFAR-10 speed run, 95.0%: 14.9 s on an H200. cifar10-94 with more epochs and a fifth block."""
    base = cifar10_94()
    return replace(
        base,
        name="cifar10-95",
        model=replace(base.model, depth=5, drop_path=0.1),
        optim=replace(base.optim, muon_weight_decay=0.1),
        augment=replace(base.augment, mix_prob=0.5),
        epochs=35,
    )


def cifar10_96() -> Recipe:
    """CIFAR-10 speed run, 96.05%: 39.8 s on an H200. cifar10-95 with more epochs and a sixth block."""
    base = cifar10_95()
    return replace(
        base,
        name="cifar10-96",
        model=replace(base.model, depth=6),
        augment=replace(base.augment, shift=3),
        epochs=84,
        tta="ten",
    )


def cifar10_97() -> Recipe:
    """CIFAR-10, 97.2%: 4 minutes on an H200. cifar10-96 with more epochs, more width and RandAugment."""
    base = cifar10_96()
    policy = AutoAugmentPolicy(name="randaugment", num_ops=1, magnitude=6.0, increasing=True, probability=0.6)
    return replace(
        base,
        name="cifar10-97",
        model=replace(base.model, width=384, heads=6, mlp_width=1152, drop_path=0.2),
        augment=replace(base.augment, shift=4, mix_prob=0.6, policy=policy),
        epochs=333,
    )


def cifar10_patch() -> Recipe:
    """CIFAR-10 speed run without convolutions, 94.4%: 14.2 s on an H200. 4x4 patches, 6 blocks."""
    fast = cifar10_94()
    return replace(
        fast,
        name="cifar10-patch",
        model=replace(cifar10().model, drop_path=0.0),
        variant="plain",
        init_schemes=cifar10().init_schemes,
        epochs=28,
    )


def mnist_99_5() -> Recipe:
    """MNIST speed run, 99.56%: 1.5 s on an H200."""
    fast = cifar10_patch()
    return replace(
        fast,
        name="mnist-99.5",
        data=DataConfig(name="mnist", validation=0.0),
        model=replace(fast.model, image_size=(28, 28), channels=1, width=128, depth=4),
        augment=AugmentConfig(shift=2, rotate=10.0, scale=0.1, border="black"),
        epochs=6,
        tta="three",
    )


def fashion_mnist_94() -> Recipe:
    """Fashion-MNIST speed run, 94.2%: 3.9 s on an H200."""
    fast = cifar10_94()
    return replace(
        fast,
        name="fashion-mnist-94",
        data=DataConfig(name="fashion-mnist", validation=0.0),
        model=replace(fast.model, image_size=(28, 28), channels=1),
        augment=replace(fast.augment, border="black"),
        epochs=10,
    )


def cifar100() -> Recipe:
    """CIFAR-100 from scratch, like cifar10, for a GPU. Accuracy not measured yet."""
    base = cifar10()
    return replace(
        base,
        name="cifar100",
        data=DataConfig(name="cifar100", validation=0.1),
        model=replace(base.model, num_classes=100),
    )


def folder_finetune() -> Recipe:
    """Fine-tune a checkpoint on images in class folders: minutes on two CPU cores for a few hundred."""
    return Recipe(
        name="folder-finetune",
        data=DataConfig(name="photos", validation=0.15),
        model=ViTConfig(drop_path=0.05),  # the architecture becomes the checkpoint's
        augment=AugmentConfig(crop=0.4, flip=True),
        optim=OptimConfig(lr=5e-4, weight_decay=0.05, layer_decay=0.75),
        epochs=10,
        batch_size=32,
        head_init="least_squares",
        label_smoothing=0.1,
        ema=0.1,
    )


def folder_scratch() -> Recipe:
    """Train from scratch on images in class folders. Needs thousands; with fewer, use --init-from."""
    return Recipe(
        name="folder-scratch",
        data=DataConfig(name="photos", validation=0.15, crop=0.9),
        model=ViTConfig(
            image_size=(128, 128), patch_size=16, width=192, depth=6, heads=3, positions="learned+rotary", qk_norm=True
        ),
        augment=AugmentConfig(crop=0.35, flip=True, cutmix=1.0),
        optim=OptimConfig(name="muon", lr=3e-3, weight_decay=0.1),
        epochs=60,
        batch_size=64,
        label_smoothing=0.1,
        ema=0.05,
    )


def pretrain() -> Recipe:
    """Learn from unlabelled photographs, from scratch. Needs tens of thousands; with fewer, --init-from."""
    scratch = folder_scratch()
    return Recipe(
        name="pretrain",
        data=DataConfig(name="photos", validation=0.0, crop=0.9),
        model=replace(scratch.model, num_classes=1, pooling="mean"),
        pretrain=PretrainConfig(views=ViewConfig(local_views=4)),
        optim=OptimConfig(name="muon", lr=2e-3, weight_decay=0.05, muon_weight_decay=0.1, betas=(0.9, 0.95)),
        epochs=100,
        batch_size=256,
        checkpoint_epochs=5,
    )


def pretrain_continue() -> Recipe:
    """Continue the pretraining of a checkpoint on your photographs: minutes on a GPU for a thousand."""
    return Recipe(
        name="pretrain-continue",
        data=DataConfig(name="photos", validation=0.0),
        model=ViTConfig(num_classes=1),  # the architecture becomes the checkpoint's
        pretrain=PretrainConfig(views=ViewConfig(local_views=4)),
        optim=OptimConfig(lr=1e-4, weight_decay=0.05, layer_decay=0.75),
        epochs=20,
        batch_size=64,
        checkpoint_epochs=5,
    )


def pretrain_small() -> Recipe:
    """Learn from unlabelled images of 28 to 32 pixels. CIFAR-10, linear probe: 88.1%, 95 s on an H200."""
    base = cifar10_96()
    small_views = ViewConfig(
        local_views=2, local_size=0.5, global_min_area=0.2, local_min_area=0.05, local_max_area=0.4,
        blur_first=0.0, blur_second=0.0, blur_local=0.0,
    )  # fmt: skip
    return Recipe(
        name="pretrain-small",
        data=DataConfig(name="cifar10", validation=0.0),
        model=replace(base.model, num_classes=1, drop_path=0.0),
        variant="hybrid",
        init_schemes=base.init_schemes,
        pretrain=PretrainConfig(views=small_views, lejepa=LeJEPAConfig(weight=0.01)),
        optim=replace(base.optim, lr=1.4e-3, weight_decay=0.05, muon_weight_decay=0.1, schedule="cosine", warmup=0.1),
        epochs=77,
        batch_size=256,
        checkpoint_epochs=10,
    )


def distill() -> Recipe:
    """Learn the features of a teacher from unlabelled photographs: minutes on a GPU for a few hundred."""
    return Recipe(
        name="distill",
        data=DataConfig(name="photos", validation=0.0),
        model=ViTConfig(patch_size=16, width=192, depth=6, heads=3, num_classes=1),
        pretrain=PretrainConfig(method="distill", views=distillation_views()),
        optim=OptimConfig(name="muon", lr=3e-3, weight_decay=0.05, betas=(0.9, 0.95)),
        epochs=100,
        batch_size=64,
        checkpoint_epochs=10,
    )


def distill_small() -> Recipe:
    """Learn the features of a teacher from unlabelled images of 28 to 32 pixels, such as CIFAR-10."""
    base = pretrain_small()
    return replace(
        base,
        name="distill-small",
        pretrain=PretrainConfig(method="distill", views=replace(distillation_views(), global_min_area=0.5)),
        epochs=50,
    )


def distillation_views() -> ViewConfig:
    """One view per image with mild colour jitter: crops matter most (arXiv 2106.05237, section 3)."""
    return ViewConfig(
        global_views=1, local_views=0, global_min_area=0.2, jitter_prob=0.5, hue=0.05, grayscale=0.0,
        blur_first=0.0, blur_second=0.0, blur_local=0.0, solarize_second=0.0,
    )  # fmt: skip


def greyscale_vit(**overrides: Any) -> ViTConfig:
    """A ViT for 28x28 greyscale images of ten classes, with overrides."""
    defaults: dict[str, Any] = {"image_size": (28, 28), "channels": 1, "num_classes": 10}
    return ViTConfig(**defaults | overrides)


GROUPS: dict[str, dict[str, Callable[[], Recipe]]] = {
    "Built-in datasets": {
        "digits": digits,
        "mnist": mnist,
        "mnist-quick": mnist_quick,
        "fashion-mnist": fashion_mnist,
        "cifar10": cifar10,
        "cifar100": cifar100,
    },
    "Speed runs": {
        "cifar10-94": cifar10_94,
        "cifar10-95": cifar10_95,
        "cifar10-96": cifar10_96,
        "cifar10-97": cifar10_97,
        "cifar10-patch": cifar10_patch,
        "mnist-99.5": mnist_99_5,
        "fashion-mnist-94": fashion_mnist_94,
    },
    "Your own images": {
        "folder-finetune": folder_finetune,
        "folder-scratch": folder_scratch,
    },
    "Unlabelled images": {
        "pretrain": pretrain,
        "pretrain-continue": pretrain_continue,
        "pretrain-small": pretrain_small,
        "distill": distill,
        "distill-small": distill_small,
    },
    "Papers": {
        "vit-in1k": papers.vit_in1k,
        "vit-in21k": papers.vit_in21k,
        "vit-finetune": papers.vit_finetune,
        "deit": papers.deit,
        "deit-384": papers.deit_384,
        "plain-s16": papers.plain_s16,
        "augreg-in1k": papers.augreg_in1k,
    },
}
RECIPES = {name: make for group in GROUPS.values() for name, make in group.items()}


def get_recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise unknown_name_error("recipe", name, RECIPES)
    return RECIPES[name]()
