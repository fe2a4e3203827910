"""Batches: what goes in comes out, however it is cut, joined and carried; and what is shared is not copied."""

from __future__ import annotations

import pickle
from array import array
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster import Batch, BatchError, from_tensors, to_tensors

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float64, torch.int32]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    drawn = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(dtype)


@st.composite
def named_values(draw: Any, least_rows: int = 0) -> dict[str, Any]:
    rows = draw(st.integers(least_rows, 6))
    seed = draw(st.integers(0, 1000))
    values: dict[str, Any] = {
        "numbers": tensor((rows, *draw(st.lists(st.integers(0, 3), max_size=2))), draw(st.sampled_from(DTYPES)), seed),
        "words": draw(st.lists(st.text(), min_size=rows, max_size=rows)),
        "things": draw(st.lists(JSON, min_size=rows, max_size=rows)),
    }
    if rows:
        lengths = draw(st.lists(st.integers(0, 5), min_size=rows, max_size=rows))
        values["ragged"] = [tensor((n,), torch.int32, seed + n) for n in lengths]
        values["nested"] = [tensor((n, 2, n + 1), torch.float32, seed + n) for n in lengths]
    return values


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two)
    if isinstance(one, list):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two))
    return bool(one == two)


def check(batch: Batch, values: dict[str, Any]) -> None:
    got = to_tensors(batch)
    assert got.keys() == values.keys()
    for name, value in values.items():
        assert same(value, got[name]), name


@settings(deadline=None, max_examples=60)
@given(named_values())
def test_what_goes_into_a_batch_comes_out(values: dict[str, Any]) -> None:
    check(from_tensors(values), values)


@settings(deadline=None, max_examples=60)
@given(named_values(), st.data())
def test_slices_selections_and_joins_have_the_rows_that_lists_would(values: dict[str, Any], data: Any) -> None:
    batch = from_tensors(values)
    start = data.draw(st.integers(0, len(batch)))
    stop = data.draw(st.integers(start, len(batch)))
    check(batch.slice(start, stop), {name: value[start:stop] for name, value in values.items()})
    assert Batch.concat([batch.slice(0, start), batch.slice(start, stop), batch.slice(stop, len(batch))]) == batch
    if len(batch):
        rows = data.draw(st.lists(st.integers(0, len(batch) - 1), max_size=8))
        wanted = {
            name: value[rows] if isinstance(value, torch.Tensor) else [value[row] for row in rows]
            for name, value in values.items()
        }
        check(batch.select(rows), wanted)
        assert Batch.concat([batch.select(rows), batch]).slice(0, len(rows)) == batch.select(rows)


@settings(deadline=None, max_examples=60)
@given(named_values(), st.dictionaries(st.text(), JSON, max_size=3), st.integers(0, 3))
def test_a_batch_survives_every_way_of_being_carried(values: dict[str, Any], meta: Any, cut: int) -> None:
    whole = Batch(from_tensors(values).columns, meta)
    batch = whole.slice(min(cut, len(whole)), len(whole))
    header, buffers = batch.pieces()
    assert Batch.of_pieces(header, [bytes(buffer) for buffer in buffers]) == batch
    for protocol in (2, 5):
        assert pickle.loads(pickle.dumps(batch, protocol=protocol)) == batch  # noqa: S301
    out: list[pickle.PickleBuffer] = []
    carried = pickle.loads(pickle.dumps(batch, protocol=5, buffer_callback=out.append), buffers=out)  # noqa: S301
    assert carried == batch
    assert carried.meta == batch.meta


