"""Shares that are each thing once; and two real processes that tell each other things."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.processes import Process
from vitral.cli import main as cli
from vitral.distributed.world import ALONE, Agreement, World, from_environment
from vitral.errors import VitralError

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

TALK = """
import json, sys, torch
from pathlib import Path
from vitral.errors import VitralError
from vitral.device.hardware import choose
from vitral.distributed.world import Agreement

world = choose(device="cpu").world
out = Path(sys.argv[1]) / f"{world.rank}.json"
said = {"share": list(world.share(5)), "gather": world.gather([world.rank] * (1 + world.rank))}
said["tell"] = world.tell(lambda: f"made by {world.rank}")
said["sum"] = world.sum(torch.tensor([1.0 + world.rank])).tolist()
said["stack"] = world.stack(torch.tensor([[world.rank], [world.rank]])).flatten().tolist()

def fail():
    raise VitralError("no luck", "try again")

def fail_on_second():
    if world.rank == 1:
        fail()

for name, attempt in (("tell", lambda: world.tell(fail)), ("each", lambda: world.each(fail))):
    try:
        attempt()
    except VitralError as error:
        said[f"failed {name}"] = [error.what, error.hint]
order = Path(sys.argv[1]) / "order"
def look():
    found = order.exists()
    order.touch()
    return found
said["each"] = world.each(look)
agreement = Agreement(world, 2)
said["flags"] = [agreement.known(world.rank == 1 and step == 2, step == 4) for step in range(5)]
said["flags"].append(agreement.finish(world.rank == 0, False))
out.write_text(json.dumps(said))
"""


def both_run(script: Path, *words: object) -> None:
    """Two processes with the environment that torchrun gives them, to their end."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    processes = []
    for rank in (0, 1):
        mine = {name: str(value) for name, value in (there | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        processes.append(Process(*words, script=script, environment=os.environ | mine))
    try:
        for process in processes:
            _, said = process.communicate(240)
            assert process.returncode == 0, said[-4000:]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """What each of two processes was told."""
    place = tmp_path_factory.mktemp("talk")
    (place / "talk.py").write_text(TALK)
    both_run(place / "talk.py", place)
    return [json.loads((place / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_all_are_told_the_same(told: list[dict[str, object]]) -> None:
    for said in told:
        assert said["gather"] == [0, 1, 1]
        assert said["tell"] == "made by 0"
        assert said["sum"] == [3.0]
        assert said["stack"] == [0, 0, 1, 1]


def test_a_failure_of_one_is_the_failure_of_all(told: list[dict[str, object]]) -> None:
    for said in told:
        assert said["failed tell"] == said["failed each"] == ["no luck", "try again"]


def test_the_first_of_a_machine_goes_first(told: list[dict[str, object]]) -> None:
    assert [said["each"] for said in told] == [False, True]


def test_a_flag_is_known_to_all_one_step_later(told: list[dict[str, object]]) -> None:
    for said in told:
        flags = [False, False], [False, False], [False, False], [True, False], [False, False], [True, True]
        assert said["flags"] == list(flags)


def test_parts_of_the_work(told: list[dict[str, object]]) -> None:
    assert [said["share"] for said in told] == [[0, 1], [2, 3, 4]]


@given(count=st.integers(0, 1000), size=st.integers(1, 70))
def test_shares_are_each_thing_once_and_even(count: int, size: int) -> None:
    shares = [World(rank=rank, size=size).share(count) for rank in range(size)]
    assert [thing for share in shares for thing in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_alone_everything_is_as_it_is() -> None:
    assert ALONE.first
    assert list(ALONE.share(3)) == [0, 1, 2]
    assert ALONE.gather([1, 2]) == [1, 2]
    assert ALONE.tell(lambda: 5) == ALONE.each(lambda: 5) == 5
    assert Agreement(ALONE, 2).known(True, False) == (True, False)


@pytest.mark.parametrize(("size", "rank"), [("2", ""), ("2", "2"), ("2", "-1"), ("two", "0"), ("2", "x")])
def test_a_strange_environment_is_named(monkeypatch: pytest.MonkeyPatch, size: str, rank: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(VitralError, match=r"WORLD_SIZE|RANK"):
        from_environment()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_mistake_is_said_by_the_first_process_and_told_to_torchrun_by_all(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "error.json"
    for name, value in (("WORLD_SIZE", "2"), ("RANK", rank), ("TORCHELASTIC_ERROR_FILE", str(report))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    with pytest.raises(SystemExit) as stop:
        cli.main(["trian"])
    assert stop.value.code == 2
    if rank != "0":
        sys.stdout.close()  # the one that goes nowhere
    assert ("Did you mean train?" in capfd.readouterr().err) == (rank == "0")
    assert "Did you mean train?" in json.loads(report.read_text())["message"]["message"]
