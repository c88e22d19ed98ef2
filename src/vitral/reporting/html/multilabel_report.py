"""The sections of a report that are particular to multi-label models."""

from __future__ import annotations

from vitral.evaluation.multilabel import MultiLabelReport
from vitral.reporting.html.markup import definition_table, interval, note, percent, table, text
from vitral.reporting.html.report_data import ReportData
from vitral.reporting.html.run_sections import data_section, reproduction_section, training_section
from vitral.utils.intervals import Interval

MAX_COOCCURRENCE_CLASSES = 60
Section = tuple[str, str, str]  # name, title, content


def multilabel_sections(data: ReportData) -> list[Section]:
    return [
        ("summary", "Summary", summary_section(data)),
        ("training", "Training", training_section(data.epochs, data.augmented)),
        ("labels", "Labels", labels_section(data.evaluation)),
        ("cooccurrence", "Labels that occur together", cooccurrence_section(data.evaluation)),
        ("data", "Data", data_section(data)),
        ("reproduction", "Reproduction", reproduction_section(data)),
    ]


def multilabel_figures(data: ReportData) -> list[tuple[str, str]]:
    """The most important metrics, below the title."""
    report: MultiLabelReport = data.evaluation
    mean_ap, micro = report.mean_average_precision, report.micro_f1
    return [
        (percent(mean_ap.value), f"mAP, mean average precision ({interval(mean_ap)})"),
        (percent(micro.value), f"micro F1 at the fitted thresholds ({interval(micro)})"),
        (f"{report.images:,}", f"{data.split_name} images, {len(report.per_class)} labels"),
    ]


def summary_section(data: ReportData) -> str:
    report: MultiLabelReport = data.evaluation
    rows = [
        (name, percent(value.value), interval(value))
        for name, value in (
            ("mAP", report.mean_average_precision),
            ("Micro F1", report.micro_f1),
            ("Macro F1", report.macro_f1),
            ("Exact match", report.exact_match),
        )
    ]
    rows.append(("Labels per image", f"{report.labels_per_image:.2f}", f"predicted {report.predicted_per_image:.2f}"))
    caveat = "The best epoch and the thresholds were selected on these images, so new images will score lower. "
    footnote = note(
        f"{caveat if data.split_name == 'validation' else ''}mAP: mean over the labels of the average precision. "
        "Micro F1 counts all decisions together, macro F1 is the mean over the labels; exact match is the share of "
        "images with exactly the right labels. Intervals: bootstrap resamples of the images. Thresholds and the "
        f"temperature, {report.temperature:.3f}, were fitted on the {report.calibrated_on} images."
    )
    metrics = table(("Metric", data.split_name, "95% interval"), rows)
    return f'<div class="columns"><div>{definition_table(data.facts)}</div><div>{metrics}</div></div>{footnote}'


def labels_section(report: MultiLabelReport) -> str:
    """Average precision of each label, and precision, recall and F1 at its threshold; the worst label first."""
    ordered = sorted(
        report.per_class, key=lambda label: label.average_precision.value if label.average_precision else 2
    )
    rows = [
        (
            label.name,
            _percent(label.average_precision),
            "–" if label.average_precision is None else interval(label.average_precision, 1),
            f"{label.threshold:.2f}",
            *("–" if value is None else percent(value, 1) for value in (label.precision, label.recall, label.f1)),
            f"{label.support:,}",
            f"{label.predicted:,}",
        )
        for label in ordered
    ]
    header = ("Label", "AP", "95% interval", "Threshold", "Precision", "Recall", "F1", "Images", "Predicted")
    return table(header, rows) + note("The label with the lowest average precision comes first. –: no such images.")


def _percent(value: Interval | None) -> str:
    return "–" if value is None else percent(value.value, 1)


def cooccurrence_section(report: MultiLabelReport) -> str:
    """How many images have both of two labels, and how many are predicted to."""
    names = [label.name for label in report.per_class]
    pairs = [
        (f"{first} and {second}", f"{true:,}", f"{predicted:,}")
        for first, second, true, predicted in report.frequent_pairs(10)
    ]
    content = table(("Labels", "Images", "Predicted"), pairs, "Most frequent pairs") if pairs else ""
    if len(names) <= MAX_COOCCURRENCE_CLASSES:
        rows = [
            (name, *(f"{t:,} / {p:,}" if t or p else "·" for t, p in zip(true, predicted, strict=True)))
            for name, true, predicted in zip(names, report.cooccurrence, report.predicted_cooccurrence, strict=True)
        ]
        matrix = table(("", *names), rows, "Images with both labels: true / predicted. Diagonal: images with the label")
        content += f"<details open><summary>{text('All labels')}</summary>{matrix}</details>"
    return content
