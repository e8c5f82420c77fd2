"""A small server to be launched: `python small.py PORT [KEY=VALUE ...]`. It answers chat completions with two tokens as a stream.

late=S: listens after S s. die=S: exits with code 3 after S s. deaf=1: ignores SIGTERM. brood=1: has a child in its group and
another in a session of its own. flood=N: prints N MB at first. slow=S,FROM: each answer takes S s once FROM requests came.
nvtx=1: each request is 32 ranges DecoderLayer_i of nvtx. say=TEXT: printed first. refuse=1: exits with code 1 at once.
pids=FILE: where its pids go.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ASKED = dict(pair.split("=", 1) for pair in sys.argv[2:])
COUNT = iter(range(10**9))
SLOW, FROM = (float(part) for part in ASKED.get("slow", "0,0").split(","))
SLEEPER = [sys.executable, "-c", "import time; time.sleep(120)"]


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        return

    def do_GET(self) -> None:
        found = self.path == "/v1/models"
        self.reply(200 if found else 404, {"data": [{"id": "m", "max_model_len": 4096}]} if found else {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        layers()
        number = next(COUNT)
        time.sleep(SLOW if number >= FROM else 0)
        usage = {"prompt_tokens": 8, "completion_tokens": 2, "total_tokens": 10}
        events = [{"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": None}]}]
        events += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, {"choices": [], "usage": usage}]
        data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
        self.send(200, "text/event-stream", data)

    def reply(self, status: int, body: object) -> None:
        self.send(status, "application/json", json.dumps(body).encode())

    def send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Quiet(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that leaves is no news."""


def layers() -> None:
    if "nvtx" in ASKED:
        import nvtx

        for index in range(32):
            with nvtx.annotate(f"DecoderLayer_{index}"):
                pass


def main() -> None:
    pids = [os.getpid()]
    if "say" in ASKED:
        print(ASKED["say"], flush=True)
    if "refuse" in ASKED:
        sys.exit(1)
    if "deaf" in ASKED:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "brood" in ASKED:
        pids.append(subprocess.Popen(SLEEPER).pid)
        pids.append(subprocess.Popen(SLEEPER, start_new_session=True).pid)
    if "pids" in ASKED:
        with open(ASKED["pids"], "w") as file:
            file.write(" ".join(map(str, pids)))
    for _ in range(int(ASKED.get("flood", 0))):
        print(("x" * 99 + "\n") * 10_000, end="", flush=True)
    time.sleep(float(ASKED.get("late", 0)))
    if "die" in ASKED:
        threading.Timer(float(ASKED["die"]), lambda: (print("fatal: told to", flush=True), os._exit(3))).start()
    Quiet(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()


main()
