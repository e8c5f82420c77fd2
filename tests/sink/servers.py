"""Databases for tests: the real influxd 1.6.7 and VictoriaMetrics of Debian (unpacked by the test set-up), and a rude one."""

import json
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

TOOLS = Path(__file__).parents[2] / ".venv/tools/usr/bin"
CONFIG = """\
reporting-disabled = true
bind-address = "127.0.0.1:{rpc}"
[meta]
  dir = "{folder}/meta"
[data]
  dir = "{folder}/data"
  wal-dir = "{folder}/wal"
  index-version = "tsi1"
  query-log-enabled = false
[http]
  bind-address = "127.0.0.1:{port}"
  log-enabled = false
  max-body-size = {most}
[monitor]
  store-enabled = false
[continuous_queries]
  enabled = false
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fetch(url: str, data: bytes | None = None) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


class Server:
    """A process that can be killed and started again on the same port and data."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self.folder, self.port = folder, port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        folder.mkdir(parents=True, exist_ok=True)
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        assert TOOLS.is_dir(), "the test set-up unpacks the databases: make check"
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log)
        for _ in range(400):
            try:
                if fetch(f"{self.url}/ping")[0] == 204:
                    return
            except OSError:
                pass
            assert self.process.poll() is None, (self.folder / "log").read_text()[-2000:]
            time.sleep(0.025)
        raise AssertionError(f"{self.command()[0]} does not answer: {(self.folder / 'log').read_text()[-2000:]}")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class Influxd(Server):
    """influxd 1.6.7 with the database `kvbench`."""

    most = 0  # bytes of a body; 0: no limit

    def command(self) -> list[str]:
        text = CONFIG.format(rpc=free_port(), folder=self.folder, port=self.port, most=self.most)
        config = self.folder / "influxd.conf"
        config.write_text(text)
        return [str(TOOLS / "influxd"), "run", "-config", str(config)]

    def start(self) -> None:
        super().start()
        self.query("CREATE DATABASE kvbench")

    def query(self, text: str, db: str = "kvbench") -> list[dict[str, Any]]:
        """The series of one InfluxQL statement: {name, tags, columns, values}; times in ns."""
        status, body = fetch(f"{self.url}/query", urlencode({"q": text, "db": db, "epoch": "ns"}).encode())
        found = json.loads(body)
        assert status == 200, body
        assert "error" not in found["results"][0], (text, found)
        return list(found["results"][0].get("series", []))

    def rows(self, text: str) -> list[dict[str, Any]]:
        """The rows of all series, by column."""
        return [dict(zip(s["columns"], v, strict=True)) | s.get("tags", {}) for s in self.query(text) for v in s["values"]]

    def count(self, measurement: str, field: str) -> int:
        rows = self.rows(f'SELECT COUNT("{field}") AS n FROM "{measurement}"')
        return int(rows[0]["n"]) if rows else 0


class Victoria(Server):
    """VictoriaMetrics 1.79, which merges samples of one series in one millisecond."""

    def command(self) -> list[str]:
        return [str(TOOLS / "victoria-metrics"), f"-storageDataPath={self.folder}/data", f"-httpListenAddr=127.0.0.1:{self.port}",
                "-retentionPeriod=100y", "-search.latencyOffset=0s", "-loggerLevel=WARN", "-memory.allowedBytes=256MB",
                "-dedup.minScrapeInterval=1ms"]  # fmt: skip

    def export(self, match: str) -> list[dict[str, Any]]:
        """Series as {metric, values, timestamps (ms)}."""
        fetch(f"{self.url}/internal/force_flush")
        _, body = fetch(f"{self.url}/api/v1/export?{urlencode({'match[]': match, 'start': 0, 'end': time.time() + 86_400})}")
        return [json.loads(line) for line in body.splitlines()]


@contextmanager
def running(server: Server) -> Iterator[Any]:
    server.start()
    try:
        yield server
    finally:
        server.kill()


class Rude:
    """A database in this process that answers as it is told: `script(lines, posts so far)` gives (status, headers, body), after
    `delay` seconds. What it took is in `lines`."""

    def __init__(self, script: Any = None, delay: float = 0.0) -> None:
        self.script, self.delay = script, delay
        self.lines: list[str] = []
        self.connections: list[socket.socket] = []
        self.posts: list[tuple[float, str, dict[str, str], list[str]]] = []  # (when, path, headers, lines)

    def __enter__(self) -> "Rude":
        rude = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                rude.connections.append(self.connection)

            def do_POST(self) -> None:
                lines = self.rfile.read(int(self.headers["Content-Length"])).decode().splitlines()
                rude.posts.append((time.perf_counter(), self.path, dict(self.headers), lines))
                if rude.delay:
                    time.sleep(rude.delay)
                status, headers, body = rude.script(lines, len(rude.posts)) if rude.script else (204, {}, b"")
                if 200 <= status < 300:
                    rude.lines += lines
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if status != 204:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that is killed resets its connections
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
