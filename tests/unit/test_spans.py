import json
import time
from pathlib import Path

from transport import spans
from transport.spans import Spans

HEADER = {"peer": "trainer@a", "id": "1", "role": "trainer"}


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_recorded_is_on_disk_with_the_time_of_the_wall(tmp_path):
    before = time.time()
    began = time.perf_counter()
    file = Spans(tmp_path / "spans" / "trainer@a.jsonl", HEADER)
    file.record({"span": "learn", "lane": "main"}, began, began + 0.25)
    file.flush()
    header, row = rows(file.path)
    assert header == HEADER
    assert (row["span"], row["lane"], row["s"]) == ("learn", "main", 0.25)
    assert before - 0.01 < row["at"] < time.time() + 0.01


def test_a_peer_keeps_two_files_of_bounded_size_the_newest_spans_and_whose_they_are(tmp_path):
    file = Spans(tmp_path / "p.jsonl", HEADER, most_bytes=1000)
    for number in range(200):
        file.record({"span": "learn", "number": number}, number, number + 1)
        file.flush()
    newer, older = rows(tmp_path / "p.jsonl"), rows(tmp_path / "p.older.jsonl")
    assert newer[0] == older[0] == HEADER
    kept = [row["number"] for row in older[1:] + newer[1:]]
    assert kept == list(range(kept[0], 200))
    assert len(list(tmp_path.iterdir())) == 2
    assert max(p.stat().st_size for p in tmp_path.iterdir()) < 1200


def test_spans_that_find_no_disk_are_given_up_and_come_again_with_it(tmp_path):
    (tmp_path / "spans").write_text("in the way")
    file = Spans(tmp_path / "spans" / "p.jsonl", HEADER)
    file.record({"span": "lost"}, 1.0, 2.0)
    file.flush()
    (tmp_path / "spans").unlink()
    file.record({"span": "kept"}, 2.0, 3.0)
    file.flush()
    assert [row.get("span") for row in rows(file.path)] == [None, "kept"]


def test_a_full_disk_stops_nothing():
    file = Spans(Path("/dev/full"), HEADER)
    for _ in range(3):
        file.record({"span": "lost"}, 1.0, 2.0)
        file.flush()
    assert not file._headed, "it would have to be said again, were there room"


def test_more_spans_than_may_wait_are_left_out(tmp_path):
    file = Spans(tmp_path / "p.jsonl", HEADER)
    for _ in range(spans.MOST_WAITING + 10):
        file.record({"span": "learn"}, 0.0, 0.0)
    file.flush()
    assert len(rows(file.path)) == 1 + spans.MOST_WAITING


def test_a_process_that_keeps_no_spans_records_none():
    assert spans._here is None
    spans.record("learn", 0.0)
    spans.credit(1, "rollout", 0.0)
    spans.flush()
