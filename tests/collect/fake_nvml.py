"""The libnvidia-ml.so.1 of tests/stub/nvml.c: compiled once, loaded into this process, with a state file that a test writes."""

import ctypes
import os
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "stub" / "nvml.c"


@cache
def library() -> Path:
    """Its folder, for LD_LIBRARY_PATH."""
    header = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    include = next(header.glob("*/include/nvml.h"), None)
    assert include is not None, "nvml.h is missing: pip install nvidia-nvml-dev"
    folder = Path(tempfile.gettempdir()) / f"kvbench-nvml-{os.getuid()}-{int(SOURCE.stat().st_mtime)}"
    built = folder / "libnvidia-ml.so.1"
    if not built.exists():
        folder.mkdir(exist_ok=True)
        part = folder / f"part.{os.getpid()}"
        flags = ["-Wall", "-Werror", "-O1", "-shared", "-fPIC", f"-I{include.parent}", "-Wl,-soname,libnvidia-ml.so.1"]
        subprocess.run(["gcc", *flags, "-o", part, SOURCE], check=True)
        part.replace(built)
    return folder


class Fake:
    """What the fake answers: `say(power=250000)`, `say({"gpu1.error": 15})`. Later lines win."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.write_text("")
        os.environ["KVBENCH_FAKE_NVML"] = str(file)
        ctypes.CDLL(str(library() / "libnvidia-ml.so.1"))  # by its soname it is the one that pynvml then finds

    def say(self, lines: dict[str, float] | None = None, **more: float) -> None:
        with self.file.open("a") as file:
            file.writelines(f"{name} {value:.0f}\n" for name, value in {**(lines or {}), **more}.items())
