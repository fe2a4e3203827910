"""Batches to and from TensorDict and verl's DataProto, with the packages themselves. Run by `make test-verl`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict
from verl import DataProto

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from test_batch import named_values, same

from penstock.cluster import (
    Batch,
    BatchError,
    from_dataproto,
    from_tensordict,
    from_tensors,
    to_dataproto,
    to_tensordict,
    to_tensors,
)


def proto() -> DataProto:
    objects = np.empty(4, dtype=object)
    objects[:] = [{"answer": k, "parts": [k, None]} for k in range(4)]
    return DataProto.from_dict(
        tensors={"ids": torch.arange(12).reshape(4, 3), "mask": torch.ones(4, 3, dtype=torch.bool)},
        non_tensors={"uid": np.array(["a", "b", "c", "d"], dtype=object), "info": objects},
        meta_info={"temperature": 0.7, "steps": 3},
    )


def test_a_dataproto_comes_back_the_same_and_shares_its_tensors() -> None:
    data = proto()
    batch = from_dataproto(data)
    header, buffers = batch.pieces()
    back = to_dataproto(Batch.of_pieces(header, buffers))
    assert torch.equal(back.batch["ids"], data.batch["ids"])
    assert torch.equal(back.batch["mask"], data.batch["mask"])
    assert back.non_tensor_batch["uid"].tolist() == ["a", "b", "c", "d"]
    assert back.non_tensor_batch["info"].tolist() == data.non_tensor_batch["info"].tolist()
    assert back.meta_info == data.meta_info
    assert to_tensors(batch)["ids"].data_ptr() == data.batch["ids"].data_ptr()


@settings(deadline=None, max_examples=60)
@given(named_values(least_rows=1))
def test_any_batch_comes_back_from_a_tensordict_and_from_a_dataproto(values: dict[str, Any]) -> None:
    batch = from_tensors(values, meta={"step": 3})
    for back in (from_tensordict(to_tensordict(batch)), from_dataproto(to_dataproto(batch))):
        got = to_tensors(back)
        assert got.keys() == values.keys()
        for name, value in values.items():
            assert same(value, got[name]), name
    assert from_dataproto(to_dataproto(batch)).meta == {"step": 3}


def test_verls_own_operations_work_on_what_comes_back() -> None:
    back = to_dataproto(from_dataproto(proto()))
    halves = back.chunk(2)
    assert DataProto.concat(halves).batch["ids"].tolist() == back.batch["ids"].tolist()
    assert to_dataproto(from_dataproto(proto()).slice(1, 3)).non_tensor_batch["uid"].tolist() == ["b", "c"]


def test_a_dataproto_of_objects_alone() -> None:
    data = DataProto(batch=None, non_tensor_batch={"uid": np.array(["a", "b"], dtype=object)})
    back = to_dataproto(from_dataproto(data))
    assert back.batch is None
    assert back.non_tensor_batch["uid"].tolist() == ["a", "b"]


def test_a_tensordict_with_nested_tensors_and_other_data() -> None:
    jagged = torch.nested.nested_tensor([torch.arange(2.0), torch.arange(5.0)], layout=torch.jagged)
    data = TensorDict({"x": torch.arange(6).reshape(2, 3), "r": jagged, "in": {"y": torch.ones(2)}}, batch_size=[2])
    data.set_non_tensor("who", "both")
    batch = from_tensordict(data)
    assert batch.values("who") == ["both", "both"]
    back = to_tensordict(batch)
    assert torch.equal(back["x"], data["x"])
    assert torch.equal(back["in.y"], torch.ones(2))
    assert [row.tolist() for row in back["r"].unbind()] == [row.tolist() for row in jagged.unbind()]
    assert back[0]["who"] == "both"


def test_text_and_json_come_back_from_a_tensordict() -> None:
    rows = {"x": torch.arange(3), "words": ["a", "b", "c"], "things": [{"k": [1, 2]}, None, 2.5]}
    batch = from_tensors(rows)
    again = from_tensordict(to_tensordict(batch))
    assert again.values("words") == rows["words"]
    assert again.values("things") == rows["things"]


def test_a_tensordict_of_two_batch_dimensions_is_refused() -> None:
    with pytest.raises(BatchError, match="one dimension"):
        from_tensordict(TensorDict({"x": torch.zeros(2, 3)}, batch_size=[2, 3]))
