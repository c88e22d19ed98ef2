"""Report sections about the evaluation: calibration, OOD detection and robustness."""

from __future__ import annotations

from vitral.evaluation.calibration import FALSE_POSITIVE_RATE, min_validation_images
from vitral.evaluation.conformal import PredictionSetReport
from vitral.evaluation.ood import OODResult, OODScore
from vitral.evaluation.report import EvaluationReport
from vitral.evaluation.robustness import Robustness
from vitral.reporting.html import charts
from vitral.reporting.html.charts import Chart
from vitral.reporting.html.markup import interval, note, percent, table, text
from vitral.reporting.html.report_data import ReportData
from vitral.utils.text import count_text

CORRUPTION_COLOURS = "abcde"


def calibration_section(evaluation: EvaluationReport) -> str:
    before, after = evaluation.uncalibrated, evaluation.calibrated
    rows = [
        ("cross-entropy", f"{before.nll:.4f}", f"{after.nll:.4f}"),
        ("Brier score", f"{before.brier:.4f}", f"{after.brier:.4f}"),
        ("calibration error", percent(before.ece), percent(after.ece)),
        ("mean confidence", percent(before.confidence), percent(after.confidence)),
    ]
    header = ("", "uncalibrated", f"temperature {evaluation.temperature:.3f}")
    figures = f"<div>{_reliability_chart(evaluation)}</div><div>{_risk_coverage_chart(evaluation)}</div>"
    return f'<div class="columns">{figures}</div>{table(header, rows)}'


def _reliability_chart(evaluation: EvaluationReport) -> str:
    bins = evaluation.calibrated.bins
    low = max(min(min(min(b.confidence, b.low) for b in bins), 0.9) - 0.03, 0.0)
    chart = Chart(
        label=f"reliability diagram, calibration error {percent(evaluation.calibrated.ece)}",
        x="confidence",
        y="accuracy",
        x_range=(low, 1.0),
        y_range=(low, 1.0),
        x_format=charts.percent,
        y_format=charts.percent,
    )
    confidence = [b.confidence for b in bins]
    chart.line([low, 1], [low, 1], "g dashed", "perfect calibration")
    chart.spans(confidence, [b.low for b in bins], [b.high for b in bins], "a")
    chart.dots(confidence, [b.accuracy for b in bins], "a", "bins with equal numbers of images, 95% intervals")
    return chart.svg()


def _risk_coverage_chart(evaluation: EvaluationReport) -> str:
    curve = evaluation.risk_coverage
    chart = Chart(
        label=f"risk-coverage curve: error rate {percent(curve.risk[-1])} at full coverage",
        x="coverage (most confident first)",
        y="error rate",
        x_range=(0.0, 1.0),
        y_range=(0.0, max(*curve.risk, 1e-3) * 1.08),
        x_format=charts.percent,
        y_format=charts.percent,
    )
    chart.line(curve.coverage, curve.risk, "a")
    return chart.svg()


def prediction_sets_section(data: ReportData) -> str:
    """Coverage and size of the prediction sets; empty if the model has none."""
    sets = data.evaluation.prediction_sets
    if sets is None:
        return ""
    summary = (
        f"A prediction set holds every class with a probability of at least {percent(sets.threshold)}, and always the "
        f"most probable one. The threshold was fitted on {sets.fitted_images:,} validation images so that "
        f"{100 * sets.target:.4g}% of the sets contain the true class. Measured on {data.evaluation.images:,} "
        f"{data.split_name} images: {percent(sets.coverage.value)} ({interval(sets.coverage)}), with "
        f"{sets.mean_size:.2f} classes per set on average."
        + (" The most probable class alone reaches the target." if sets.single_classes_suffice else "")
    )
    rows = [
        (
            row.name,
            "–" if row.coverage is None else f"{percent(row.coverage.value)} ({interval(row.coverage)})",
            "–" if row.coverage is None else f"{row.mean_size:.2f}",
            f"{row.support:,}",
        )
        for row in sorted(sets.per_class, key=lambda row: 1.0 if row.coverage is None else row.coverage.value)
    ]
    header = ("class", "coverage", "classes per set", "images")
    footnote = (
        "The sets were fitted on these images, so this is not a measurement of their coverage."
        if data.split_name == "validation"
        else "The target holds for all images together; single classes can be below it. The lowest coverage is first."
    )
    return (
        f'<p>{text(summary)}</p><div class="columns roomy"><div>{_set_size_chart(sets)}</div>'
        f"{table(header, rows, 'Coverage by true class')}</div>{note(footnote)}"
    )


def _set_size_chart(sets: PredictionSetReport) -> str:
    total = sum(sets.sizes)
    fractions = [count / total for count in sets.sizes]
    edges = [size + 0.5 for size in range(len(fractions) + 1)]
    chart = Chart(
        label=f"distribution of set sizes, mean {sets.mean_size:.2f} classes",
        x="classes per set",
        y="fraction of images",
        x_range=(edges[0], max(edges[-1], 3.5)),
        y_range=(0.0, max(fractions) * 1.05),
        y_format=charts.percent,
        x_ticks=[size for size in charts.nice_ticks(1, max(len(fractions), 3), 6) if size == round(size)],
    )
    chart.steps(edges, fractions, "a")
    return chart.svg()


