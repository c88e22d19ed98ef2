"""What `vitral pretrain` prints before and after training."""

from __future__ import annotations

from rich.console import Console

from vitral.data.probe_set import ProbeSet
from vitral.device.select import Hardware
from vitral.distributed.parallel import ParallelPlan
from vitral.errors import shell_quote
from vitral.recipes.schema import Recipe
from vitral.reporting.terminal.training import model_line, print_lines, recipe_line, teacher_lines, vitral_command
from vitral.runs.run import Run
from vitral.training.setup import TrainingSetup
from vitral.utils.text import count_text

METHOD_TITLES = {
    "lejepa": "LeJEPA (arXiv 2511.08544)",
    "moco": "MoCo v3 (arXiv 2104.02057)",
    "dino": "DINO with masked patches (arXiv 2104.14294, 2111.07832)",
    "mae": "masked autoencoding (arXiv 2111.06377)",
    "distill": "feature distillation (arXiv 2312.06709)",
}


def print_summary(
    console: Console,
    setup: TrainingSetup,
    hardware: Hardware,
    parallel: ParallelPlan,
    run: Run,
    probe_set: ProbeSet | None,
) -> None:
    recipe, dataset = setup.recipe, setup.dataset
    details = [text for text in dataset.source.split("; ") if text and not text.startswith("from ")]
    lines = [
        f"Images    {dataset.name}: {len(dataset.train):,} images without labels",
        *(f"          {note}" for note in (*dataset.notes, *details)),
        model_line(recipe),
        *(f"          {note}" for note in setup.notes),
        f"Method    {describe_method(recipe)}",
        *teacher_lines(setup),
        recipe_line(recipe),
        f"Hardware  {hardware}",
    ]
    if probe_set is not None:
        num_images, num_classes = len(probe_set.labels), len(probe_set.classes)
        lines.append(f"Labels    {probe_set.name}: {num_images:,} images of {num_classes} classes, for k-NN only")
    if hardware.world.size > 1:
        lines.append(f"Parallel  {parallel.mode}: {parallel.reason}")
    lines.append(f"Run       {run}")
    print_lines(console, lines, indent=10)
    console.print()


def describe_method(recipe: Recipe) -> str:
    """The method and its views in one line."""
    config = recipe.pretrain
    assert config is not None
    title = METHOD_TITLES[config.method]
    if config.method == "distill" and not config.distill.augment:
        return f"{title}, central crops"
    if config.method == "mae":
        return f"{title}, {config.mae.mask_ratio:.0%} of the patches masked"
    views, (height, width) = config.views, recipe.model.image_size
    text = f"{title}, {count_text(views.global_views, 'view')} of {height}x{width}"
    if views.local_views:
        height, width = views.local_image_size(recipe.model.image_size, recipe.model.patch_size)
        text += f" and {views.local_views} of {height}x{width}"
    return f"{text} pixels per image"


def print_result(console: Console, run: Run, recipe: Recipe, probe_set: ProbeSet | None) -> None:
    metrics = run.load_metrics()[-1]
    lines = [f"\nEffective rank    {metrics['effective_rank']:.1f} of {recipe.model.width} feature dimensions"]
    if "train_cosine" in metrics:
        lines.append(f"Agreement         mean cosine similarity {metrics['train_cosine']:.3f} with the teacher")
    if probe_set is not None:
        k = probe_set.num_neighbours
        neighbours = f"{k} nearest" if k > 1 else "nearest neighbour"
        lines.append(f"k-NN accuracy     {metrics['knn_top1']:.2%}, each labelled image by its {neighbours}")
    lines += [f"Model             {run.model_dir}  (without a classifier)\n", "Next steps", *next_steps(run)]
    console.print("\n".join(lines), soft_wrap=True, markup=False)


def print_finished(console: Console, run: Run, recipe: Recipe, *, is_judged: bool) -> None:
    """What to do with a finished run instead of resuming it. is_judged: it was resumed for a comparison only."""
    if is_judged:
        console.print(f"{run} is finished", soft_wrap=True, markup=False)
        return
    has_teacher = recipe.pretrain is not None and recipe.pretrain.method == "distill"
    command = f"{vitral_command()} {'distill' if has_teacher else 'pretrain'}"
    longer = f"{command} --recipe {shell_quote(run.recipe_file)} --epochs {2 * recipe.epochs}"
    lines = [f"{run} is finished; nothing was changed.", *next_steps(run), f"Train for longer in a new run: {longer}"]
    if not has_teacher:
        lines.append(f"Continue it on other images: {command} IMAGES --init-from {shell_quote(run)}")
    console.print("\n".join(lines), soft_wrap=True, markup=False)


def next_steps(run: Run) -> list[str]:
    folder = shell_quote(run)
    steps = [
        (f"probe LABELLED --init-from {folder}", "measure the features on labelled images"),
        (f"train LABELLED --init-from {folder}", "fine-tune the model"),
        (f"embed {folder} photo.jpg --out features.npy", "write the features of images"),
    ]
    width = max(len(words) for words, _ in steps)
    return [f"  {vitral_command()} {words:<{width}}    {purpose}" for words, purpose in steps]
