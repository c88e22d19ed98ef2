"""Checks of gathers and reductions that tests/distributed runs on three ranks. Each rank raises if one fails."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from vitral.device.cuda_graphs import collective_capture_failure
from vitral.distributed.dtensor import full_tensor
from vitral.distributed.gather import GatherRing, ShardGather, ShardSpec, shard_bounds
from vitral.distributed.gradients import ReduceDtype, make_ddp_reducer, make_fsdp_reducer
from vitral.distributed.world import World, init_distributed, world_from_env

CPU = torch.device("cpu")


def main() -> None:
    torch.set_num_threads(1)
    world = world_from_env()
    init_distributed(world, CPU)
    assert collective_capture_failure(CPU, world) == "gloo collectives cannot be captured"
    reasons = [None, "the kernel failed", "not this one"]
    assert world.first_reason(reasons[world.rank]) == "the kernel failed"
    check_gathers(world)
    for dtype in ("fp32", "bf16"):
        check_all_reduce(world, dtype)
        check_reduce_scatter(world, dtype)


def check_gathers(world: World) -> None:
    """Four groups of two tensors in three slots, of sizes that the ranks do not divide, along rows or columns."""
    generator = torch.Generator().manual_seed(0)
    full = [
        (torch.randn(7, 5, generator=generator), torch.randn(4, 3 + i, generator=generator).to(torch.float8_e4m3fn))
        for i in range(4)
    ]
    groups = []
    for matrix, fp8 in full:
        group = ShardGather(
            [ShardSpec((7, 5), torch.float32), ShardSpec(tuple(fp8.shape), fp8.dtype, dim=1)], world, CPU
        )
        group.shards[0].copy_(own_part(matrix, 0, world))
        group.shards[1].view(torch.uint8).copy_(own_part(fp8.view(torch.uint8), 1, world))
        groups.append(group)
    ring = GatherRing(groups)
    for index, following in ((0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0), (0, None)):
        for tensor, expected in zip(ring.fetch(index, following), full[index], strict=True):
            assert torch.equal(tensor.float(), expected.float()), index
    groups[1].shards[0].zero_()
    ring.discard()
    assert not ring.fetch(1)[0].any(), "shards that changed must be gathered again"


def own_part(tensor: Tensor, dim: int, world: World) -> Tensor:
    start, stop = shard_bounds(tensor.shape[dim], world.rank, world.size)
    return tensor.narrow(dim, start, stop - start)


def make_model() -> nn.Sequential:
    """Rows that three ranks do not divide: 4 and 2, so that a rank has none."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 2))


def rank_loss(model: nn.Module, rank: int) -> Tensor:
    loss: Tensor = model(torch.arange(10.0).view(2, 5) * (rank + 1)).square().sum()
    return loss


def average_gradients(world: World) -> list[Tensor]:
    model = make_model()
    (sum(rank_loss(model, rank) for rank in range(world.size)) / world.size).backward()  # type: ignore[union-attr]
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def check_all_reduce(world: World, dtype: ReduceDtype) -> None:
    model = make_model()
    reducer = make_ddp_reducer(list(model.parameters()), world, dtype)
    for _ in range(2):  # the buffers are used again
        model.zero_grad()
        with reducer.sync(is_last=True):
            rank_loss(model, world.rank).backward()
        compare([parameter.grad for parameter in model.parameters()], average_gradients(world), dtype)


def check_reduce_scatter(world: World, dtype: ReduceDtype) -> None:
    full, sharded = make_model(), make_model()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (world.size,)))
    reducer = make_fsdp_reducer(list(full.parameters()), list(sharded.parameters()), world, dtype)
    for _ in range(2):
        with reducer.sync(is_last=True):
            rank_loss(full, world.rank).backward()
        assert all(parameter.grad is None for parameter in full.parameters())
        compare([full_tensor(parameter.grad) for parameter in sharded.parameters()], average_gradients(world), dtype)


def compare(grads: list[Tensor | None], expected: list[Tensor], dtype: ReduceDtype) -> None:
    tolerance = 1e-5 if dtype == "fp32" else 2e-2
    for grad, reference in zip(grads, expected, strict=True):
        assert grad is not None
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, reference, rtol=tolerance, atol=tolerance * float(reference.abs().max()))


if __name__ == "__main__":
    main()
