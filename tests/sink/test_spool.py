"""Lines on disk: in order, acknowledged once, whole after a full disk or a kill."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.sink import spool as module
from kvbench.sink.spool import Spool

ABC = b"a\nbb\nccc\n"


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    """An acknowledgement counts for good at once, where a test does not say otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SETTLED", 0.0)
        yield


def test_what_was_acknowledged_just_before_an_outage_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(module, "stopwatch", lambda: now[0])
    monkeypatch.setattr(module, "SETTLED", 10.0)
    spool = Spool(tmp_path)
    spool.append(ABC)
    for second, line in ((1, b"a\n"), (8, b"bb\n"), (12, b"ccc\n")):
        now[0] = second * 10**9
        spool.ack(line)
    spool.rewind()
    assert (spool.read(100), spool.acked) == (b"bb\nccc\n", 1)
    assert list(Spool(tmp_path).delivered()) == [b"a"], "nor does another process take them for delivered"
    spool.ack(b"bb\nccc\n")
    spool.rewind()
    assert spool.acked == 1


def test_lines_come_back_in_order_until_they_are_acknowledged(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    assert spool.read(100) == b""
    spool.append(ABC)
    assert spool.read(4) == b"a\n"
    assert spool.read(100) == ABC
    spool.ack(b"a\nbb\n")
    assert (spool.lines, spool.acked, spool.read(1)) == (3, 2, b"ccc\n")
    spool.close()
    again = Spool(tmp_path)
    assert again.read(100) == b"ccc\n"
    assert list(again.delivered()) == [b"a", b"bb"]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.binary(min_size=1, max_size=30).map(lambda raw: raw.replace(b"\n", b"") + b"\n"), max_size=30), st.integers(1, 60)
)
def test_no_line_is_lost_or_doubled_over_segments_and_restarts(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], most: int
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SEGMENT", 40)
        spool, out = Spool(folder), []
        for n, line in enumerate(lines):
            spool.append(line)
            if n % 3 == 2:
                out.append(spool.read(most))
                spool.ack(out[-1])
            if n % 7 == 6:
                spool.close()
                spool = Spool(folder)
        while data := spool.read(most):
            out.append(data)
            spool.ack(data)
        assert b"".join(out) == b"".join(lines)
        assert [line + b"\n" for line in spool.delivered()] == lines
        spool.close()


def test_a_full_disk_takes_all_of_a_block_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path)
    spool.append(b"first\n")
    real, left = os.write, [3]

    def full(fd: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return left.__setitem__(0, 0) or real(fd, data[:3])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        spool.append(b"second\nthird\n")
    monkeypatch.undo()
    spool.append(b"fourth\n")
    assert spool.read(100) == b"first\nfourth\n"
    assert spool.lines == 2


def test_a_torn_end_and_a_damaged_offset_are_survived(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append(ABC)
    spool.ack(b"a\n")
    spool.close()
    with open(tmp_path / "000001.lp", "ab") as file:
        file.write(b"torn")
    again = Spool(tmp_path)
    assert again.read(100) == b"bb\nccc\n"
    again.cut()
    again.append(b"new\n")
    assert (again.read(100), list(again.delivered())) == (b"new\n", [b"a"])
    again.close()
    (tmp_path / "ack").write_text("x")
    assert Spool(tmp_path).read(100) == b"a\nnew\n"


def test_clearing_leaves_what_was_refused(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append(ABC)
    spool.ack(ABC)
    spool.bury(b"bb\n", "400 (because\nof this)")
    spool.clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dead.lp"]
    assert (tmp_path / "dead.lp").read_text() == "# 400 (because of this)\nbb\n"
