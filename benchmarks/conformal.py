"""Compare conformal scores for prediction sets on real models: LAC, APS and RAPS.

    python benchmarks/conformal.py mnist cifar10 runs/mine --repetitions 20

Each repetition fits the threshold on one random half of the test images and measures coverage and set size on the other
half. All sets contain the most probable class; the scores are deterministic, as in predictions. If there are validation
images, the row "validation" has the coverage of a threshold that was fitted on them, as `vitral evaluate` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from _output import add_output_arguments, write_results
from vitral.evaluation.conformal import conformal_quantile, min_images
from vitral.evaluation.data import load_eval_target

COVERAGES = (0.8, 0.9, 0.95, 0.99, 0.995)
Sample = tuple[Tensor, Tensor]  # probabilities (N, K), labels (N,)


def adaptive_scores(p_NK: Tensor, penalty: float = 0.0) -> Tensor:
    """APS (arXiv 2006.02544): mass of all classes down to this one. RAPS (2009.14193) adds a penalty per rank."""
    order = p_NK.argsort(dim=1, descending=True)
    scores = p_NK.gather(1, order).cumsum(dim=1) + penalty * torch.arange(p_NK.shape[1])
    return torch.empty_like(scores).scatter_(1, order, scores)


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "lac": lambda p: 1 - p,
    "aps": adaptive_scores,
    "raps 0.01": lambda p: adaptive_scores(p, 0.01),
    "raps 0.1": lambda p: adaptive_scores(p, 0.1),
}


def measure(score: Callable[[Tensor], Tensor], fitted: Sample, evaluated: Sample, coverage: float) -> list[float]:
    """Coverage, mean size of the sets, and coverage of the class that is covered least."""
    own = score(fitted[0]).gather(1, fitted[1][:, None])[:, 0]
    p, labels = evaluated
    members = score(p) <= (conformal_quantile(own, coverage) or 0)
    members.scatter_(1, p.argmax(dim=1, keepdim=True), True)
    covered = members.gather(1, labels[:, None])[:, 0].double()
    lowest = min(covered[labels == k].mean().item() for k in labels.unique().tolist())
    return [covered.mean().item(), members.sum(dim=1).double().mean().item(), lowest]


def random_halves(sample: Sample, repetitions: int) -> list[tuple[Sample, Sample]]:
    p, labels = sample
    generator, half = torch.Generator().manual_seed(0), len(labels) // 2
    orders = [torch.randperm(len(labels), generator=generator) for _ in range(repetitions)]
    return [((p[o[:half]], labels[o[:half]]), (p[o[half:]], labels[o[half:]])) for o in orders]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="run folders or bundled models")
    parser.add_argument("--repetitions", type=int, default=20)
    add_output_arguments(parser)
    args = parser.parse_args()
    rows = []
    for name in args.models:
        target = load_eval_target(name)
        predictor, calibration = target.predictor, target.predictor.model_config.calibration
        test = calibration.probabilities(predictor.logits(target.split.images).double()), target.split.labels
        validation = calibration.probabilities(target.validation_logits.double()), target.validation_split.labels
        for coverage in COVERAGES:
            samples = {"half of test": random_halves(test, args.repetitions), "validation": [(validation, test)]}
            for fitted_on, pairs in samples.items():
                if min(len(fitted[1]) for fitted, _ in pairs) < min_images(coverage):
                    continue
                for score_name, score in SCORES.items():
                    values = torch.tensor([measure(score, *pair, coverage) for pair in pairs], dtype=torch.float64)
                    mean, spread = values.mean(dim=0).tolist(), values.std(dim=0, correction=0).tolist()
                    row = {
                        "model": name, "target": coverage, "fitted_on": fitted_on, "score": score_name,
                        "n": len(pairs), "fitted_images": len(pairs[0][0][1]), "coverage": mean[0],
                        "coverage_sd": spread[0], "set_size": mean[1], "lowest_class_coverage": mean[2],
                    }  # fmt: skip
                    rows.append(row)
                    print(*(f"{value:.4f}" if isinstance(value, float) else value for value in row.values()))
    write_results(args, rows)


if __name__ == "__main__":
    main()
