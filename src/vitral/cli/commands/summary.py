"""A model layer by layer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from vitral import bundled as box
from vitral.cli.parsing import a_model, parse, positional
from vitral.errors import VitralError

MODELS = "a preset; a run or model folder, a checkpoint file, or hf:owner/name"


def run(words: list[str]) -> int:
    from tyro.conf import Positional, arg

    from vitral.models.presets import PRESETS, PUBLISHED
    from vitral.models.variants.hybrid import HYBRIDS
    from vitral.models.vit import ViTConfig

    name = positional(words)
    if name is None and not {"-h", "--help"} & set(words):
        raise VitralError("which model?", f"Known: {', '.join([*PRESETS, *HYBRIDS])}; {box.hint()}")

    @dataclass(frozen=True)
    class Summary:
        """A model layer by layer: shapes, parameters, arithmetic and memory for one image."""

        preset: Annotated[Positional[str], arg(help=a_model(MODELS))]
        config: Annotated[ViTConfig, arg(name="")]
        levels: int = 3  # how deep the table goes into the modules

    variant, config = shape_of(name or "B/16")
    chosen = parse(Summary, words, "summary", default=Summary(name or "B/16", config))
    if chosen.levels < 1:
        raise VitralError(f"--levels must be at least 1, not {chosen.levels}", "leave it out for 3")
    from vitral.analysis.model_summary import summarise

    print(summarise(chosen.config, chosen.levels, variant))
    if name in PUBLISHED:
        print(f"published           {PUBLISHED[name]}")
    return 0


def shape_of(name: str) -> tuple[str, Any]:
    """Variant and configuration: of a preset, or of a model that is there."""
    from vitral import weights
    from vitral.models.variants import architecture

    try:
        return architecture(name)
    except VitralError as error:
        if not name.startswith("hf:") and not Path(box.find(name)).exists():
            raise VitralError(error.what, f"{error.hint}; {box.hint()}") from error
    checkpoint = weights.read(name)
    return checkpoint.variant, checkpoint.config
