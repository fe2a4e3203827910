from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from observe_scenes import run_events

from penstock.errors import DataError, StorageError
from penstock.observe import Event, EventLog, MetricsLog, events, read_events, read_metrics


def warned(where: str = "here", message: str = "look") -> events.Warned:
    return events.Warned(ts=1.0, where=where, message=message)


def test_events_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    log = run_events()
    with EventLog(tmp_path / "events.jsonl") as written:
        for event in log:
            written.emit(event)
    assert list(read_events(tmp_path / "events.jsonl")) == log


def test_each_line_is_json_and_names_its_event(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.emit(warned(message="a\nb"))
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(line) == {"event": "warning", "ts": 1.0, "where": "here", "message": "a\nb"}


def test_an_event_is_on_disk_before_emit_returns(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.emit(warned())
        assert len(list(read_events(tmp_path / "events.jsonl"))) == 1


def test_listeners_hear_every_event_in_the_order_of_the_file(tmp_path: Path) -> None:
    heard: list[Event] = []
    with EventLog(tmp_path / "events.jsonl", heard.append) as log:
        threads = [
            threading.Thread(target=lambda k=k: [log.emit(warned(str(k), str(n))) for n in range(50)]) for k in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(heard) == 200
    assert list(read_events(tmp_path / "events.jsonl")) == heard


def test_a_full_disk_is_told_once_counted_and_survived() -> None:
    heard: list[Event] = []
    log = EventLog(Path("/dev/full"), heard.append)
    for number in range(3):
        log.emit(warned(message=str(number)))
    troubles = [event for event in heard if isinstance(event, events.Warned) and event.where == "event log"]
    assert len(troubles) == 1
    assert "No space left on device" in troubles[0].message
    assert log.dropped == 3
    assert len(heard) == 4, "the events themselves still reach the view"
    log.close()


def test_a_full_disk_is_told_on_stderr_where_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(Path("/dev/full"))
    log.emit(warned())
    assert "No space left on device" in capsys.readouterr().err
    log.close()


def test_a_disk_that_fills_in_mid_line_leaves_whole_lines_and_writing_goes_on_when_there_is_room(
    tmp_path: Path,
) -> None:
    # A file size limit makes the kernel cut a write short, as a full disk does.
    script = textwrap.dedent("""
        import resource, sys
        from pathlib import Path
        from penstock.observe import EventLog, events
        heard = []
        log = EventLog(Path(sys.argv[1]), heard.append)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (150, hard))
        for number in range(4):
            log.emit(events.Warned(ts=1.0, where="here", message=str(number)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        log.emit(events.Warned(ts=1.0, where="here", message="room"))
        print(log.dropped, sum("written again" in event.message for event in heard))
    """)
    path = tmp_path / "events.jsonl"
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "1"]
    assert [event.message for event in read_events(path) if isinstance(event, events.Warned)] == ["0", "1", "room"]


def test_half_a_line_of_a_killed_process_is_left_out_by_the_reader_and_dropped_by_the_next_writer(
    tmp_path: Path,
) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.emit(warned(message="first"))
    with path.open("ab") as file:
        file.write(b'{"event":"warn')
    assert len(list(read_events(path))) == 1
    heard: list[Event] = []
    with EventLog(path, heard.append) as log:
        log.emit(warned(message="second"))
    assert [event.message for event in read_events(path) if isinstance(event, events.Warned)] == ["first", "second"]
    assert any("half a line" in event.message for event in heard if isinstance(event, events.Warned))


def test_a_line_that_is_no_event_is_refused_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event":"warning","ts":1,"where":"","message":""}\n{"event":"nonsense","ts":1}\n')
    with pytest.raises(DataError, match=r"events\.jsonl:2: not an event: .*nonsense"):
        list(read_events(path))


def test_a_log_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jsonl: can't be read"):
        list(read_events(tmp_path / "gone.jsonl"))


def test_a_log_that_can_not_be_opened_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="can't be opened for writing"):
        EventLog(tmp_path)


def test_metrics_come_back_by_step_and_what_is_no_number_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(0, {"reward_mean": 0.5, "kl": float("nan")})
        log.write(1, {"reward_mean": 0.6})
    first, second = read_metrics(path)
    assert (first["step"], first["reward_mean"], first["kl"]) == (0, 0.5, None)
    assert second["reward_mean"] == 0.6
    assert all("NaN" not in line for line in path.read_text().splitlines())


def test_a_step_written_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for value in (0.1, 0.2):
        with MetricsLog(path) as log:
            log.write(3, {"reward_mean": value})
    (row,) = read_metrics(path)
    assert row["reward_mean"] == 0.2


def test_steps_behind_the_checkpoint_that_a_run_went_on_from_are_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for value, steps in ((0.1, range(9)), (0.2, range(4, 6)), (0.3, range(5, 7))):
        with MetricsLog(path) as log:
            for step in steps:
                log.write(step, {"reward_mean": value})
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == list(range(7))
    assert [row["reward_mean"] for row in rows] == [0.1] * 4 + [0.2] + [0.3] * 2


def test_metrics_on_a_full_disk_are_told_once_and_counted() -> None:
    heard: list[Event] = []
    log = MetricsLog(Path("/dev/full"), emit=heard.append)
    log.write(0, {"reward_mean": 0.5})
    log.write(1, {"reward_mean": 0.5})
    assert log.dropped == 2
    assert [event.where for event in heard if isinstance(event, events.Warned)] == ["metrics"]
    log.close()


@pytest.mark.parametrize("line", ['{"reward_mean": 1}', '{"step": null}', '{"step": "x"}', "[]"])
def test_a_line_that_is_no_steps_metrics_is_refused_with_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{line}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: not a step's metrics"):
        read_metrics(path)


def test_tensorboard_gets_every_metric_of_every_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with MetricsLog(tmp_path / "metrics.jsonl", tensorboard=tmp_path / "board") as log:
        for step in range(3):
            log.write(step, {"reward_mean": step / 10})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert [(point.step, round(point.value, 3)) for point in board.Scalars("reward_mean")] == [
        (0, 0.0),
        (1, 0.1),
        (2, 0.2),
    ]


def test_tensorboard_without_its_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.errors import MissingExtra

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtra, match=r"penstock\[tensorboard\]"):
        MetricsLog(tmp_path / "metrics.jsonl", tensorboard=tmp_path / "board")


def test_closing_gives_the_file_back(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        EventLog(tmp_path / f"{number}.jsonl").close()
    assert len(os.listdir("/proc/self/fd")) == before
