"""A model layer by layer."""

from dataclasses import dataclass
from typing import Annotated

from vitral.commands.flags import parse, positional
from vitral.errors import VitralError


def run(words: list[str]) -> int:
    from tyro.conf import Positional, arg

    from vitral.presets import PRESETS, PUBLISHED
    from vitral.variants import architecture
    from vitral.variants.hybrid import HYBRIDS
    from vitral.vit import ViTConfig

    name = positional(words)
    if name is None and not {"-h", "--help"} & set(words):
        raise VitralError("which model?", f"Known: {', '.join([*PRESETS, *HYBRIDS])}")

    @dataclass(frozen=True)
    class Summary:
        """A model layer by layer: shapes, parameters, arithmetic and memory for one image."""

        preset: Positional[str]
        config: Annotated[ViTConfig, arg(name="")]
        levels: int = 3  # how deep the table goes into the modules

    variant, config = architecture(name or "B/16")
    chosen = parse(Summary, words, "summary", default=Summary(name or "B/16", config))
    if chosen.levels < 1:
        raise VitralError(f"--levels must be at least 1, not {chosen.levels}", "leave it out for 3")
    from vitral.summary import summarise

    print(summarise(chosen.config, chosen.levels, variant))
    if name in PUBLISHED:
        print(f"published           {PUBLISHED[name]}")
    return 0
