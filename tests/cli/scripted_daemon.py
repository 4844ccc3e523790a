"""A daemon as far as `Hosts` can tell: takes its flags, answers /v1/status, obeys or ignores signals.

`--model` says how it behaves: "ready", "starting", "dies", "deaf" (to signals), "broken" (no HTTP). It remembers the
handoff "early" at once and "late" when it has been asked a few times. It writes its flags to standard output, which is
its log.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


def flags() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    words = iter(sys.argv[2:-1])
    for word in words:
        found.setdefault(word, []).append(next(words))
    return found


FLAGS = flags()
MODEL = FLAGS["--model"][0]


class Answers(BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self) -> None:
        Answers.asked += 1
        peers = [{"name": p.split("=")[0], "connected": True, "roles": ["prefill"]} for p in FLAGS.get("--peer", [])]
        traces = [{"handoff": name} for name, asked in (("early", 1), ("late", 5)) if Answers.asked >= asked]
        engine = None if MODEL == "starting" else {"model": "m"}
        self._json({"engine": engine, "peers": peers, "recent_handoffs": traces})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self._json({"got": json.loads(body), "header": self.headers.get("x-zc-placement")}, status=503)

    def _json(self, body: object, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("X-Zc-Placement", "local")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


def main() -> None:
    print(" ".join(sys.argv[1:]), flush=True)
    if MODEL == "dies":
        print("the model cannot be loaded", flush=True)
        sys.exit(1)
    if MODEL == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if MODEL == "broken":
        time.sleep(60)
    host, port = FLAGS["--http"][0].split(":")
    HTTPServer((host, int(port)), Answers).serve_forever()


if __name__ == "__main__":
    main()
