"""The paper's figures, for any model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from vitral.cli.messages import understood
from vitral.cli.parsing import a_model, parse
from vitral.errors import VitralError


def run(words: list[str]) -> int:
    from tyro.conf import Positional, arg

    @dataclass(frozen=True)
    class Figures:
        """The paper's figures 6 and 7 for a model, as PNG and SVG: principal components of the patch filters, likeness
        of positions, how far each head looks, and where the model looked in some pictures."""

        run: Annotated[Positional[str], arg(help=a_model())]
        images: tuple[Path, ...] = ()  # pictures and folders to look at; default: test images of the run's own set
        count: int = 32  # at most so many of them
        labels: Path | None = None  # class names, one a line, for a checkpoint that has none
        out: Path | None = None  # default: the run's folder "figures"

    chosen = parse(Figures, words, "figures")
    from vitral.explain import open_to_look_inside
    from vitral.reporting.figures import paper

    if chosen.count < 1:
        raise VitralError(f"--count must be at least 1, not {chosen.count}", "leave it out for 32")
    predictor = open_to_look_inside(chosen.run, chosen.labels)
    understood(predictor.notes)
    pictures = paper.pictures(predictor, chosen.images, chosen.count) if chosen.images else own(predictor, chosen.count)
    place = Path(chosen.run)
    folder = chosen.out or (place / "figures" if (place / "recipe.toml").is_file() else Path("figures"))
    try:
        written, missing = paper.draw(predictor, folder, pictures)
    except OSError as error:
        raise VitralError(f"cannot write into {folder}: {error.strerror or error}", "choose another --out") from error
    for file in written:
        print(file)
    for why in missing:
        print(f"not drawn: {why}")
    return 0


def own(predictor: Any, count: int) -> Any:
    """Images, N C H W, of the run's own set: for testing, or else for validation; None where it has no set."""
    from vitral.evaluation.evaluate import question, recipe_of, spread

    if recipe_of(predictor) is None:
        return None
    try:
        images = question(predictor, None, None).split.images
    except VitralError:
        return None
    return images[spread(len(images), count)]
