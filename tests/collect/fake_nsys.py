"""A fake nsys: keeps a log of its calls, runs what it launches, and fails in the ways that the real one does."""

import sqlite3
from pathlib import Path

SCRIPT = """\
#!/bin/sh
here={folder}
mode=$(cat $here/mode)
echo "$(date +%s.%N) $*" >>$here/calls
for word in "$@"; do case $word in --output=*) echo "${{word#*=}}" >$here/stem ;; esac; done
case "$1" in
--version) [ $mode = dead ] && exec sleep 600; echo "NVIDIA Nsight Systems version 2023.4.4.54-fake" ;;
launch)
    [ $mode = broken ] && {{ echo "cannot launch here" >&2; exit 1; }}
    shift
    while case "$1" in -*) true ;; *) false ;; esac; do
        case "$1" in --session-new=*) echo "${{1#*=}}" >$here/session ;; esac
        shift
    done
    exec "$@" ;;
sessions)
    echo "              ID         TIME                       STATE LAUNCH NAME"
    [ -f $here/session ] && echo "         1012514        00:04                    Launched      1 $(cat $here/session)" ;;
start)
    case $mode in
    failing) echo "Configuring is not allowed in this state." >&2; exit 1 ;;
    hanging) sleep 600 ;;
    esac ;;
stop)
    case $mode in
    lying) : ;;
    raw) : >"$(cat $here/stem).qdstrm" ;;
    empty) cp $here/empty.sqlite "$(cat $here/stem).nsys-rep" ;;
    slow) sleep 600 ;;
    *) cp $here/whole.sqlite "$(cat $here/stem).nsys-rep" ;;
    esac ;;
shutdown) rm -f $here/session ;;
esac
exit 0
"""


class FakeNsys:
    """`program`: its path. mode: ok, or how it fails. Its captures hold 64 ranges; those of mode `empty` none."""

    def __init__(self, folder: Path, mode: str = "ok") -> None:
        folder.mkdir()
        self.folder, self.program = folder, folder / "nsys"
        self.program.write_text(SCRIPT.format(folder=folder))
        self.program.chmod(0o755)
        (folder / "calls").touch()
        (folder / "mode").write_text(mode)
        for name, ranges in (("whole", 64), ("empty", 0)):
            export = sqlite3.connect(folder / f"{name}.sqlite")
            export.executescript(
                "CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT);"
                "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER);"
            )
            rows = [(i * 1000, i * 1000 + 500, 59, f"DecoderLayer_{i % 32}", 1) for i in range(ranges)]
            export.executemany("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?)", rows)
            export.commit()
            export.close()

    def session(self, name: str) -> None:
        """Someone has launched a server under it."""
        (self.folder / "session").write_text(name)

    @property
    def calls(self) -> list[str]:
        """What it was called with, in order."""
        return [line.partition(" ")[2] for line in (self.folder / "calls").read_text().splitlines()]

    def verbs(self) -> list[str]:
        return [call.split()[0] for call in self.calls]
