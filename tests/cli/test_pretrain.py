"""`vitral pretrain` on the command line: what it prints, what other commands do with its model, and bad input."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from support.common import Command
from support.interruption import Moment, run_interrupted
from support.pretrain_runs import CENTER, METHODS, TINY_FLAGS, save_arrays, save_textures
from support.training import metrics_without_timing, run_vitral, weight_bytes
from vitral import weights
from vitral.cli import completion
from vitral.data.preprocess import Preprocessing
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.model_io import ModelConfig
from vitral.runs.run import Run

CENTER_FLAGS = ("--method", "dino", "--dino.balance", CENTER["pretrain.dino.balance"])


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_textures(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def reference_run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of DINO with a centre."""
    path = tmp_path_factory.mktemp("reference") / "run"
    run_vitral("pretrain", photos, *TINY_FLAGS, *CENTER_FLAGS, "--labels", photos, "--out", path)
    return Run.open(path)


def refuse(command: Command, *words: object) -> tuple[str, str]:
    """The two lines of an error."""
    code, _, err = command(*words)
    assert code == 2, err
    assert "Traceback" not in err
    what, hint = err.splitlines()
    assert what.startswith("error: ")
    assert hint.startswith("       ")
    return what, hint


@pytest.mark.parametrize("method", [METHODS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in METHODS[1:])])
def test_the_screen_of_a_run(command: Command, photos: Path, tmp_path: Path, method: str) -> None:
    out = tmp_path / "run"
    code, text, err = command(
        "pretrain", photos, *TINY_FLAGS, "--method", method, "--labels", photos, "--out", out, "--epochs", 1
    )
    assert (code, err) == (0, "")
    assert f"Images    {photos}: 24 images without labels" in text
    assert f"Labels    {photos}: 24 images of 4 classes, for k-NN only" in text
    assert "Epoch   Train loss   Eff. rank   k-NN acc.    Images/s   Remaining" in text
    assert f"Model             {out / 'model'}  (without a classifier)" in text
    steps = [line for line in text.splitlines() if line.startswith("  vitral ")]
    assert [line.split()[1] for line in steps] == ["probe", "train", "embed"]
    assert (
        len({line.index(purpose) for line, purpose in zip(steps, ("measure", "fine-tune", "write"), strict=True)}) == 1
    )


def test_the_recipe_of_a_run_repeats_it(reference_run: Run, tmp_path: Path) -> None:
    run_vitral("pretrain", "--recipe", reference_run.recipe_file, "--out", tmp_path / "run")
    assert weight_bytes(tmp_path / "run") == weight_bytes(reference_run.path)
    assert metrics_without_timing(Run(tmp_path / "run")) == metrics_without_timing(reference_run)


# Interrupted by the system


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        (Moment("before", "step-000000001.pt"), signal.SIGKILL),
        (Moment("after", "step-000000002.pt"), signal.SIGTERM),
        (Moment("after", "step-000000005.pt"), signal.SIGKILL),
        (Moment("after", "step-000000005.pt"), signal.SIGINT),
    ],
)
def test_resume_is_bit_exact_after_a_signal(
    photos: Path, tmp_path: Path, reference_run: Run, moment: Moment, number: signal.Signals
) -> None:
    """While a checkpoint is written, in the middle of the first epoch and of the second."""
    path = tmp_path / "run"
    words = ("pretrain", photos, *TINY_FLAGS, *CENTER_FLAGS, "--labels", photos, "--out", path)
    stderr = run_interrupted(moment, *words, number=number)
    if number != signal.SIGKILL:
        assert stderr.splitlines()[1].strip() == f"Resume it with: vitral pretrain --resume {path}"
    run_vitral("pretrain", "--resume", path)
    assert weight_bytes(path) == weight_bytes(reference_run.path)
    assert metrics_without_timing(Run(path)) == metrics_without_timing(reference_run)


# What other commands do with the model


@pytest.mark.parametrize(
    "words", ["predict {run} {image}", "evaluate {run}", "report {run}", "compare {run} {run}", "bench {run}",
    "walk {image} --model {run}", "export {run}", "serve {run} --port 0"],
)  # fmt: skip
def test_commands_that_need_predictions_refuse_it(
    command: Command, reference_run: Run, photos: Path, words: str
) -> None:
    image = next(photos.rglob("*.png"))
    what, hint = refuse(command, *words.format(run=reference_run, image=image).split())
    assert what == f"error: {reference_run} has no classification head"
    assert f"vitral train DATA --init-from {reference_run}" in hint
    assert f"vitral embed {reference_run} FILES..." in hint


