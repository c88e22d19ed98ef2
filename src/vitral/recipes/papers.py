"""Recipes from papers: one function per recipe, with its source and the published result.

They are written for ImageNet. `vitral train FOLDER --recipe deit` uses one for any folder, `--preset S/16` changes the
model, and `--grad-accum 8` makes a large batch fit into memory. None of them has been run to completion here; the
accuracies are the papers'.
"""

from __future__ import annotations

from dataclasses import replace

from vitral.data.augment import AugmentConfig
from vitral.data.autoaugment import AutoAugmentPolicy
from vitral.models.presets import preset
from vitral.recipes.schema import DataConfig, OptimConfig, Recipe

IMAGENET = DataConfig(
    name="imagenet",
    validation=0.01,  # as in big_vision, which trains on 99%
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),  # pixels in [-1, 1]
    crop=0.875,  # resize to 256 pixels, crop the central 224
)
INCEPTION = AugmentConfig(crop=0.05, flip=True)  # random crops of 5% to 100% of the area, mirrored

# RandAugment operations and magnitude, mixup alpha (arXiv 2106.10270, vit_i1k in big_vision).
AUGREG_LEVELS: dict[str, tuple[int, float, float]] = {
    "light1": (2, 0.0, 0.0),
    "light2": (2, 10.0, 0.2),
    "medium1": (2, 15.0, 0.2),
    "medium2": (2, 15.0, 0.5),
    "strong1": (2, 20.0, 0.5),
    "strong2": (2, 20.0, 0.8),
}
AUGREG_LEVEL_OF: dict[str, str] = {"Ti/16": "light1", "S/32": "medium1"}  # other sizes: medium2


def vit_in1k() -> Recipe:
    """ViT from scratch on ImageNet: "An Image is Worth 16x16 Words" (arXiv 2010.11929), table 3.

    Published accuracy after fine-tuning at 384 pixels (table 5): B/16 77.91%, B/32 73.38%, L/16 76.53%, L/32 71.16%.
    """
    return Recipe(
        name="vit-in1k",
        data=IMAGENET,
        model=preset("B/16", dropout=0.1, dropout_embedding=0.1, head="mlp"),
        augment=INCEPTION,
        optim=OptimConfig(lr=3e-3, weight_decay=0.3, betas=(0.9, 0.999), grad_clip=1.0, warmup=10_000.0),
        epochs=300,
        batch_size=4096,
    )


def vit_in21k() -> Recipe:
    """ViT from scratch on ImageNet-21k (arXiv 2010.11929, table 3); L/16: 30 or 90 epochs.

    Published accuracy after fine-tuning on ImageNet at 384 pixels (table 5): B/16 83.97%, B/32 81.28%, L/16 85.15%,
    L/32 80.99%, H/14 85.13%; on CIFAR-10: B/16 98.95%.
    """
    return Recipe(
        name="vit-in21k",
        data=replace(IMAGENET, name="imagenet-21k"),
        model=preset("B/16", num_classes=21_843, dropout=0.1, dropout_embedding=0.1, head="mlp"),
        augment=INCEPTION,
        optim=OptimConfig(
            lr=1e-3, weight_decay=0.03, betas=(0.9, 0.999), grad_clip=1.0, schedule="linear", warmup=10_000.0
        ),
        epochs=90,
        batch_size=4096,
    )


def vit_finetune() -> Recipe:
    """Fine-tuning of a pretrained ViT at 384 pixels (arXiv 2010.11929, table 4); needs --init-from.

    The paper tries learning rates of 0.003, 0.01, 0.03 and 0.06 for 20,000 steps (8 epochs) on ImageNet; 0.001, 0.003,
    0.01 and 0.03 on CIFAR (10,000 steps), Pets and Flowers (500). The warm-up of 500 steps is from the authors' code
    (vit_jax/configs/common.py). Published accuracy of B/16 from ImageNet-21k: ImageNet 83.97%.
    """
    return Recipe(
        name="vit-finetune",
        data=replace(IMAGENET, crop=1.0),
        model=preset("B/16", image_size=(384, 384)),
        keep_image_size=True,
        augment=INCEPTION,
        optim=OptimConfig(name="sgd", lr=0.03, momentum=0.9, weight_decay=0.0, grad_clip=1.0, warmup=500.0),
        epochs=8,
        batch_size=512,
    )


