"""Collectives on two real ranks, sharding, and the environment variables of torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.processes import HANG_SECONDS, run_ranks
from vitral.cli import main as cli
from vitral.distributed.world import SINGLE_PROCESS, AsyncFlags, World, init_distributed, world_from_env
from vitral.errors import VitralError

pytestmark = pytest.mark.timeout(2 * HANG_SECONDS)  # on a busy machine the ranks take minutes

COLLECTIVES = """
import json, sys, torch
from pathlib import Path
from vitral.errors import VitralError
from vitral.device.select import select_hardware
from vitral.distributed.world import AsyncFlags, init_distributed

folder = Path(sys.argv[1])
hardware = select_hardware(device="cpu")
assert not torch.distributed.is_initialized(), "selecting hardware has no side effects"
init_distributed(hardware.world, hardware.device)
world = hardware.world
results = {
    "shard_range": list(world.shard_range(5)),
    "all_gather_objects": world.all_gather_objects([world.rank] * (1 + world.rank)),
    "broadcast": world.broadcast_from_rank0(lambda: f"from rank {world.rank}"),
    "all_reduce_sum": world.all_reduce_sum(torch.tensor([1.0 + world.rank])).tolist(),
    "all_gather": world.all_gather(torch.tensor([[world.rank], [world.rank]])).flatten().tolist(),
    "equal rows": [gathered.tolist() for gathered in map(torch.as_tensor, world.all_gather_rows(torch.ones(2, 1)))],
    "other rows": [
        gathered.tolist()
        for gathered in map(torch.as_tensor, world.all_gather_rows(torch.full((2 + world.rank, 1), world.rank)))
    ],
}

def fail():
    raise VitralError("what failed", "what to do")

for name, collective in (("broadcast", world.broadcast_from_rank0), ("run_on_all", world.run_on_all)):
    try:
        collective(fail)
    except VitralError as error:
        results[f"failed {name}"] = [error.what, error.hint]

class UnknownToTheOthers(BaseException):
    def __reduce__(self):
        raise TypeError("cannot be pickled")

def divide():
    return 1 // 0

def interrupt():
    raise KeyboardInterrupt

def raise_unpicklable():
    raise UnknownToTheOthers("only rank 0 has this class")

results["causes"] = []
for function in (divide, interrupt, raise_unpicklable, lambda: lambda: None, lambda: Path("missing").read_text()):
    try:
        world.broadcast_from_rank0(function)
    except BaseException as error:
        results["causes"].append([type(error).__name__, str(error)])