@pytest.mark.parametrize(
    "words",
    [
        "embed {run} {image} --out {out}/features.npy",
        "explain {run} {image} --out {out}",
        "explain {run} {image} --out {out} --json --method attention",
        "summary {run}",
        pytest.param("figures {run}", marks=pytest.mark.slow),
        "convert {run} {out}/converted --to vitral",
        pytest.param("probe {photos} --init-from {run}", marks=pytest.mark.slow),
        "train {photos} --init-from {run} --epochs 1 --batch-size 8 --device cpu --out {out}/tuned",
    ],
)
@pytest.mark.usefixtures("no_figures")
def test_commands_that_need_features_take_it(
    command: Command, reference_run: Run, photos: Path, tmp_path: Path, words: str
) -> None:
    image = next(photos.rglob("*.png"))
    code, out, err = command(*words.format(run=reference_run, image=image, photos=photos, out=tmp_path).split())
    assert code == 0, err
    assert "(no head)" not in out + err
    assert "1 classes" not in out


# Runs and recipes of vitral train


def test_train_refuses_what_belongs_to_pretrain(command: Command, reference_run: Run, photos: Path) -> None:
    what, hint = refuse(command, "train", "--resume", reference_run)
    assert what == f"error: {reference_run} is a run of vitral pretrain"
    assert hint.strip() == f"Resume it with: vitral pretrain --resume {reference_run}"
    what, hint = refuse(command, "train", photos, "--recipe", reference_run.recipe_file)
    assert what == "error: the recipe pretrain learns without labels"
    assert "vitral pretrain" in hint
    what, _ = refuse(command, "train", photos, "--recipe", "pretrain-small", "--find-lr")
    assert "learns without labels" in what


def test_pretrain_refuses_what_belongs_to_train(command: Command, photos: Path, tmp_path: Path) -> None:
    what, hint = refuse(command, "pretrain", photos, "--recipe", "folder-finetune")
    assert what == "error: the recipe folder-finetune learns labels"
    assert "vitral train" in hint
    (tmp_path / "recipe.toml").write_text('name = "x"\n[data]\nname = "digits"\n[model]\nnum_classes = 10\n')
    what, hint = refuse(command, "pretrain", "--resume", tmp_path)
    assert what == f"error: {tmp_path} is a run of vitral train"
    assert hint.strip() == f"Resume it with: vitral train --resume {tmp_path}"


def test_a_run_folder_that_exists_is_resumed_with_pretrain(command: Command, reference_run: Run, photos: Path) -> None:
    _, hint = refuse(command, "pretrain", photos, "--out", reference_run)
    assert f"vitral pretrain --resume {reference_run}" in hint


def test_a_finished_run_says_what_to_do_with_it(command: Command, reference_run: Run) -> None:
    code, out, _ = command("pretrain", "--resume", reference_run)
    assert code == 0
    assert f"{reference_run} is finished; nothing was changed." in out
    assert f"vitral pretrain --recipe {reference_run}/recipe.toml --epochs 6" in out
    assert f"Continue it on other images: vitral pretrain IMAGES --init-from {reference_run}" in out


@pytest.mark.parametrize(
    "flag", [["--epochs", "9"], ["--method", "mae"], ["--labels", "digits"], ["--preset", "Ti/16"]]
)
def test_a_resumed_run_keeps_its_recipe(command: Command, reference_run: Run, flag: list[str]) -> None:
    what, hint = refuse(command, "pretrain", "--resume", reference_run, *flag)
    assert what == f"error: {flag[0]} cannot be changed when a run is resumed"
    assert f"vitral pretrain --recipe {reference_run}/recipe.toml" in hint


def test_other_images_continue_a_run_instead_of_resuming_it(command: Command, reference_run: Run) -> None:
    what, hint = refuse(command, "pretrain", "more", "my photos", "--resume", reference_run)
    assert what == "error: a resumed run keeps its images, so more cannot be used"
    assert f"vitral pretrain --resume {reference_run}; or" in hint
    assert f"in a new run: vitral pretrain more 'my photos' --init-from {reference_run}" in hint


