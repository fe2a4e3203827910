from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from data_support import jsonl, task, write_jsonl

from penstock.config.run import SourceConfig
from penstock.data import read_source
from penstock.errors import DataError, MissingExtra

MESSAGES = [{"role": "user", "content": "2 + 2?"}]


def test_jsonl_rows_come_with_all_their_fields_and_their_line(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "one?", "answer": "1"}\r\n\n  \n{"prompt": "zw\xc3\xb6lf?", "answer": 12}'
    )
    one, twelve = read_source(jsonl(path))
    assert (one.question, one.fields, one.where) == ("one?", {"prompt": "one?", "answer": "1"}, f"{path}:1")
    assert (twelve.question, twelve.fields["answer"], twelve.where) == ("zwölf?", 12, f"{path}:4")


def test_the_prompt_field_may_be_named_and_may_be_chat_messages(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", [{"chat": [{**MESSAGES[0], "name": "left out"}], "prompt": 3}])
    (row,) = read_source(jsonl(path, prompt_field="chat"))
    assert row.question == MESSAGES


def test_no_more_rows_are_read_than_asked_for(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", [{"prompt": "1"}, {"prompt": "2"}, "not a row"])
    assert [row.question for row in read_source(jsonl(path, size=2))] == ["1", "2"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", r"not JSON: Expecting property name .* at column 2"),
        (b'{"prompt": "a"} {"prompt": "b"}', r"not JSON: Extra data"),
        (b'["prompt"]', r"a row must be a JSON object, and this is list \['prompt'\]"),
        (b"null", r"a row must be a JSON object, and this is null"),
        (b'{"prompt": "\xff"}', r"not UTF-8: byte 12 is 0xff"),
        (b"[" * 100_000, r"JSON nested too deeply"),
        (b'{"question": "a"}', r"no field 'prompt'; the row's fields are 'question'. Set the source's prompt_field"),
        (b"{}", r"no field 'prompt'; the row's fields are none"),
        (b'{"prompt": ""}', r"the field 'prompt' is empty"),
        (b'{"prompt": " \\n"}', r"the field 'prompt' is empty"),
        (b'{"prompt": null}', r"must be text or a list of chat messages, and is null"),
        (b'{"prompt": 3}', r"must be text or a list of chat messages, and is int 3"),
        (b'{"prompt": {"role": "user"}}', r"must be text or a list of chat messages, and is dict"),
        (b'{"prompt": "half \\ud800"}', r"holds half of a surrogate pair at character 5"),
        (b'{"prompt": []}', r"is an empty list of chat messages"),
        (b'{"prompt": ["hi"]}', r"chat message 0 of 'prompt' must be an object with role and content, and is str 'hi'"),
        (b'{"prompt": [{"role": "user"}]}', r"chat message 0 of 'prompt': 'content' must be text, and is missing"),
        (b'{"prompt": [{"role": 1, "content": ""}]}', r"'role' must be text, and is int 1"),
        (b'{"prompt": [{"role": "user", "content": ["x"]}]}', r"'content' must be text, and is list"),
        (b'{"prompt": [{"role": " ", "content": "x"}]}', r"'role' is empty"),
        (b'{"prompt": [{"role": "user", "content": " "}]}', r"all chat messages of 'prompt' are empty"),
        (b'{"prompt": [{"role": "user", "content": "\\udc00"}]}', r"half of a surrogate pair"),
        (
            b'{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            r"the last chat message of 'prompt' is the assistant's",
        ),
    ],
)
def test_a_malformed_row_is_refused_with_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n\n' + line + b"\n")
    rows = read_source(jsonl(path))
    assert next(rows).question == "good"
    with pytest.raises(DataError, match=rf"q\.jsonl:3: .*{message}"):
        next(rows)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf"])
def test_a_source_that_is_not_there_is_refused(kind: Any) -> None:
    with pytest.raises(DataError, match=r"there is no .* no/such/place \(looked in /"):
        list(read_source(SourceConfig(kind=kind, path="no/such/place")))
    with pytest.raises(DataError, match=r"there is no .* /no/such/place$"):
        list(read_source(SourceConfig(kind=kind, path="/no/such/place")))
    with pytest.raises(DataError, match="has no path"):
        list(read_source(SourceConfig(kind=kind)))


def test_an_empty_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"empty\.jsonl has no rows"):
        list(read_source(jsonl(tmp_path / "empty.jsonl")))
    with pytest.raises(DataError, match="is a folder; kind 'jsonl' wants a file"):
        list(read_source(jsonl(tmp_path)))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", [{"prompt": "x"}])

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"q\.jsonl can't be read: Permission denied"):
        list(read_source(jsonl(path)))


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> SourceConfig:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return SourceConfig(kind="parquet", path=str(path))


def test_parquet_rows_come_with_their_number(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "answer": n, "chat": MESSAGES} for n in range(3)]
    source = write_parquet(tmp_path / "q.parquet", rows)
    read = list(read_source(source))
    assert [row.fields for row in read] == rows
    assert [row.where for row in read] == [f"{source.path}[{n}]" for n in range(3)]
    chat = SourceConfig(kind="parquet", path=source.path, prompt_field="chat", size=1)
    assert [row.question for row in read_source(chat)] == [MESSAGES]


