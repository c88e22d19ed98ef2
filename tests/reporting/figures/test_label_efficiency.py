"""The plot of a comparison of initial weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from support.label_efficiency import HELPED, NEIGHBOURS, ONE_SEED, UNCLEAR, WORSE, make_result
from vitral.evaluation.label_efficiency import LabelEfficiencyRow
from vitral.reporting.figures.label_efficiency import plot_label_efficiency


@pytest.mark.parametrize(
    "rows",
    [(NEIGHBOURS, HELPED, UNCLEAR, WORSE), (NEIGHBOURS, WORSE), (ONE_SEED,)],
    ids=["all", "one number of labels", "one seed"],
)
def test_a_plot_of_every_kind_of_result_is_drawn(rows: tuple[LabelEfficiencyRow, ...], tmp_path: Path) -> None:
    result = make_result(*rows, summary="a summary")
    with Image.open(plot_label_efficiency(result, tmp_path / "plot.png")) as image:
        assert image.width > 600


def test_the_plot_names_both_models_and_states_the_verdict(tmp_path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        svg = plot_label_efficiency(make_result(HELPED, WORSE), tmp_path / "plot.svg").read_text()
    for text in ("fine-tuned, runs/[pretrained]", "fine-tuned, random weights", "Labelled images", "raised accuracy"):
        assert text in svg
