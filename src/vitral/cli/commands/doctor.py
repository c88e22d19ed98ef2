"""A folder of images, before anything is trained on it."""

import json
from dataclasses import dataclass
from pathlib import Path

from vitral.cli.messages import understood_source
from vitral.cli.parsing import parse
from vitral.errors import VitralError


def run(words: list[str]) -> int:
    from tyro.conf import FlagCreatePairsOff, Positional

    @dataclass(frozen=True)
    class Doctor:
        """What is wrong with a folder or list of images, what to train on it, and what that takes on this machine.

        Exit status 1 where something ought to be put right first."""

        folder: Positional[Path]  # with class folders, or with train, val and test that hold them; or photos.csv
        init: str | None = None  # a checkpoint that you have: a file, a folder, a run, hf:owner/name
        fix_list: Path | None = None  # a CSV file to write: path, trouble, detail, what to do
        json: FlagCreatePairsOff[bool] = False  # for programs

    chosen = parse(Doctor, words, "doctor")
    from vitral.doctor import examine, write_fix_list
    from vitral.doctor.advice import advise

    if chosen.init is not None:
        understood_source(chosen.init)
    if chosen.fix_list is not None and (chosen.fix_list.is_dir() or not chosen.fix_list.absolute().parent.is_dir()):
        raise VitralError(f"{chosen.fix_list} cannot be written", "--fix-list names a CSV file in a folder that exists")
    diagnosis = examine(chosen.folder)
    advice = advise(diagnosis, init=chosen.init) if diagnosis.trainable else None
    listed = write_fix_list(diagnosis, chosen.fix_list) if chosen.fix_list else 0
    if chosen.json:
        print(json.dumps(diagnosis.as_dict() | {"advice": advice.as_dict() if advice else None}))
    else:
        from vitral.reporting.terminal import tables as terminal

        terminal.show_diagnosis(diagnosis, advice)
        if chosen.fix_list:
            print(f"\n{chosen.fix_list}: {listed:,} {'line' if listed == 1 else 'lines'}")
    return 1 if diagnosis.errors else 0
