"""Ranked labels for image files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from vitral.cli.messages import opened
from vitral.cli.parsing import a_model, parse, which_images
from vitral.errors import VitralError, typed

MODELS = "a run or model folder, a checkpoint file, hf:owner/name, or an exported model.onnx"


def run(words: list[str]) -> int:
    if words and words[0].lower().endswith(".onnx"):
        from vitral.inference import onnx_runtime as runtime  # numpy, Pillow and ONNX Runtime only

        return runtime.main(words)
    from tyro.conf import FlagCreatePairsOff, Positional, arg

    @dataclass(frozen=True)
    class Predict:
        """Ranked labels for image files of any size, mode and orientation, and for the images in folders."""

        run: Annotated[Positional[str], arg(help=a_model(MODELS))]
        files: Positional[tuple[Path, ...]]
        out: Path | None = None  # answers.parquet, .csv or .jsonl, for any number of images; goes on where it stopped
        labels: Path | None = None  # class names, one a line, for a checkpoint that has none
        heads: int | None = None  # of a checkpoint whose tensors do not tell
        top: int = 3  # labels a picture
        # see vitral bench; fp8 is for new GPUs
        precision: Literal["auto", "fp32", "bf16", "int8", "bf16-checked", "int8-checked", "fp8"] = "auto"
        threads: int | None = None  # that it computes with
        device: Literal["auto", "cpu", "gpu"] = "auto"
        json: FlagCreatePairsOff[bool] = False  # one object a line
        csv: FlagCreatePairsOff[bool] = False  # file, rank, label, probability, unknown, error

    chosen = parse(Predict, words, "predict")
    if not chosen.files:
        raise which_images("predict", chosen.run)
    if chosen.top < 1:
        raise VitralError(f"--top must be at least 1, not {chosen.top}", "leave it out for 3")
    if chosen.json and chosen.csv:
        raise VitralError("--json and --csv are two ways to print the answers", "give one of them")
    from vitral.inference.prediction import show
    from vitral.weights.checkpoint import NO_HEAD

    predictor = opened(
        chosen.run,
        device=chosen.device,
        labels=chosen.labels,
        heads=chosen.heads,
        precision=chosen.precision,
        threads=chosen.threads,
    )
    if predictor.classes == (NO_HEAD,):
        raise VitralError(
            f"{chosen.run} has no classifier, so it has no answers",
            f"give it one: vitral train PHOTOS --init {typed(chosen.run)}; "
            f"or take its features: vitral embed {typed(chosen.run)} …",
        )
    if chosen.out is not None:
        from vitral.inference.batch_predict import harvest

        return harvest(predictor, chosen.files, chosen.out, top=chosen.top)
    answers = predictor.predict_files(chosen.files, top=chosen.top)
    return show(answers, "json" if chosen.json else "csv" if chosen.csv else "lines")
