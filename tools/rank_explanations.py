"""Rank the explanation methods of the bundled models and store the rankings with them.

    python tools/rank_explanations.py [mnist] [--images 64]

`vitral explorer` shows the ranking next to the attention map. The tests are those of `vitral explain --faithfulness`,
on test images of the dataset that a model was trained on.
"""

from __future__ import annotations

import argparse

from vitral import bundled
from vitral.explorer.build import RANKING_FILE, measure_ranking
from vitral.inference.predictor import Predictor
from vitral.utils.atomic import atomic_write
from vitral.utils.json_toml import dump_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=bundled.model_names())
    parser.add_argument("--images", type=int, default=64, help="test images, and pairs of them")
    args = parser.parse_args()
    for name in args.models:
        predictor = Predictor.load(bundled.PREFIX + name, device="cpu", engine="reference")
        ranking = measure_ranking(predictor, predictor.model_config.trained_on, args.images)
        atomic_write(bundled.BUNDLED_DIR / name / RANKING_FILE, dump_json(ranking, indent=2) + "\n")
        print(f"{name}: {ranking['best']}")


if __name__ == "__main__":
    main()
