"""Batches to and from what others hold them in: dicts of tensors, TensorDict, verl's DataProto.

Decides which column a value becomes. Memory is shared both ways where the layout allows it, so a batch is a snapshot
only once it has been sent or put. PyTorch, NumPy, tensordict and verl are imported where used.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from penstock.cluster.batch import SMALL_BYTES, Batch
from penstock.cluster.column import (
    BYTES,
    ITEM_BYTES,
    JSON,
    TEXT,
    Column,
    array_column,
    bytes_column,
    json_column,
    ragged,
    text_column,
)
from penstock.cluster.columns import Columns, Part, Run
from penstock.cluster.errors import BatchError
from penstock.errors import MissingExtra

if TYPE_CHECKING:
    import torch

Ragged = Literal["list", "jagged"]


def from_tensors(values: Mapping[str, Any], meta: Mapping[str, Any] | None = None) -> Batch:
    """A batch from a mapping of names to values, whose first dimension is the rows.

    Tensors and NumPy arrays are shared (those of other devices are copied to host memory); nested tensors and lists of
    tensors become ragged columns; lists of str, bytes or `array.array` keep their kind; all other lists are JSON.
    Raises BatchError.
    """
    return Batch(Columns(_parts(values)), meta)


def to_tensors(batch: Batch, ragged: Ragged = "list", copy: bool = False) -> dict[str, Any]:
    """Names to tensors of [rows, *shape] over the batch's memory; text, bytes and JSON as lists.

    `ragged`: columns of unequal rows as a list of tensors, or as one nested tensor of the jagged layout. Tensors over
    memory that others read (Ray's object store) must not be written to; `copy=True` gives tensors of their own.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        values: dict[str, Any] = {}
        for part in Columns.of(batch.columns).parts:
            if isinstance(part, Run):
                flat = _tensor(part.kind, part.data)
                flat = flat.clone() if copy else flat
                values.update(zip(part.names, flat.view(len(part.names), part.rows, *part.shape).unbind()))
            else:
                values[part[0]] = _value(*part, ragged, copy)
        return values


def from_tensordict(data: Any) -> Batch:
    """From a TensorDict of one batch dimension; nested keys are joined by dots; other data is text or JSON."""
    if data.batch_dims != 1:
        raise BatchError(f"a TensorDict of batch size {list(data.batch_size)}; a batch has one dimension, its rows")
    values: dict[str, Any] = {}
    for key in data.keys(include_nested=True, leaves_only=True, is_leaf=_is_leaf):
        name = key if isinstance(key, str) else ".".join(key)
        value = data.get(key)
        values[name] = value if type(value).__module__.startswith("torch") else _plain_rows(value, len(data))
    return Batch(from_tensors(values).columns, rows=len(data))


def to_tensordict(batch: Batch, copy: bool = False) -> Any:
    """A TensorDict; ragged columns are nested tensors, text and JSON are stacks of non-tensor data."""
    try:
        from tensordict import NonTensorData, NonTensorStack, TensorDict
    except ImportError as error:
        raise BatchError(f"a TensorDict needs the package tensordict (pip install tensordict): {error}") from None
    values = {
        name: value if hasattr(value, "dtype") else NonTensorStack.from_list([NonTensorData(row) for row in value])
        for name, value in to_tensors(batch, ragged="jagged", copy=copy).items()
    }
    return TensorDict(values, batch_size=[len(batch)])


def from_dataproto(data: Any) -> Batch:
    """From verl's DataProto: its tensors, its object arrays (as text or JSON), and its meta_info."""
    tensors = {} if data.batch is None else dict(from_tensordict(data.batch).columns)
    objects = {name: _column(name, value) for name, value in data.non_tensor_batch.items()}
    if both := tensors.keys() & objects.keys():
        raise BatchError(f"columns that are both tensors and objects: {', '.join(sorted(both))}")
    return Batch({**tensors, **objects}, data.meta_info, len(data))


def to_dataproto(batch: Batch, copy: bool = False) -> Any:
    """verl's DataProto: numbers as tensors, text and JSON as object arrays, `meta` as meta_info."""
    try:
        import numpy
        from verl import DataProto
    except ImportError as error:
        raise BatchError(f"a DataProto needs verl (pip install verl==0.9.1): {error}") from None
    numbers = [name for name, column in batch.columns.items() if column.kind in ITEM_BYTES]
    objects = {}
    for name in batch.columns.keys() - set(numbers):
        objects[name] = numpy.empty(len(batch), dtype=object)
        objects[name][:] = batch.values(name)
    objects = {name: objects[name] for name in batch.columns if name in objects}
    tensors = to_tensordict(batch.only(*numbers), copy=copy) if numbers else None
    return DataProto(batch=tensors, non_tensor_batch=objects, meta_info=dict(batch.meta))


def _column(name: str, value: Any) -> Column:
    module = type(value).__module__.partition(".")[0]
    if isinstance(value, Column):
        return value
    if module == "torch" or hasattr(value, "is_nested"):
        return _of_tensor(name, value)
    if module == "numpy":
        return _of_numpy(name, value)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise BatchError(f"column '{name}' is {type(value).__name__}; it must be a tensor, an array or a list of rows")
    return _of_list(name, value)


def _of_list(name: str, rows: Sequence[Any]) -> Column:
    kinds = {type(row) for row in rows}
    if kinds == {str}:
        return text_column(rows)
    if kinds and kinds <= {bytes, bytearray, memoryview}:
        return bytes_column(rows)
    if {kind.__module__ for kind in kinds} == {"array"}:
        return array_column(rows)
    if kinds and all(hasattr(row, "is_nested") for row in rows):
        return _of_tensor_list(name, rows)
    if kinds and all(kind.__name__ == "ndarray" for kind in kinds) and len({row.dtype.hasobject for row in rows}) == 1:
        import torch

        if not rows[0].dtype.hasobject:
            return _of_tensor_list(name, [torch.as_tensor(row) for row in rows])
    return json_column(rows, name)


def _of_numpy(name: str, value: Any) -> Column:
    import torch

    if value.ndim == 0:
        raise BatchError(f"column '{name}' has no rows: it is a single value")
    if value.dtype.kind in "OUS":
        return _of_list(name, value.tolist())
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    if not value.flags.writeable or min(value.strides, default=0) < 0:
        value = value.copy()
    try:
        return _of_tensor(name, torch.from_numpy(value))
    except TypeError:
        raise _no_kind(name, value.dtype) from None


def _of_tensor(name: str, value: torch.Tensor) -> Column:
    if value.is_nested:
        return _of_tensor_list(name, value.unbind())
    if value.ndim == 0:
        raise BatchError(f"column '{name}' has no rows: it is a single value")
    kind = _kind(name, value)
    return Column(kind, _memory(value), value.shape[0], tuple(value.shape[1:]))


def _of_tensor_list(name: str, rows: Sequence[torch.Tensor]) -> Column:
    import torch

    if not rows:
        raise BatchError(f"column '{name}': a nested tensor without rows says nothing of what they would be")
    kinds, dimensions = {_kind(name, row) for row in rows}, {row.ndim for row in rows}
    if len(kinds) > 1 or len(dimensions) > 1:
        raise BatchError(f"column '{name}': rows have kinds {sorted(kinds)} and {sorted(dimensions)} dimensions")
    shapes = [tuple(row.shape) for row in rows]
    data = _memory(torch.cat([row.detach().reshape(-1) for row in rows]))
    if shapes[0] == ():
        return Column(kinds.pop(), data, len(rows), ())
    return ragged(kinds.pop(), data, [math.prod(shape) for shape in shapes], shapes if dimensions != {1} else None)


def _parts(values: Mapping[str, Any]) -> list[Part]:
    """Columns in order; small tensors of host memory that follow one another in one form become a run, copied once."""
    parts: list[Part] = []
    alike: list[tuple[str, Any]] = []
    form: tuple[Any, Any] | None = None

    def end_run() -> None:
        if len(alike) > 1:
            parts.append(_run(alike))
        else:
            parts.extend((name, _of_tensor(name, value)) for name, value in alike)
        alike.clear()

    for name, value in values.items():
        if not _may_be_in_a_run(value):
            end_run()
            parts.append((name, _column(name, value)))
            form = None
            continue
        if (own := (value.dtype, value.shape)) != form:
            end_run()
            form = own
        alike.append((name, value))
    end_run()
    return parts


def _may_be_in_a_run(value: Any) -> bool:
    if not getattr(value, "is_cpu", False) or value.is_nested or value.is_sparse:
        return False
    return 0 < value.nbytes < SMALL_BYTES and value.ndim > 0


def _run(alike: Sequence[tuple[str, torch.Tensor]]) -> Run:
    import torch

    name, first = alike[0]
    with torch.no_grad():
        data = _memory(torch.stack([value for _, value in alike]))
    return Run([name for name, _ in alike], _kind(name, first), first.shape[0], tuple(first.shape[1:]), data)


def _kind(name: str, value: torch.Tensor) -> str:
    kind = str(value.dtype).removeprefix("torch.")
    if kind not in ITEM_BYTES:
        raise _no_kind(name, kind)
    if str(value.layout) != "torch.strided" or value.device.type == "meta":
        raise BatchError(f"column '{name}' is {value.layout} on {value.device}; its values must lie in memory, dense")
    return kind


def _no_kind(name: str, kind: object) -> BatchError:
    return BatchError(f"column '{name}' is of {kind}; a column holds {', '.join(ITEM_BYTES)}, text, bytes or JSON")


def _memory(value: torch.Tensor) -> memoryview:
    """A tensor's bytes in row order: its own memory where it lies so, on the host."""
    import torch

    flat = value.detach().cpu().contiguous().resolve_conj().resolve_neg().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def _value(name: str, column: Column, form: Ragged, copy: bool) -> Any:
    if column.kind in (TEXT, BYTES, JSON):
        return list(column.values())
    flat = _tensor(column.kind, column.data)
    flat = flat.clone() if copy else flat
    if column.shape is not None:
        return flat.reshape(column.rows, *column.shape)
    rows, at = [], 0
    for row in range(column.rows):
        shape = column.row_shape(row)
        end = at + math.prod(shape)
        rows.append(flat[at:end].reshape(shape))
        at = end
    return rows if form == "list" else _nested(name, column, flat, rows)


def _nested(name: str, column: Column, flat: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
    """One nested tensor: over the same memory where only the first dimension is ragged."""
    import torch

    if column.rows == 0:
        raise BatchError(f"column '{name}': a nested tensor has at least one row; take it as a list")
    if len({row.shape[1:] for row in rows}) > 1:
        return torch.nested.nested_tensor(rows)  # the strided layout, which alone has several ragged dimensions
    lengths = torch.tensor([0, *(row.shape[0] for row in rows)])
    return torch.nested.nested_tensor_from_jagged(flat.reshape(-1, *rows[0].shape[1:]), lengths.cumsum(0))


def _tensor(kind: str, data: memoryview) -> torch.Tensor:
    """All numbers of a buffer, over its memory."""
    try:
        import torch
    except ImportError:
        raise MissingExtra("torch", "engine", "tensors of a batch") from None
    dtype = getattr(torch, kind)
    if not data.nbytes:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype)


def _is_leaf(kind: type) -> bool:
    from tensordict import NonTensorData, NonTensorStack, TensorDictBase

    return not issubclass(kind, TensorDictBase) or issubclass(kind, NonTensorData | NonTensorStack)


def _plain_rows(value: Any, rows: int) -> list[Any]:
    """Non-tensor data as one value a row; a single value counts for all rows."""
    plain = value.tolist() if hasattr(value, "tolist") else getattr(value, "data", value)
    return list(plain) if isinstance(plain, list) and len(plain) == rows else [plain] * rows