# Bad input


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--find-lr"], "no flag '--find-lr'"),
        (["--ema", "0.1"], "no flag '--ema'"),
        (["--method", "simclr"], "expected one of lejepa, moco, dino, mae, got 'simclr'"),
        (["--heads", "3"], "--heads describes a checkpoint"),
        (["--init-from", "auto"], "--init-from auto chooses a checkpoint for labelled images"),
        (["--init-from", "missing"], "no run or model folder missing"),
        (["--init-from", "missing.safetensors"], "no checkpoint file missing.safetensors"),
        (["--judge-seeds", "3"], "--judge-seeds is an option of --judge"),
        (["--labels", "missing"], "missing"),
        (["--model.image-size", "20", "20"], "image height 20 is not divisible by the patch size 8; try 16 or 24"),
        (["--preset", "Ti/15"], "no preset named 'Ti/15'"),
        (["--views.local-size", "1.5"], "views.local_size must be above 0 and at most 1, got 1.5"),
        (["--views.global-views", "1", "--views.local-views", "0"], "views.global_views must be at least 2"),
        (["--method", "dino", "--model.image-size", "8", "8"], "masks patches, but 8x8 pixels have 1 patch"),
        (["--method", "mae", "--preset", "conv-Ti/4"], "stem would see masked patches"),
        (["--recipe", "pretrain-small", "--views.local-size", "0.1"], "local views of 4x4 pixels have no patch"),
        (["--batch-size", "32"], "has 24 images, fewer than the batch size of 32"),
    ],
)
def test_bad_flags_are_refused_before_a_run_folder_exists(
    command: Command, photos: Path, tmp_path: Path, flags: list[str], message: str
) -> None:
    tiny = () if {"--preset", "--recipe"} & {*flags} else TINY_FLAGS
    what, _ = refuse(command, "pretrain", photos, *tiny, *flags, "--out", tmp_path / "run")
    assert message in what
    assert not (tmp_path / "run").exists()


def test_bad_images_are_refused(command: Command, photos: Path, tmp_path: Path) -> None:
    assert "no images to learn from" in refuse(command, "pretrain")[0]
    assert "no folder, list or dataset named" in refuse(command, "pretrain", tmp_path / "missing")[0]
    (tmp_path / "empty").mkdir()
    assert "has no images" in refuse(command, "pretrain", tmp_path / "empty", *TINY_FLAGS)[0]
    what, _ = refuse(command, "pretrain", photos, save_arrays(tmp_path / "arrays", 5), *TINY_FLAGS)
    assert "different channels or types" in what
    damaged = shutil.copytree(photos, tmp_path / "damaged")
    for path in sorted(damaged.rglob("*.png"))[:3]:
        path.write_bytes(path.read_bytes()[:60])
    what, hint = refuse(command, "pretrain", damaged, *TINY_FLAGS)
    assert "3 of 24 images are unreadable" in what
    assert "--data.unreadable" in hint


def test_replaced_images_are_mentioned(command: Command, photos: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(photos, tmp_path / "damaged")
    path = next(damaged.rglob("*.png"))
    path.write_bytes(path.read_bytes()[:60])
    flags = ("--data.unreadable", 0.5, "--epochs", 1, "--out", tmp_path / "run")
    code, out, err = command("pretrain", damaged, *TINY_FLAGS, *flags)
    assert code == 0, err
    assert "1 unreadable train image replaced" in out


def test_small_images_are_enlarged_for_the_default_model(command: Command, tmp_path: Path) -> None:
    """Local views of 8x8 digits would not have a patch."""
    from vitral.training.pretraining.setup import check_method, resolve_pretrain_recipe

    recipe = resolve_pretrain_recipe(["digits"], None)
    assert recipe.model.image_size == (32, 32)
    check_method(recipe)


def test_mae_of_a_built_in_dataset_gets_a_model_that_it_can_train() -> None:
    from vitral.training.pretraining.setup import check_method, resolve_pretrain_recipe

    recipe = resolve_pretrain_recipe(["digits"], None, method="mae").with_overrides({"pretrain.method": "mae"})
    assert recipe.variant == "plain"
    check_method(recipe)


def test_images_that_cannot_judge_are_refused_before_the_training(
    command: Command, photos: Path, tmp_path: Path
) -> None:
    """Not after hours of it."""
    unlabelled = tmp_path / "unlabelled"
    unlabelled.mkdir()
    shutil.copy(next(photos.rglob("*.png")), unlabelled / "0.png")
    flags = ("--out", tmp_path / "run", "--judge")
    assert str(unlabelled) in refuse(command, "pretrain", photos, *TINY_FLAGS, *flags, unlabelled)[0]
    what, _ = refuse(command, "pretrain", photos, *TINY_FLAGS, *flags, photos, "--judge-seeds", 0)
    assert "must be at least 1, got 0" in what
    assert not (tmp_path / "run").exists()


def one_image_per_class(photos: Path, labelled: Path) -> Path:
    for folder in sorted(photos.iterdir())[:2]:
        (labelled / folder.name).mkdir(parents=True)
        shutil.copy(next(folder.glob("*.png")), labelled / folder.name)
    return photos


def empty_files(photos: Path, labelled: Path) -> Path:
    shutil.copytree(photos, labelled)
    for file in sorted(labelled.rglob("*.png"))[::2]:
        file.write_bytes(b"")
    return photos


def other_channels(photos: Path, labelled: Path) -> Path:
    shutil.copytree(photos, labelled)
    return save_arrays(labelled.parent / "arrays", channels=5)


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (one_image_per_class, "has no test images"),
        (empty_files, "images are unreadable, more than 1.0%"),
        (other_channels, "have 8-bit grey or RGB; the model has images with 5 channels"),
    ],
)
def test_labelled_images_are_read_before_the_training(
    command: Command, photos: Path, tmp_path: Path, save: Callable[[Path, Path], Path], message: str
) -> None:
    labelled = tmp_path / "labelled"
    unlabelled = save(photos, labelled)
    what, _ = refuse(command, "pretrain", unlabelled, *TINY_FLAGS, "--out", tmp_path / "run", "--judge", labelled)
    assert str(labelled) in what
    assert message in what
    assert not (tmp_path / "run").exists()


