"""From a file to tables: an export is opened as it is, a capture goes through an installed nsys."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbench.nsys import CaptureError
from kvbench.nsys.tables import Tables

WAIT = 900.0  # seconds of wall time for an export; 8,000 ranges take 0.1 s
CAPTURES = (".nsys-rep", ".qdrep")
_INSTALLED = (
    "/opt/nvidia/nsight-systems*/*/bin/nsys",
    "/opt/nvidia/nsight-systems*/*/target-linux-*/nsys",
    "/usr/local/cuda/bin/nsys",
)
_MAGIC = b"SQLite format 3\0"
_MARKS = ("META_DATA_EXPORT", "EXPORT_META_DATA", "NVTX_EVENTS", "TARGET_INFO_SESSION_START_TIME", "CUPTI_ACTIVITY_KIND_RUNTIME")


@contextmanager
def opened(path: Path, wait: float = WAIT) -> Iterator[Tables]:
    """The tables of a capture (.nsys-rep, .qdrep) or of an export (.sqlite, by its content). `wait`: seconds an export may take.

    Raises CaptureError: no such file, neither of the two, no nsys, or nsys failed or did not end.
    """
    try:
        if not (path.is_file() or path.is_dir()) and path.exists():  # opening a pipe would wait for whoever writes to it
            raise CaptureError(f"{path} is not a file")
        with open(path, "rb") as file:
            head = file.read(len(_MAGIC))
    except OSError as error:
        raise CaptureError(f"{path}: {error.strerror or error}") from None
    if head == _MAGIC:
        yield from _export(path)
    elif path.suffix in CAPTURES and head:
        with tempfile.TemporaryDirectory(prefix="kvbench-nsys-") as folder:
            made = Path(folder) / "export.sqlite"
            exported(path, made, wait)
            yield from _export(made)
    elif path.suffix == ".qdstrm":
        raise CaptureError(
            f"{path} is a raw stream that was never imported: QdstrmImporter, beside nsys, makes a .nsys-rep of it"
        )
    else:
        what = "is empty" if not head else "is neither a capture (.nsys-rep, .qdrep) nor its SQLite export (.sqlite)"
        raise CaptureError(f"{path} {what}; `nsys export -t sqlite FILE.nsys-rep` makes an export")


def _export(path: Path) -> Iterator[Tables]:
    tables = Tables(path)
    try:
        if not any(tables.has(name) for name in _MARKS):
            raise CaptureError(f"{path} is a database, but no export of Nsight Systems: it has none of {', '.join(_MARKS)}")
        yield tables
    finally:
        tables.close()


def installed() -> str | None:
    """Where nsys is: on PATH, else the newest where NVIDIA's packages put it."""
    found = shutil.which("nsys")
    if found is None:
        places = [str(path) for pattern in _INSTALLED for path in Path("/").glob(pattern.lstrip("/")) if os.access(path, os.X_OK)]
        found = max(places, default=None)
    return found


def exported(path: Path, made: Path, wait: float = WAIT) -> None:
    """Export a capture as SQLite to `made`, by an installed nsys, in at most `wait` seconds. Raises CaptureError."""
    nsys = installed()
    if nsys is None:
        raise CaptureError(
            f"{path} is read through nsys, and none is installed here: install Nsight Systems, or run "
            f"`nsys export -t sqlite {path.name}` where it was captured and give the .sqlite"
        )
    command = [nsys, "export", "-t", "sqlite", "-f", "true", "-o", str(made), str(path.resolve())]
    try:
        code, said = _bounded(command, wait)
    except OSError as error:
        raise CaptureError(f"{path}: {nsys} cannot be started: {error.strerror or error}") from None
    if code is None:
        raise CaptureError(f"{path}: nsys export did not end within {wait:g} s and was stopped: {_last(said)}")
    if code != 0 or not made.is_file() or not made.stat().st_size:  # its exit codes alone are not to be trusted
        raise CaptureError(f"{path}: nsys export failed (exit code {code}): {_last(said)}")


def _bounded(command: list[str], wait: float) -> tuple[int | None, str]:
    """(exit code, or None where it was stopped; what it said). Its children go with it, and hold no pipe of ours."""
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        code: int | None = None
        try:
            code = process.wait(wait)
        except subprocess.TimeoutExpired:
            pass  # said by the None
        finally:
            if code is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out.seek(0)
        return code, out.read(1 << 20).decode("utf-8", "replace")


def _last(said: str) -> str:
    """What nsys said last, without its progress bars."""
    lines = [line.strip() for line in said.replace("\r", "\n").splitlines()]
    told = [line for line in lines if line and not line.startswith(("Processing ", "["))]
    return told[-1][:300] if told else "it said nothing"
