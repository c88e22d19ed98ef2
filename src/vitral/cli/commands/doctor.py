"""vitral doctor: check a folder of images before training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vitral.cli.checks import check_inputs
from vitral.cli.messages import JSON_HELP, print_checkpoint_notes, status_line
from vitral.cli.options import AUTO
from vitral.cli.parsing import Command, argument, option
from vitral.errors import VitralError
from vitral.utils.json_toml import dump_json
from vitral.utils.text import count_text


@dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """Check a folder or CSV file of images for problems, recommend a recipe and estimate its training time.

    The exit status is 1 if there are errors to fix before training.
    """

    folder: Path = argument("folder with one subfolder per class, or with train, val and test folders; or a CSV file")
    init_from: str | None = option(
        None, "checkpoint to fine-tune: a file, folder, run or hf:owner/name (default: auto)"
    )
    fix_list: Path | None = option(None, "CSV file to write with one row per file: path, issue, detail, action, fix")
    clean: Path | None = option(
        None, "folder to write a copy to, without unreadable files, exact duplicates and copies across splits"
    )
    link: bool = option(False, "with --clean: hard links instead of copies")
    json: bool = option(False, JSON_HELP)


def doctor(args: DoctorArgs) -> int:
    from vitral.data.names import check_files_exist

    init_from = None if args.init_from == AUTO else args.init_from
    check_inputs(init_from)
    check_files_exist(args.folder)
    from vitral.doctor import check_destination, diagnose, write_clean_copy, write_fix_list
    from vitral.doctor.advice import recommend

    if init_from is not None:
        print_checkpoint_notes(init_from)
    if args.fix_list is not None and (args.fix_list.is_dir() or not args.fix_list.absolute().parent.is_dir()):
        raise VitralError(f"cannot write {args.fix_list}", "Pass --fix-list a CSV file in an existing folder")
    if args.clean is not None:
        check_destination(args.folder, args.clean)
    elif args.link:
        raise VitralError("--link needs --clean", "For example: vitral doctor photos --clean photos-clean --link")
    with status_line("Checking the images"):
        diagnosis = diagnose(args.folder)
        recommendation = recommend(diagnosis, init_from=init_from) if diagnosis.is_trainable else None
    num_rows = write_fix_list(diagnosis, args.fix_list) if args.fix_list else 0
    num_kept = (
        write_clean_copy(args.folder, diagnosis.images, diagnosis.removals, args.clean, link=args.link)
        if args.clean is not None
        else 0
    )
    if args.json:
        content = diagnosis.as_dict() | {"recommendation": recommendation.as_dict() if recommendation else None}
        print(dump_json(content))
    else:
        from vitral.reporting.terminal import tables

        tables.print_diagnosis(diagnosis, recommendation)
        if args.fix_list:
            print(f"\nWrote {args.fix_list} ({count_text(num_rows, 'row')})")
        if args.clean is not None:
            removed = f"without {count} files" if (count := len(diagnosis.removals)) else "nothing had to be removed"
            print(f"\nWrote {args.clean}: {num_kept:,} images, {removed}")
    return 1 if diagnosis.errors else 0


COMMAND = Command("doctor", DoctorArgs, doctor)
