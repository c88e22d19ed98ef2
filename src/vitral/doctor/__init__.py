"""Check a dataset before training: `vitral.doctor.diagnose("photos/")`.

    files ─▶ classes and splits ─▶ each file decoded once, as a thumbnail ─▶ duplicates ─▶ issues and fixes

Split names, decoder and duplicate detection are those of training, so that training would encounter the same
issues. `vitral.doctor.advice` recommends a training command and estimates its time and memory.
"""

from __future__ import annotations

from vitral.doctor.diagnosis import Diagnosis, diagnose, write_fix_list
from vitral.doctor.fixes import check_destination, plan_removals, write_clean_copy
from vitral.doctor.issue import Issue

__all__ = [
    "Diagnosis",
    "Issue",
    "check_destination",
    "diagnose",
    "plan_removals",
    "write_clean_copy",
    "write_fix_list",
]