def deit() -> Recipe:
    """DeiT from scratch on ImageNet, without a teacher (arXiv 2012.12877, table 9): B/16 81.8%.

    Ti/16 72.2%, S/16 79.9%. The learning rate is 5e-4 per 512 images and scales with --batch-size. Mixup and CutMix
    parameters are drawn per image instead of per batch. The script's colour jitter of 0.3 is omitted, because timm does
    not apply it together with RandAugment. Hard distillation from a RegNetY-16GF (alpha 0.5; 74.5%, 81.2%, 83.4%) needs
    that teacher and is not part of this recipe.
    """
    return Recipe(
        name="deit",
        data=replace(IMAGENET, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), interpolation="bicubic"),
        model=preset("B/16", drop_path=0.1),
        augment=AugmentConfig(
            crop=0.08,
            flip=True,
            policy=AutoAugmentPolicy(
                name="randaugment", num_ops=2, magnitude=9.0, magnitude_std=0.5, increasing=True, probability=0.5
            ),  # timm's rand-m9-mstd0.5-inc1
            erase=0.25,
            mixup=0.8,
            cutmix=1.0,
            cutmix_prob=0.5,
            repeat=3,
        ),
        optim=OptimConfig(
            lr=5e-4, lr_base_batch_size=512, weight_decay=0.05, grad_clip=0.0, warmup=5 / 300, final_lr=1e-5 / 1e-3
        ),
        epochs=300,
        batch_size=1024,
        label_smoothing=0.1,
        ema_decay=0.99996,
    )


def deit_384() -> Recipe:
    """Fine-tuning of a DeiT at 384 pixels (arXiv 2012.12877); needs --init-from. B/16 82.9%.

    Learning rate, weight decay, epochs and batch size are from the command in their README_deit.md, as is the accuracy.
    """
    base = deit()
    return replace(
        base,
        name="deit-384",
        data=replace(base.data, crop=1.0),
        model=preset("B/16", image_size=(384, 384), drop_path=0.1),
        keep_image_size=True,
        optim=OptimConfig(
            lr=5e-6, lr_base_batch_size=512, weight_decay=1e-8, grad_clip=0.0, schedule="constant", warmup=5 / 30
        ),
        epochs=30,
        batch_size=512,
    )


def plain_s16() -> Recipe:
    """S/16 of "Better plain ViT baselines for ImageNet-1k" (arXiv 2205.01580): 76.5% after 90 epochs.

    78.5% after 150 epochs, 80.0% after 300. 90 epochs take 6 to 7 hours on a TPUv3-8. big_vision does not multiply its
    weight decay of 1e-4 by the learning rate; AdamW does, so the equivalent here is 1e-4 / 1e-3 = 0.1. Both decay only
    matrices.
    """
    return Recipe(
        name="plain-s16",
        data=IMAGENET,
        model=preset("plain-S/16"),
        augment=replace(INCEPTION, policy=AutoAugmentPolicy(name="randaugment", num_ops=2, magnitude=10.0), mixup=0.2),
        optim=OptimConfig(lr=1e-3, weight_decay=1e-4 / 1e-3, grad_clip=1.0, warmup=10_000.0),
        epochs=90,
        batch_size=1024,
    )


def augreg_in1k(size: str = "B/16", level: str | None = None) -> Recipe:
    """B/16 of "How to train your ViT?" (arXiv 2106.10270) on ImageNet: sigmoid loss, level "medium2".

    Each size has its own augmentation level (AUGREG_LEVELS): light1 for Ti/16, medium1 for S/32, medium2 for others.
    In Python, `augreg_in1k("S/32")` returns the recipe for another size. Weight decay as in plain-s16. The paper
    publishes 50,000 models and no single accuracy for this one; see its table of checkpoints.
    """
    num_ops, magnitude, mixup = AUGREG_LEVELS[level or AUGREG_LEVEL_OF.get(size, "medium2")]
    return Recipe(
        name="augreg-in1k",
        data=IMAGENET,
        model=preset(size, head="mlp"),
        augment=replace(
            INCEPTION, policy=AutoAugmentPolicy(name="randaugment", num_ops=num_ops, magnitude=magnitude), mixup=mixup
        ),
        optim=OptimConfig(lr=1e-3, weight_decay=1e-4 / 1e-3, grad_clip=1.0, warmup=10_000.0),
        loss="sigmoid",
        epochs=300,
        batch_size=4096,
    )
