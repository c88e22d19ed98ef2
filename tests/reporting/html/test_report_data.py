"""What a report says about its dataset."""

from __future__ import annotations

from vitral.doctor.issue import file_issue
from vitral.reporting.html.report_data import issue_text


def test_a_finding_names_the_file_and_what_to_do() -> None:
    issue = file_issue("image-mode", "warning", "image(s) not RGB", ["a.gif"], "Check it", details=["palette"])
    assert issue_text(issue) == "1 image not RGB: a.gif (palette). Check it"
