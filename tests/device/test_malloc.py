"""Memory that a process frees is kept for its next allocation."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COUNT_PAGE_FAULTS = """
import resource
from vitral.device.malloc import keep_freed_memory
kept = keep_freed_memory()
for round in range(20):
    if round == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * 3_000_000 for _ in range(8)]
    del blocks
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def count_page_faults(**environment: str) -> tuple[bool, int]:
    words = [sys.executable, "-c", COUNT_PAGE_FAULTS]
    result = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True, check=True)
    kept, faults = result.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_pages_are_not_mapped_again_for_every_allocation() -> None:
    kept, faults = count_page_faults()
    if not kept:
        pytest.skip("the C library is not glibc")
    assert faults < 6000  # 10 rounds of 6,000 pages
    assert count_page_faults(MALLOC_MMAP_THRESHOLD_="100000")[1] > 30_000


def test_settings_of_the_user_are_kept() -> None:
    assert not count_page_faults(MALLOC_TRIM_THRESHOLD_="131072")[0]
