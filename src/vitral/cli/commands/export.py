"""A model as a file for other programs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from vitral.cli.messages import opened, to_be_fetched
from vitral.cli.parsing import a_model, parse
from vitral.errors import typed


def run(words: list[str]) -> int:
    from tyro.conf import FlagCreatePairsOff, Positional, arg

    @dataclass(frozen=True)
    class Export:
        """One file for other programs: class names, preprocessing and calibration are in it. It is loaded back and
        compared with the model on real images; where they do not agree, there is no file."""

        run: Annotated[Positional[str], arg(help=a_model())]
        to: Literal["onnx", "torch", "aoti"] = "onnx"  # torch: torch.export's .pt2; aoti: compiled for this kind of CPU
        precision: Literal["fp32", "fp16", "bf16", "int8"] = "fp32"
        preprocessing: FlagCreatePairsOff[bool] = False  # scaling and cropping inside, for pictures of any size (ONNX)
        out: Path | None = None  # default: exports/ in the run folder; of a model in the box, here
        data: str | None = None  # a set or folder to learn int8's steps from and to compare on; default: its own
        images: int = 256  # half to learn from, half to compare on
        labels: Path | None = None  # class names, one a line, for a checkpoint that has none

    chosen = parse(Export, words, "export")
    from vitral import api_ship as shipping

    predictor = opened(chosen.run, device="cpu", precision="fp32", labels=chosen.labels)
    to_be_fetched(chosen.data or predictor.card.trained_on)
    file, agreement = shipping.export(
        predictor,
        to=chosen.to,
        precision=chosen.precision,
        preprocessing=chosen.preprocessing,
        out=chosen.out,
        data=chosen.data,
        images=chosen.images,
    )
    print(f"exported {file} ({file.stat().st_size / 1e6:.1f} MB): {agreement}")
    if chosen.to == "onnx":
        print(f"Next:  vitral predict {typed(file)} photo.jpg      needs numpy, pillow and onnxruntime, not torch")
    return 0
