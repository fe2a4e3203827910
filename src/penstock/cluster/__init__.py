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
from penstock.cluster.errors import (
    BatchError,
    CallTimeout,
    ClusterError,
    GroupPoisoned,
    PoolFull,
    WorkerFailed,
)

__all__ = [
    "Batch",
    "BatchError",
    "CallTimeout",
    "ClusterError",
    "Column",
    "GroupPoisoned",
    "PoolFull",
    "WorkerFailed",
    "from_dataproto",
    "from_tensordict",
    "from_tensors",
    "to_dataproto",
    "to_tensordict",
    "to_tensors",
]