def address(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()


def test_large_columns_leave_a_pickle_out_of_band_and_uncopied() -> None:
    numbers = torch.arange(1 << 20)
    batch = from_tensors({"numbers": numbers, "words": [str(k) for k in range(1 << 20)]})
    out: list[pickle.PickleBuffer] = []
    in_band = pickle.dumps(batch, protocol=5, buffer_callback=out.append)
    assert len(in_band) < 2000
    assert address(out[1].raw()) == numbers.data_ptr()
    back = to_tensors(pickle.loads(in_band, buffers=out).only("numbers"))["numbers"]  # noqa: S301
    assert back.data_ptr() == numbers.data_ptr()


def test_slices_chunks_and_rejoined_neighbours_share_memory() -> None:
    numbers = torch.arange(1024).reshape(256, 4)
    batch = from_tensors({"numbers": numbers, "ragged": [torch.arange(k % 7) for k in range(256)]})
    chunks = batch.chunks(4)
    assert to_tensors(chunks[1])["numbers"].data_ptr() == numbers[64].data_ptr()
    rejoined = Batch.concat(chunks[1:3])
    assert to_tensors(rejoined)["numbers"].data_ptr() == numbers[64].data_ptr()
    ragged = batch.column("ragged").data
    assert address(rejoined.column("ragged").data) == address(ragged) + 8 * sum(k % 7 for k in range(64))
    assert batch.select(range(8, 16)).column("numbers").data.obj is batch.column("numbers").data.obj


def test_copies_are_made_where_they_are_asked_for() -> None:
    numbers = torch.zeros(4, 3)
    batch = from_tensors({"numbers": numbers})
    shared, own = to_tensors(batch)["numbers"], to_tensors(batch, copy=True)["numbers"]
    numbers += 1
    assert shared.sum() == 12
    assert own.sum() == 0


def test_thousands_of_small_tensors_become_one_buffer() -> None:
    values = {f"t{k}": torch.full((2, 128), k, dtype=torch.float32) for k in range(3000)}
    batch = from_tensors(values)
    header, buffers = batch.pieces()
    assert [buffer.nbytes for buffer in buffers if buffer.nbytes] == [3000 * 1024]
    check(Batch.of_pieces(header, buffers), values)
    # Workers that all get the same get all of its rows.
    assert batch.slice(0, 2).pieces() == (header, buffers)


def test_small_tensors_of_other_forms_between_them_keep_their_names_order_and_memory() -> None:
    values: dict[str, Any] = {f"a{k}": torch.full((2, 3), k) for k in range(5)}
    values |= {"words": ["x", "y"], "b0": torch.zeros(2, dtype=torch.bool), "b1": torch.ones(2, dtype=torch.bool)}
    values |= {"alone": torch.rand(2, 1), "large": torch.rand(2, 20_000), "empty": torch.rand(2, 0)}
    batch = from_tensors(values)
    back = Batch.of_pieces(*batch.pieces())
    check(back, values)
    assert list(back.columns) == list(values) == list(to_tensors(back))
    assert (len(back.columns), back.nbytes) == (len(values), batch.nbytes)
    assert to_tensors(back.slice(1, 2))["a3"].tolist() == [[3, 3, 3]]
    assert to_tensors(Batch.concat([back, batch]))["a4"].shape == (4, 3)
    own = to_tensors(back, copy=True)
    to_tensors(back)["a1"].zero_()
    assert own["a1"].sum() == 6
    assert values["a1"].sum() == 6, "a run is a copy"
    with pytest.raises(BatchError, match="has no column 'a9'"):
        back.column("a9")


def test_a_jagged_tensor_comes_back_over_the_same_memory() -> None:
    rows = [torch.arange(n * 2, dtype=torch.float32).reshape(n, 2) for n in (3, 1, 4)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    batch = from_tensors({"x": nested})
    back = to_tensors(batch, ragged="jagged")["x"]
    assert back.is_nested
    assert back.layout == torch.jagged
    assert same(rows, list(back.unbind()))
    assert back.values().data_ptr() == address(batch.column("x").data)


def test_rows_ragged_in_several_dimensions_come_back_as_a_nested_tensor() -> None:
    rows = [torch.rand(2, 3), torch.rand(1, 4)]
    back = to_tensors(from_tensors({"x": rows}), ragged="jagged")["x"]
    assert same(rows, list(back.unbind()))


def test_a_samples_own_arrays_are_a_column_without_any_library() -> None:
    tokens = [array("i", [1, 2, 3]), array("i"), array("i", [4])]
    assert [row.tolist() for row in to_tensors(from_tensors({"tokens": tokens}))["tokens"]] == [[1, 2, 3], [], [4]]


def test_json_holds_what_other_codecs_lose() -> None:
    rows = [2**200, float("inf"), "\ud800", {"a": [None, True, {"b": 1.5}]}, "\x00", -(2**63) - 1]
    assert from_tensors({"x": rows}).values("x") == rows
    nan = from_tensors({"x": [[float("nan")]]}).values("x")[0][0]
    assert nan != nan


def test_numpy_arrays_of_numbers_strings_and_objects() -> None:
    np = pytest.importorskip("numpy")
    objects = np.empty(2, dtype=object)
    objects[:] = [{"a": np.int64(3)}, [1.5]]
    values = {
        "f": np.arange(6.0).reshape(2, 3),
        "s": np.array(["a", "bé"]),
        "o": objects,
        "u": np.arange(2, dtype=np.uint16),
    }
    got = to_tensors(from_tensors(values))
    assert got["f"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert got["s"] == ["a", "bé"]
    assert got["o"] == [{"a": 3}, [1.5]]
    assert got["u"].dtype == torch.uint16
    odd = to_tensors(from_tensors({"backwards": np.arange(4)[::-1], "big": np.arange(4, dtype=">i4")}))
    assert odd["backwards"].tolist() == [3, 2, 1, 0]
    assert (odd["big"].tolist(), odd["big"].dtype) == ([0, 1, 2, 3], torch.int32)
    with pytest.raises(BatchError, match=r"'when' is of datetime64\[D\]; a column holds bool"):
        from_tensors({"when": np.array(["2020-01-01"], dtype="datetime64[D]")})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_tensors({"a": torch.zeros(2), "b": torch.zeros(3)}), "different numbers of rows: a 2, b 3"),
        (lambda: from_tensors({"a": torch.tensor(1)}), "'a' has no rows"),
        (lambda: from_tensors({"a": torch.eye(2).to_sparse()}), "'a' is torch.sparse_coo on cpu; .* dense"),
        (lambda: from_tensors({"a": torch.eye(2).to_sparse_csr()}), "'a' is torch.sparse_csr on cpu; .* dense"),
        (lambda: from_tensors({"a": torch.ones(2, device="meta")}), "on meta; its values must lie in memory"),
        (lambda: from_tensors({"a": torch.nested.nested_tensor([])}), "a nested tensor without rows"),
        (lambda: from_tensors({"a": 3}), "'a' is int; it must be a tensor"),
        (lambda: from_tensors({"a": [1, object()]}), "column 'a', row 1: object is no JSON value"),
        (lambda: from_tensors({"a": [torch.zeros(1), torch.zeros(1, 1)]}), "rows have kinds"),
        (lambda: from_tensors({"a": torch.zeros(3)}).chunks(2), "3 rows don't divide into 2 chunks"),
        (lambda: from_tensors({"a": torch.zeros(3)}).slice(1, 5), "rows 1 to 5 of a batch of 3"),
        (lambda: from_tensors({"a": torch.zeros(3)}).select([2, 3]), "row 3 of a batch of 3"),
        (lambda: from_tensors({"a": torch.zeros(3)}).column("b"), "no column 'b'; it has: a"),
        (lambda: from_tensors({"a": torch.zeros(3)}).values("a"), "take them with to_tensors"),
        (lambda: Batch.concat([]), "no batches to join"),
        (lambda: Batch.concat([from_tensors({"a": ["x"]}), from_tensors({"b": ["x"]})]), "column a, b"),
        (
            lambda: Batch.concat([from_tensors({"a": torch.zeros(1)}), from_tensors({"a": torch.zeros(1, 2)})]),
            "can't be in one batch",
        ),
        (lambda: Batch.of_pieces(bytes(8) + b"\xc1", []), "no header of a batch"),
    ],
)
def test_a_refusal_says_what_was_wrong(make: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        make()


def test_a_header_that_points_outside_its_buffers_is_refused() -> None:
    header, buffers = from_tensors({"a": torch.zeros(100_000)}).pieces()
    with pytest.raises(BatchError, match="points outside its buffers"):
        Batch.of_pieces(header, [buffers[0], bytes(10)])
