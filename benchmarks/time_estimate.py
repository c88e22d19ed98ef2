"""Compare the training time that `vitral doctor` estimates with the time that the recommended training takes.

    python benchmarks/time_estimate.py FOLDER [--init-from CHECKPOINT] [--epochs 2]

Trains with the recommended command, shortened to a few epochs, and scales the estimate accordingly. Run it on an idle
machine: a ratio between 1/1.5 and 1.5 is expected.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vitral.doctor import diagnose
from vitral.doctor.advice import recommend
from vitral.doctor.estimates import OVERHEAD_SECONDS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--init-from")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    recommendation = recommend(diagnose(args.folder), init_from=args.init_from)
    epochs = int(recommendation.summary.split(" for ")[1].split()[0])
    low, likely, high = (
        OVERHEAD_SECONDS + (seconds - OVERHEAD_SECONDS) * args.epochs / epochs
        for seconds in (recommendation.seconds_low, recommendation.seconds, recommendation.seconds_high)
    )
    print(f"{recommendation.command} --epochs {args.epochs}\n{recommendation.busy_warning or 'the machine is idle'}")
    print(f"estimated {likely:.0f} s ({low:.0f} to {high:.0f} s)", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = [*shlex.split(recommendation.command)[1:], "--epochs", str(args.epochs), "--out", str(out)]
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "vitral", *words], check=True)
        seconds = time.perf_counter() - start
    print(f"took {seconds:.0f} s; estimate / real = {likely / seconds:.2f}")


if __name__ == "__main__":
    main()
