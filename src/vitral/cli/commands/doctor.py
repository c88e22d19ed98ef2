"""vitral doctor: check a folder of images before training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from vitral.cli.messages import JSON_HELP, print_checkpoint_notes
from vitral.cli.parsing import Command, argument, option
from vitral.errors import VitralError


@dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """Check a folder or CSV file of images for problems, recommend a recipe and estimate its training time.

    The exit status is 1 if there are errors to fix before training.
    """

    folder: Path = argument("folder with one subfolder per class, or with train, val and test folders; or a CSV file")
    init_from: str | None = option(None, "checkpoint to fine-tune: a file, folder, run or hf:owner/name")
    fix_list: Path | None = option(None, "CSV file to write with one row per problem: path, problem, detail, action")
    json: bool = option(False, JSON_HELP)


def doctor(args: DoctorArgs) -> int:
    from vitral.doctor import examine, write_fix_list
    from vitral.doctor.advice import advise

    if args.init_from is not None:
        print_checkpoint_notes(args.init_from)
    if args.fix_list is not None and (args.fix_list.is_dir() or not args.fix_list.absolute().parent.is_dir()):
        raise VitralError(f"cannot write {args.fix_list}", "--fix-list takes a CSV file in an existing folder")
    diagnosis = examine(args.folder)
    advice = advise(diagnosis, init=args.init_from) if diagnosis.trainable else None
    num_fixes = write_fix_list(diagnosis, args.fix_list) if args.fix_list else 0
    if args.json:
        print(json.dumps(diagnosis.as_dict() | {"advice": advice.as_dict() if advice else None}))
    else:
        from vitral.reporting.terminal import tables

        tables.print_diagnosis(diagnosis, advice)
        if args.fix_list:
            print(f"\nWrote {args.fix_list} ({num_fixes:,} {'row' if num_fixes == 1 else 'rows'})")
    return 1 if diagnosis.errors else 0


COMMAND = Command("doctor", DoctorArgs, doctor)
