import logging

import pytest

from mesh import logs


@pytest.fixture
def log(tmp_path):
    yield logs.setup("peer", tmp_path / "peer.log", stderr=False)
    for room in logs.ROOMS:
        logging.getLogger(room).handlers.clear()
        logging.getLogger(room).propagate = True


def test_a_flood_of_lines_is_cut_and_counted_and_errors_pass(log, tmp_path, monkeypatch):
    now = 0.0
    [bounded] = {f for handler in log.handlers for f in handler.filters}
    monkeypatch.setattr(bounded, "_clock", lambda: now)
    bounded._at = now
    for i in range(10_000):
        logging.getLogger("mesh.endpoint").warning("line %d", i)
    log.error("error: it ends")
    now += 1.0
    for i in range(200):
        log.info("later %d", i)
    kept = (tmp_path / "peer.log").read_text().splitlines()
    assert len(kept) == logs.LINES_AT_ONCE + 1 + logs.LINES_PER_S
    assert kept[logs.LINES_AT_ONCE - 1].endswith(f"line {logs.LINES_AT_ONCE - 1}")
    assert kept[logs.LINES_AT_ONCE].endswith(
        f"error: it ends ({10_000 - logs.LINES_AT_ONCE} lines before this were left out)"
    )
    assert kept[-1].endswith("later 29")


def test_a_name_with_line_breaks_makes_no_lines_of_its_own(log, tmp_path):
    log.warning("%s joined", "peer\n2026-01-01 00:00:00.000 ERROR error: forged\r\u2028x")
    assert len((tmp_path / "peer.log").read_text().splitlines()) == 1