# Options of a run


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--time-limit", "20s"], marks=pytest.mark.slow),
        ["--batch-size", "auto", "--epochs", "1"],
        ["--grad-accum", "2", "--activation-checkpointing", "--tensorboard", "--epochs", "1"],
    ],
    ids=" ".join,
)
def test_options(command: Command, photos: Path, tmp_path: Path, flags: list[str]) -> None:
    code, out, err = command("pretrain", photos, *TINY_FLAGS, *flags, "--out", tmp_path / "run")
    assert code == 0, err
    assert Run.open(tmp_path / "run").is_finished
    if flags[0] == "--time-limit":
        assert "Time limit 20s: 3 of 3 epochs (0:0" in out
        assert "report" not in out


def test_a_timm_checkpoint_can_be_continued(command: Command, photos: Path, tmp_path: Path) -> None:
    config = ViTConfig(image_size=(32, 32), patch_size=8, num_classes=2, width=32, depth=1, heads=2)
    preprocessing = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.2,) * 3)
    model_config = ModelConfig(
        architecture=config, preprocessing=preprocessing, classes=("a", "b"), trained_on="photos", epoch=1
    )
    weights.write((ViT(config), model_config), tmp_path / "vit.safetensors", "timm")
    code, out, err = command(
        "pretrain", photos, "--init-from", tmp_path / "vit.safetensors", "--heads", 2, "--epochs", 1, "--batch-size", 8,
        "--lejepa.hidden-width", 16, "--device", "cpu", "--threads", 1, "--model.image-size", 32, 48,
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert code == 0, err
    assert "positions resampled from 4×4 to 4×6" in out
    assert "head:" not in out


# Help and lists


def test_help_is_about_images_without_labels(command: Command) -> None:
    code, out, _ = command("pretrain", "--help")
    assert code == 0
    assert "fine-tune:" not in out
    assert "training set" not in out
    for flag in (
        "--find-lr",
        "--augment.",
        "--tune",
        "--head-init",
        "--ema",
        "--patience",
        "--data.validation",
        "--model.num-classes",
    ):
        assert f"\n  {flag}" not in out
    for flag in ("--labels", "--judge", "--exclude", "--views.local-views", "--dino.balance"):
        assert flag in out


def test_help_shows_the_values_of_a_recipe(command: Command) -> None:
    code, out, _ = command("pretrain", "--recipe", "pretrain-small", "--help")
    assert code == 0
    assert "Defaults: those of the recipe pretrain-small." in out


def test_the_command_and_its_recipes_are_listed(command: Command) -> None:
    assert "pretrain IMAGES..." in command("--help")[1]
    assert "--dino.balance" in completion.completion_script("bash")
    out = command("recipes")[1]
    names = [line[2:].split("  ")[0] for line in out.splitlines() if line.startswith("  pretrain")]
    assert names == ["pretrain", "pretrain-continue", "pretrain-small"]
    assert "vitral pretrain IMAGES --recipe NAME" in out
