"""One rank of a real FSDP2 model on gloo, which gathers its weights; a process of its own, since ranks are."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from penstock.weights.gather import gathered


class Net(torch.nn.Module):
    """Rows that no two ranks can share evenly, fewer rows than ranks, and dtypes of two widths."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one = torch.nn.Linear(6, 5)
        self.two = torch.nn.Linear(5, 1, dtype=torch.bfloat16)
        self.three = torch.nn.Linear(4, 7, bias=False)


def main(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    net = Net()
    whole = {name: tensor.detach().clone() for name, tensor in net.named_parameters()}
    mesh = init_device_mesh("cpu", (ranks,))
    fully_shard(net.three, mesh=mesh)
    fully_shard(net, mesh=mesh)
    held = {name: list(parameter.to_local().shape) for name, parameter in net.named_parameters()}  # type: ignore[attr-defined]
    seen: dict[str, object] = {"held": held, "right": [], "none": 0, "largest": []}
    exchange, sizes = dist.all_gather_into_tensor, [0]

    def noted(into: torch.Tensor, *rest: object, **options: object) -> None:
        sizes.append(into.numel() * into.element_size())
        exchange(into, *rest, **options)  # type: ignore[arg-type]

    dist.all_gather_into_tensor = noted  # type: ignore[assignment]
    for bucket_bytes in (1, 64, 1 << 20):
        sizes[:] = [0]
        came = dict(gathered(net.named_parameters(), keep=rank == 0, bucket_bytes=bucket_bytes))
        assert list(came) == list(whole)
        seen["largest"].append(max(sizes))  # type: ignore[attr-defined]
        if rank == 0:
            seen["right"].append(all(torch.equal(came[name], whole[name]) for name in whole))  # type: ignore[attr-defined, arg-type]
        else:
            seen["none"] += sum(tensor is None for tensor in came.values())  # type: ignore[operator]
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