def test_a_malformed_parquet_row_is_refused_with_its_number(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "q.parquet", [{"prompt": "good"}, {"prompt": None}])
    with pytest.raises(DataError, match=r"q\.parquet\[1\]: the field 'prompt' must be text .* null"):
        list(read_source(source))


@pytest.mark.parametrize("contents", [b"", b"not parquet at all", b"PAR1" + b"\0" * 40 + b"PAR1"])
def test_a_broken_parquet_file_is_refused(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "q.parquet").write_bytes(contents)
    with pytest.raises(DataError, match=r"q\.parquet is not a readable Parquet file \(after row 0\)"):
        list(read_source(SourceConfig(kind="parquet", path=str(tmp_path / "q.parquet"))))


def test_a_parquet_file_without_rows_is_refused(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), tmp_path / "q.parquet")
    with pytest.raises(DataError, match=r"q\.parquet has no rows"):
        list(read_source(SourceConfig(kind="parquet", path=str(tmp_path / "q.parquet"))))


@pytest.fixture(scope="module")
def saved_data_sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("hf")
    one = datasets.Dataset.from_list([{"prompt": "one?", "answer": "1"}, {"prompt": "two?", "answer": "2"}])
    one.save_to_disk(folder / "one")
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(folder / "two")
    datasets.Dataset.from_list([{"prompt": "one?"}, {"prompt": ""}]).save_to_disk(folder / "malformed")
    return folder


def test_hugging_face_rows_come_with_their_number(saved_data_sets: Path) -> None:
    path = saved_data_sets / "one"
    read = list(read_source(SourceConfig(kind="hf", path=str(path))))
    assert [dict(row.fields) for row in read] == [{"prompt": "one?", "answer": "1"}, {"prompt": "two?", "answer": "2"}]
    assert [row.where for row in read] == [f"{path}[0]", f"{path}[1]"]
    split = SourceConfig(kind="hf", path=str(saved_data_sets / "two" / "test"), size=1)
    assert [row.question for row in read_source(split)] == ["one?"]


def test_a_hugging_face_source_that_is_no_single_data_set_is_refused(saved_data_sets: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds several splits; give the path of one: .*two/train, .*two/test"):
        list(read_source(SourceConfig(kind="hf", path=str(saved_data_sets / "two"))))
    with pytest.raises(DataError, match="is not a data set written by datasets' save_to_disk"):
        list(read_source(SourceConfig(kind="hf", path=str(tmp_path))))
    with pytest.raises(DataError, match=r"malformed\[1\]: the field 'prompt' is empty"):
        list(read_source(SourceConfig(kind="hf", path=str(saved_data_sets / "malformed"))))


def test_a_broken_hugging_face_data_set_is_refused(saved_data_sets: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(saved_data_sets / "one", tmp_path / "one")
    for file in (tmp_path / "one").glob("*.arrow"):
        file.write_bytes(b"broken")
    with pytest.raises(DataError, match="is not a data set written by"):
        list(read_source(SourceConfig(kind="hf", path=str(tmp_path / "one"))))


def test_a_task_makes_its_items_from_the_seed_and_the_options() -> None:
    source = task("spell_backward", 4, seed=1000, min_word_len=3, max_word_len=4)
    rows = list(read_source(source))
    assert [row.where for row in rows] == [f"spell_backward[{n}]" for n in range(1000, 1004)]
    assert all(row.question == row.fields["question"] for row in rows)
    assert all(len(row.fields["answer"]) in (3, 4) for row in rows)
    assert rows[0].fields["task_options"] == {"min_word_len": 3, "max_word_len": 4}
    assert rows == list(read_source(source))
    (shifted,) = read_source(task("spell_backward", 1, seed=1001, min_word_len=3, max_word_len=4))
    assert shifted.question == rows[1].question


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (task("spell_backwards", 4), r"has no task 'spell_backwards'; did you mean spell_backward"),
        (task("zzzzzz", 4), r"has no task 'zzzzzz'; it has \d+ tasks, such as chain_sum"),
        (task("spell_backward", None), r"set the source's size"),
        (task("spell_backward", 4, min_word_length=3), r"refuses the options .*min_word_length"),
        (task("spell_backward", 4, min_word_len=9, max_word_len=3), r"refuses the options .*max_word_len must be"),
        (task("spell_backward", 4, min_word_len=90, max_word_len=99), r"spell_backward\[0\]: the task failed to make"),
    ],
)
def test_a_task_that_cannot_be_made_is_refused(source: SourceConfig, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(read_source(source))


@pytest.mark.parametrize(
    ("kind", "module", "extra"),
    [("parquet", "pyarrow", "train"), ("hf", "datasets", "datasets"), ("reasoning_gym", "reasoning_gym", "train")],
)
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"penstock\[{extra}\]"):
        list(read_source(SourceConfig(kind=kind, path=str(tmp_path), size=1)))


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    source = SourceConfig.model_construct(kind="csv", path=str(tmp_path), size=None)
    with pytest.raises(DataError, match="kind is 'csv'; it must be one of jsonl, parquet, hf, reasoning_gym"):
        list(read_source(source))