try:
    world.run_on_all(lambda: 1 // (1 - world.rank))
except BaseException as error:
    results["failed on rank 1"] = [type(error).__name__, str(error)]

marker = folder / "marker"
def marker_existed():
    existed = marker.exists()
    marker.touch()
    return existed
results["run_on_all"] = world.run_on_all(marker_existed)

flags = AsyncFlags(world, 2)
results["flags"] = [flags.exchange(world.rank == 1 and step == 2, step == 4) for step in range(5)]
results["flags"].append(flags.flush(world.rank == 0, False))
(folder / f"{world.rank}.json").write_text(json.dumps(results))
"""

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the collectives returned, per rank."""
    folder = tmp_path_factory.mktemp("collectives")
    (folder / "collectives.py").write_text(COLLECTIVES)
    run_ranks(folder / "collectives.py", folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_collectives_return_the_same_on_every_rank(results: Results) -> None:
    for rank, rank_results in enumerate(results):
        assert rank_results["all_gather_objects"] == [0, 1, 1]
        assert rank_results["broadcast"] == "from rank 0"
        assert rank_results["all_reduce_sum"] == [3.0]
        assert rank_results["all_gather"] == [0, 0, 1, 1]
        assert rank_results["equal rows"] == [[[1.0]] * 4, 2 * rank]
        assert rank_results["other rows"] == [[[0], [0], [1], [1], [1]], 2 * rank]


def test_failure_on_one_rank_is_raised_on_all(results: Results) -> None:
    for rank_results in results:
        assert rank_results["failed broadcast"] == rank_results["failed run_on_all"] == ["what failed", "what to do"]


def test_any_exception_on_rank_0_reaches_the_other_ranks_with_its_type_and_message(results: Results) -> None:
    hint = "The traceback is in the output of rank 0"
    missing = ["VitralError", "missing: No such file or directory"]
    assert results[0]["causes"][:3] == [
        ["ZeroDivisionError", "integer division or modulo by zero"],
        ["KeyboardInterrupt", ""],
        ["UnknownToTheOthers", "only rank 0 has this class"],
    ]
    assert results[1]["causes"][:3] == [
        ["VitralError", f"rank 0 failed with ZeroDivisionError: integer division or modulo by zero\n{hint}"],
        ["VitralError", f"rank 0 failed with KeyboardInterrupt\n{hint}"],
        ["VitralError", f"rank 0 failed with UnknownToTheOthers: only rank 0 has this class\n{hint}"],
    ]
    for rank_results in results:
        unpicklable, not_found = rank_results["causes"][3:]
        assert "ickle" in unpicklable[1]
        assert not_found == missing


def test_failure_of_any_rank_in_run_on_all_is_raised_on_all(results: Results) -> None:
    assert results[1]["failed on rank 1"] == ["ZeroDivisionError", "integer division or modulo by zero"]
    kind, message = results[0]["failed on rank 1"]
    assert kind == "VitralError"
    assert message.startswith("rank 1 failed with ZeroDivisionError: integer division or modulo by zero\n")


def test_run_on_all_calls_local_rank_0_first(results: Results) -> None:
    assert [rank_results["run_on_all"] for rank_results in results] == [False, True]


def test_async_flag_is_visible_on_all_ranks_one_step_later(results: Results) -> None:
    expected = [[False, False], [False, False], [False, False], [True, False], [False, False], [True, True]]
    for rank_results in results:
        assert rank_results["flags"] == expected


def test_shard_range_of_each_rank(results: Results) -> None:
    assert [rank_results["shard_range"] for rank_results in results] == [[0, 1], [2, 3, 4]]


@given(count=st.integers(0, 1000), size=st.integers(1, 70))
def test_shards_partition_the_items_evenly(count: int, size: int) -> None:
    shards = [World(rank=rank, size=size).shard_range(count) for rank in range(size)]
    assert [item for shard in shards for item in shard] == list(range(count))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_failing_rank_shows_the_output_of_every_rank(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(
        "import os, sys\n"
        "print('stdout of rank', os.environ['RANK'])\n"
        "sys.exit('rank 1 gives up' if os.environ['RANK'] == '1' else 0)\n"
    )
    with pytest.raises(AssertionError) as failure:
        run_ranks(tmp_path / "fail.py")
    for text in ("rank 0: exit status 0", "stdout of rank 0", "rank 1: exit status 1", "rank 1 gives up"):
        assert text in str(failure.value)


def test_single_process_collectives_are_identities() -> None:
    assert SINGLE_PROCESS.is_rank0
    assert list(SINGLE_PROCESS.shard_range(3)) == [0, 1, 2]
    assert SINGLE_PROCESS.all_gather_objects([1, 2]) == [1, 2]
    assert SINGLE_PROCESS.broadcast_from_rank0(lambda: 5) == SINGLE_PROCESS.run_on_all(lambda: 5) == 5
    assert AsyncFlags(SINGLE_PROCESS, 2).exchange(True, False) == (True, False)


def test_init_distributed_uses_nccl_on_the_local_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(str(device)))
    monkeypatch.setattr("vitral.distributed.world.rendezvous", lambda *_, **__: iter([(None, 7, 8)]))
    monkeypatch.setattr("vitral.distributed.world.PrefixStore", lambda prefix, store: store)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **_: calls.append(backend))
    init_distributed(World(rank=7, size=8, local_rank=3), torch.device("cuda", 3))
    assert calls == ["cuda:3", "cpu:gloo,cuda:nccl"]


@pytest.mark.parametrize(("size", "rank"), [("2", ""), ("2", "2"), ("2", "-1"), ("two", "0"), ("2", "x")])
def test_invalid_torchrun_environment_is_refused(monkeypatch: pytest.MonkeyPatch, size: str, rank: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(VitralError, match=r"WORLD_SIZE|RANK"):
        world_from_env()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_error_is_printed_by_rank_0_and_reported_to_torchrun_by_all(
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
        sys.stdout.close()  # replaced by a stream that discards its input
    assert ("Did you mean 'train'?" in capfd.readouterr().err) == (rank == "0")
    assert "Did you mean 'train'?" in json.loads(report.read_text())["message"]["message"]
