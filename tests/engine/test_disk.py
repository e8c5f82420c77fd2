"""Real files: what is written is found again after a kill at any byte, damage is a miss, and the disk's use is bounded."""

import errno
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvbench.engine.disk as module
from kvbench.engine.disk import Disk
from kvbench.engine.engine import Engine
from kvbench.engine.record import HEADER, content
from kvbench.engine.tiers import TiersSpec, build_below
from kvbench.profile import load_engine, load_hardware, load_model
from tests.engine.test_tiers import A, B, job, serve
from tests.whole import ROOT

SIZE = 1000


OPENED: list[Disk] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


def disk(folder: Path, blocks: float = 1000, segment: int = 10 * (SIZE + HEADER)) -> Disk:
    ticks = itertools.count()
    OPENED.append(Disk(folder, blocks * SIZE, lambda: next(ticks), segment))
    return OPENED[-1]


def filled(folder: Path, count: int) -> Disk:
    built = disk(folder)
    for key in range(count):
        assert built.write(0, key, SIZE)
    return built


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*.kv"))


def test_what_was_written_is_found_again_in_order(tmp_path: Path) -> None:
    first = filled(tmp_path, 25)
    first.forget(0, 3)
    first.check({(0, key) for key in range(25) if key != 3})
    first.close()
    assert len(files(tmp_path)) == 3
    again = disk(tmp_path)
    assert list(again.recover()) == [(0, key) for key in range(25)]  # what was forgotten is there until its segment goes
    assert all(again.sound(0, key, SIZE) for key in range(25))
    assert (again.torn, again.damaged, again.read) == (0, 0, 25 * SIZE)
    assert again.write(1, -5, SIZE)
    assert again.sound(1, -5, SIZE)


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 5 * (SIZE + HEADER)))
def test_a_file_that_ends_anywhere_keeps_its_whole_records(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("torn")
    filled(folder, 5).close()
    os.truncate(files(folder)[0], cut)
    again = disk(folder)
    whole, rest = divmod(cut, SIZE + HEADER)
    assert again.recovered == whole
    assert again.torn == (rest > 0)
    assert all(again.sound(0, key, SIZE) for key in range(whole))
    assert again.write(0, 99, SIZE)  # and goes on where the last whole one ends
    again.close()
    assert disk(folder).recovered == whole + 1


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 5 * (SIZE + HEADER) - 1), flip=st.integers(1, 255))
def test_a_byte_that_changed_costs_one_block(tmp_path_factory: pytest.TempPathFactory, at: int, flip: int) -> None:
    folder = tmp_path_factory.mktemp("flip")
    filled(folder, 5).close()
    data = bytearray(files(folder)[0].read_bytes())
    data[at] ^= flip
    files(folder)[0].write_bytes(data)
    again = disk(folder)
    assert [again.sound(0, key, SIZE) for key in range(5)] == [key != at // (SIZE + HEADER) for key in range(5)]
    assert again.damaged + again.torn == 1


def test_a_block_of_another_key_or_content_is_not_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = disk(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(module, "content", lambda pool, key, length: content(pool, key + 1, length))
        built.write(0, 7, SIZE)
    assert not built.sound(0, 7, SIZE)
    assert built.damaged == 1


WRITER = """
    import sys
    from pathlib import Path
    from kvbench.engine.disk import Disk
    disk = Disk(Path(sys.argv[1]), 200e6, lambda: 0, 2_000_000)
    for key in range(10**9):
        disk.write(0, key, 70_001)
        if key == 20:
            print("under way", flush=True)
"""


@pytest.mark.parametrize("after", [0.0, 0.013, 0.05, 0.11])
def test_killed_while_it_writes_everything_whole_is_there(tmp_path: Path, after: float) -> None:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        with pytest.raises(ValueError, match="in use by another run"):
            disk(tmp_path)
        time.sleep(after)
        writer.send_signal(signal.SIGKILL)
    again = disk(tmp_path, 200_000, 2_000_000)
    held = again.recover()
    assert len(held) > 20
    keys = [key for _, key in held]
    assert keys == list(range(keys[0], keys[-1] + 1))  # none is missing; room may have been won back at the old end
    assert all(again.sound(0, key, 70_001) for key in keys)
    assert again.damaged == 0
    assert again.torn <= 1


@pytest.mark.parametrize("live", [0.3, 1.0])
def test_files_take_no_more_than_they_may(tmp_path: Path, live: float) -> None:
    """40 blocks may be held; as many as `live` says are, each written again and again."""
    built = disk(tmp_path, blocks=40)
    kept: list[int] = []
    for key in range(600):
        if len(kept) >= 40 * live:
            built.forget(0, kept.pop(key * 7 % len(kept)))
        assert built.write(0, key, SIZE)
        kept.append(key)
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 1.25 * 40 * SIZE + 2 * 11 * (SIZE + HEADER)
    built.check({(0, key) for key in kept})
    assert all(built.sound(0, key, SIZE) for key in kept)
    assert (built.moved > 0) == (live == 1.0)


def test_clear_deletes_the_files(tmp_path: Path) -> None:
    built = filled(tmp_path, 25)
    built.clear()
    assert not files(tmp_path)
    assert built.write(0, 1, SIZE)
    built.check({(0, 1)})


def test_a_full_disk_ends_the_writing_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built, real = disk(tmp_path), os.pwrite

    def half(fd: int, data: bytes, offset: int) -> int:
        if offset > 3000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[: len(data) // 2 + 1], offset)

    monkeypatch.setattr(os, "pwrite", half)
    took = [built.write(0, key, SIZE) for key in range(5)]
    assert took == [True, True, False, False, False]
    assert built.stopped == "No space left on device"
    assert [built.sound(0, key, SIZE) for key in range(3)] == [True, True, False]
    assert files(tmp_path)[0].stat().st_size == 2 * (SIZE + HEADER)
    assert built.gauges("ssd")["ssd_real_stopped"] == 1


def test_a_directory_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written: Not a directory; name a directory that can"):
        disk(tmp_path / "file" / "below")
    first = disk(tmp_path / "a")
    with pytest.raises(ValueError, match="in use by another run"):
        disk(tmp_path / "a")
    first.close()
    disk(tmp_path / "a")


def engine(folder: Path, blocks: int = 9) -> Engine:
    model, hardware, profile = load_model("smollm2-135m"), load_hardware("rtx-4090"), load_engine("vllm", block=4, blocks=blocks)
    spec = TiersSpec.model_validate({"ssd": {"capacity": 2**23, "real": str(folder)}, "write": "write_through"})
    return Engine(model, hardware, profile, below=build_below(spec, model, hardware, profile, lambda: 0))


def test_a_tier_with_files_serves_what_an_earlier_engine_left(tmp_path: Path) -> None:
    first = engine(tmp_path)
    serve(first, (0.0, job(0, (A, 16))), (1.0, job(1, (B, 24))))
    first.close()
    second = engine(tmp_path)
    assert second.facts()["tiers"]["ssd"]["real"]["recovered_blocks"] == 10
    log = serve(second, (0.0, job(0, (A, 16), (103, 1))))
    assert log.done[0].cached == 16
    assert second.gauges()["ssd_real_read_bytes"] == 4 * 4 * second.model.kv_token_bytes(1)
    second.close()


def test_a_damaged_block_is_a_miss(tmp_path: Path) -> None:
    first = engine(tmp_path)
    serve(first, (0.0, job(0, (A, 16))))
    first.close()
    path = files(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[len(data) * 5 // 8] ^= 1  # in the third block of four
    path.write_bytes(data)
    second = engine(tmp_path)
    assert serve(second, (0.0, job(0, (A, 16), (103, 1)))).done[0].cached == 8
    assert second.gauges()["ssd_real_damaged"] == 1
    second.check()
    second.close()