def ood_section(data: ReportData) -> str:
    result = data.evaluation.ood
    if result is None:
        return _ood_threshold_text(data) + _command_hint(
            data, "--ood DATASET_OR_FOLDER", "To measure OOD detection on other images:"
        )
    figures = "".join(f"<div>{_ood_chart(score, result)}</div>" for score in result.scores)
    rows = [
        (
            score.name,
            f"{percent(score.auroc.value)} ({interval(score.auroc)})",
            f"{percent(score.fpr95.value)} ({interval(score.fpr95)})",
            "–" if score.threshold is None else percent(score.detection_rate, 1),
            "–" if score.threshold is None else percent(score.false_positive_rate, 1),
        )
        for score in result.scores
    ]
    header = ("score", "AUROC", "FPR95¹", "detection rate²", "false-positive rate²")
    summary = f"{result.ood_images:,} images of {result.dataset} against {result.id_images:,} in-distribution images."
    footnote = (
        "¹ fraction of OOD images accepted at the threshold that accepts 95% of the known images. ² at the threshold "
        "chosen on held-out images."
    )
    return f'<p>{text(summary)}</p><div class="columns three">{figures}</div>{table(header, rows)}{note(footnote)}'


def _ood_threshold_text(data: ReportData) -> str:
    calibration = data.predictor.model_config.calibration
    if calibration.ood_threshold is None:
        message = (
            "The model has no OOD threshold: the validation images are too few to choose one for "
            f"{FALSE_POSITIVE_RATE:.0%} false positives, which takes {min_validation_images()}."
        )
    else:
        message = (
            f"An image is unknown if its {calibration.ood_score} score is below {calibration.ood_threshold:.2f}. The "
            f"threshold was chosen on the {calibration.fitted_on} images."
        )
    return f"<p>{text(message)}</p>"


def _ood_chart(score: OODScore, result: OODResult) -> str:
    id_fractions, ood_fractions = (
        [count / max(sum(histogram), 1) for count in histogram]
        for histogram in (score.id_histogram, score.ood_histogram)
    )
    chart = Chart(
        label=f"{score.name} score of known and OOD images, AUROC {percent(score.auroc.value)}",
        x=f"{score.name} score (AUROC {percent(score.auroc.value, 1)})",
        y="fraction of images",
        x_range=(score.bin_edges[0], score.bin_edges[-1]),
        y_range=(0.0, max(max(id_fractions), max(ood_fractions)) * 1.05),
        y_format=charts.percent,
    )
    chart.steps(score.bin_edges, id_fractions, "a", "known")
    chart.steps(score.bin_edges, ood_fractions, "b", result.dataset)
    if score.threshold is not None:
        chart.rule(score.threshold, "g", "threshold")
    return chart.svg()


def robustness_section(data: ReportData) -> str:
    result = data.evaluation.robustness
    if result is None:
        return _command_hint(
            data, "", "To measure robustness to noise, blur, low contrast, JPEG artefacts and rotation:"
        )
    rows = [
        (
            c.corruption,
            *(percent(accuracy.value, 1) for accuracy in c.accuracy),
            f"{percent(c.relative_accuracy.value, 1)} ({interval(c.relative_accuracy, 1)})",
        )
        for c in result.corruptions
    ]
    header = ("corruption", "1", "2", "3", "4", "5", "mean relative to clean")
    summary = (
        f"The mean accuracy on corrupted images is {percent(result.relative_accuracy.value, 1)} of the clean accuracy "
        f"({interval(result.relative_accuracy, 1)}). {count_text(result.images, 'image')}, clean accuracy "
        f"{percent(result.clean_accuracy)}."
    )
    figures = f"<div>{_robustness_chart(result)}</div>{table(header, rows, 'Accuracy by severity')}"
    return f'<p>{text(summary)}</p><div class="columns roomy">{figures}</div>'


def _robustness_chart(result: Robustness) -> str:
    chart = Chart(
        label=f"accuracy by severity; {percent(result.relative_accuracy.value, 1)} of the clean accuracy on average",
        x="severity",
        y="accuracy",
        x_range=(0.8, 5.2),
        y_range=(0.0, 1.0),
        y_format=charts.percent,
        x_ticks=(1, 2, 3, 4, 5),
    )
    chart.line([0.8, 5.2], [result.clean_accuracy, result.clean_accuracy], "g dashed", "clean")
    for corruption, colour in zip(result.corruptions, CORRUPTION_COLOURS, strict=True):
        severities = list(range(1, len(corruption.accuracy) + 1))
        values = [accuracy.value for accuracy in corruption.accuracy]
        chart.spans(severities, [a.low for a in corruption.accuracy], [a.high for a in corruption.accuracy], colour)
        chart.line(severities, values, colour, corruption.corruption)
        chart.dots(severities, values, colour)
    return chart.svg()


def _command_hint(data: ReportData, flags: str, message: str) -> str:
    """The command that adds a missing measurement."""
    if not data.full_report_command:
        return ""
    command = f"{data.full_report_command} {flags}".strip()
    return f"<p>{text(message)}</p><pre>{text(command)}</pre>"
