"""What the model looked at."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from vitral.cli.messages import status, to_be_fetched, understood
from vitral.cli.parsing import a_model, parse, which_images
from vitral.errors import VitralError


def run(words: list[str]) -> int:
    from tyro.conf import FlagCreatePairsOff, Positional, arg

    @dataclass(frozen=True)
    class Explain:
        """Where a model looked, for each picture: several methods and classes side by side, as a PNG.

        Methods: attention, rollout, relevance, gradcam, occlusion; and with captum (pip install 'vitral[explain]')
        integrated-gradients, smooth-gradient, shapley. How far they can be trusted for a model: --faithfulness DATA.
        """

        run: Annotated[Positional[str], arg(help=a_model())]
        files: Positional[tuple[Path, ...]] = ()
        method: tuple[str, ...] = ()  # some of them, or "all"; default: rollout and relevance
        target: tuple[str, ...] = ()  # classes, by name or number; default: what the model says
        top: int | None = None  # explain so many of its most probable classes
        layer: int | None = None  # of attention and gradcam, counted from 1
        head: int | None = None  # of attention, counted from 1; default: the mean of all
        residual: bool = True  # rollout counts the residual as looking at oneself
        fusion: Literal["mean", "max", "min"] = "mean"  # of the heads, in rollout
        out: Path = Path("explained")  # folder for the pictures
        map: Literal["inferno", "viridis", "cividis", "magma"] = "inferno"  # colours, all safe for the colour-blind
        each: FlagCreatePairsOff[bool] = False  # every map over its picture as a file of its own, too
        npy: FlagCreatePairsOff[bool] = False  # every map as numbers too: height × width of what the model saw
        json: FlagCreatePairsOff[bool] = False  # one object a picture: answer, and each map patch by patch
        labels: Path | None = None  # class names, one a line, for a checkpoint that has none
        faithfulness: str | None = None  # a set or folder: measure how far each method can be trusted
        split: Literal["test", "validation", "train"] = "test"  # of that set
        images: int = 64  # so many of it, and so many pairs side by side

    chosen = parse(Explain, words, "explain")
    if chosen.faithfulness is not None:
        return judge(chosen)
    if not chosen.files:
        raise which_images("explain", chosen.run)
    from vitral.data.decode import NotAnImage, image_files
    from vitral.explain import explain, open_to_look_inside
    from vitral.inference.prediction import cells, exit_status, in_words
    from vitral.reporting.figures import heatmaps

    if chosen.top is not None and (chosen.target or chosen.top < 1):
        raise VitralError(
            "--top counts classes from 1 up, and goes without --target",
            "--top 3: its three most probable classes; --target NAME: this one",
        )
    methods, options = asked(chosen)
    predictor = open_to_look_inside(chosen.run, chosen.labels)
    understood(predictor.notes)
    files = image_files(list(chosen.files))
    if not files:
        raise VitralError(
            f"no images in {', '.join(map(str, chosen.files))}", "JPEG, PNG, WebP, BMP, GIF and TIFF are read"
        )
    failed, width = 0, max(cells(str(file)) for file in files)
    for file, stem in zip(files, heatmaps.stems(files), strict=True):
        try:
            answer = predictor.predict(file, top=chosen.top or 1)
            found = explain(predictor, file, methods, chosen.target or [label.name for label in answer.labels], options)
        except NotAnImage as error:
            print(f"error: {error.what}", file=sys.stderr)
            failed += 1
            continue
        written = heatmaps.write(found, chosen.out, stem, chosen.map, each=chosen.each, npy=chosen.npy)
        if chosen.json:
            print(json.dumps(heatmaps.as_dict(found, predictor, written)))
        else:
            beside = " " * (width - cells(str(file)))
            print(f"{file}{beside}   {in_words(found.answer[:3], found.unknown)}   {written[0]}")
        if answer.exchanged is not None:
            said = f"{answer.exchanged.name} {answer.exchanged.probability:.2f}"
            understood([f"{file}: with light and dark exchanged, as in what it learned from: {said}"])
    return exit_status(failed, len(files))


def asked(chosen: Any) -> tuple[list[str], dict[str, Any]]:
    """The methods, and those of their options that were set."""
    from vitral.explain import DEFAULT, METHODS
    from vitral.explain.api import find_method

    methods = list(chosen.method or DEFAULT)
    if chosen.method == ("all",):
        methods = [name for name, method in METHODS.items() if not method.slow]
        slow = " and ".join(METHODS.keys() - set(methods))
        understood([f"all but {slow}, which takes hundreds of passes an image: --method {slow}"])
    given = {"layer": chosen.layer, "head": chosen.head}
    given |= {"residual": None if chosen.residual else False}
    given |= {"fusion": None if chosen.fusion == "mean" else chosen.fusion}
    for name in methods:
        find_method(name)
    return methods, {name: value for name, value in given.items() if value is not None}


def judge(chosen: Any) -> int:
    from vitral.evaluation.evaluate import question
    from vitral.explain import faithfulness, open_to_look_inside
    from vitral.reporting.html import faithfulness_table as faithful

    methods, options = asked(chosen)
    if options:
        raise VitralError(
            f"--faithfulness judges the methods as they are: without --{next(iter(options))}",
            "which methods: --method attention rollout",
        )
    predictor = open_to_look_inside(chosen.run, chosen.labels)
    understood(predictor.notes)
    to_be_fetched(chosen.faithfulness)
    asked_about = question(predictor, chosen.faithfulness, chosen.split)
    if not chosen.method:
        methods = faithfulness.all_that_fit(asked_about.predictor.model)
    split, whole = asked_about.name, len(asked_about.split.labels)
    understood([f"{min(chosen.images, whole):,} of {whole:,} {split} images of {asked_about.dataset.name}"])
    with status() as watch:
        result = faithfulness.measure(
            asked_about.predictor,
            asked_about.split,
            methods,
            images=chosen.images,
            pairs=chosen.images,
            watch=lambda name: watch(f"testing {name}"),
        )
    if chosen.json:
        print(json.dumps(faithful.as_dict(result)))
        return 0
    faithful.show(result)
    chosen.out.mkdir(parents=True, exist_ok=True)
    print(f"\n{faithful.curves(result, chosen.out / 'faithfulness.png')}: the curves")
    return 0
