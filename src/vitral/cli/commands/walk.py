"""From pixels to logits, step by step."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from vitral import bundled as box
from vitral.cli.messages import understood
from vitral.cli.parsing import a_model, parse
from vitral.errors import VitralError, reason

MODELS = "a run or model folder, or a checkpoint; default: the newest run, else cifar10 for colours, mnist for gray"


def run(words: list[str]) -> int:
    from tyro.conf import Positional, arg

    @dataclass(frozen=True)
    class Walk:
        """How a ViT gets from the pixels of one picture to its answer: every step with its equation, its shape, the
        lines of the source that do it, and a picture of the actual values. On the terminal, or as a page with --out."""

        image: Positional[Path]  # a picture
        model: Annotated[str | None, arg(help=a_model(MODELS))] = None
        lang: Literal["en", "ko"] = "en"
        layer: int = 1  # the block to look into, counted from 1
        head: int = 1  # the head to look into, counted from 1
        labels: Path | None = None  # class names, one a line, for a checkpoint that has none
        code: bool = True  # show the source on the terminal
        out: Path | None = None  # walk.html: a page of its own; walk.md: Markdown, with pictures beside it

    chosen = parse(Walk, words, "walk")
    if chosen.out is not None and chosen.out.suffix.lower() not in (".html", ".htm", ".md"):
        raise VitralError(f"--out is {chosen.out}; it ends in .html or .md", "walk.html: one page; walk.md: Markdown")
    from vitral.data.decode import decode
    from vitral.explain import open_to_look_inside
    from vitral.inference.prediction import Label, in_words
    from vitral.reporting.walk import html as walk_html
    from vitral.reporting.walk import markdown as walk_markdown
    from vitral.reporting.walk import terminal as walk_terminal
    from vitral.reporting.walk.steps import walk
    from vitral.runs.run import write_atomically

    picture = chosen.image if chosen.model else decode(chosen.image)  # before a model is chosen for it
    asked = chosen.model or newest(chosen.image)
    predictor = open_to_look_inside(asked, chosen.labels)
    name, boxed = str(asked).removeprefix(box.PREFIX), str(asked).startswith(box.PREFIX)
    told = f"the model: {name}{', which comes with vitral' if boxed else ''}; another one with --model"
    understood(predictor.notes if chosen.model else [told])
    made = walk(predictor, picture, chosen.lang, chosen.layer, chosen.head)
    if chosen.out is None:
        walk_terminal.show(made, code=chosen.code)
        return 0
    if chosen.out.suffix.lower() == ".md":
        try:
            walk_markdown.write(made, chosen.out)
        except OSError as error:
            raise VitralError(f"cannot write {chosen.out}: {reason(error)}", "choose another --out") from error
    else:
        write_atomically(chosen.out, walk_html.page(made))
    best = [Label(name=answer.name, probability=answer.probability) for answer in made.answers[:1]]
    print(f"{chosen.image}: {in_words(best, made.unknown)}, in {len(made.steps)} steps\n{chosen.out}")
    return 0


def newest(picture: Path) -> Path | str:
    """The run that was finished last, or a model that comes along and may know such pictures."""
    from vitral.runs.run import RUNS

    finished = [config.parent.parent for config in RUNS.glob("*/model/config.json")]
    if not finished:
        return box.PREFIX + ("cifar10" if colourful(picture) else "mnist")
    return max(finished, key=lambda run: (run / "model" / "config.json").stat().st_mtime)


def colourful(picture: Path) -> bool:
    """Whether it has more than shades of gray. What cannot be read is an error later."""
    from PIL import Image

    try:
        with Image.open(picture) as opened:
            saturation = opened.convert("RGB").resize((32, 32)).convert("HSV").tobytes()[1::3]
    except Exception:  # Pillow raises what it likes
        return False
    return max(saturation) > 32
