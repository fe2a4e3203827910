"""One controller, many workers: batches of columns, how calls are split and launched, and who carries them."""

from penstock.cluster.batch import Batch
from penstock.cluster.column import Column
from penstock.cluster.convert import (
    from_dataproto,
    from_tensordict,
    from_tensors,
    to_dataproto,
    to_tensordict,
    to_tensors,
)
from penstock.cluster.dispatch import Mesh, Method, Shares, dispatch, register_dispatch
from penstock.cluster.errors import (
    BatchError,
    CallTimeout,
    ClusterError,
    GroupPoisoned,
    PoolFull,
    WorkerFailed,
)
from penstock.cluster.execute import Execute, parse_execute, register_execute
from penstock.cluster.group import Pending, WorkerGroup
from penstock.cluster.local import LocalWorkers
from penstock.cluster.pool import PoolStats, SubmitPool
from penstock.cluster.ray_actors import RayWorkers, ResourcePool
from penstock.cluster.run import Cluster
from penstock.cluster.workers import Workers

__all__ = [
    "Batch",
    "BatchError",
    "CallTimeout",
    "Cluster",
    "ClusterError",
    "Column",
    "Execute",
    "GroupPoisoned",
    "LocalWorkers",
    "Mesh",
    "Method",
    "Pending",
    "PoolFull",
    "PoolStats",
    "RayWorkers",
    "ResourcePool",
    "Shares",
    "SubmitPool",
    "WorkerFailed",
    "WorkerGroup",
    "Workers",
    "dispatch",
    "from_dataproto",
    "from_tensordict",
    "from_tensors",
    "parse_execute",
    "register_dispatch",
    "register_execute",
    "to_dataproto",
    "to_tensordict",
    "to_tensors",
]
