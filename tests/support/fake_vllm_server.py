"""Takes the place of ``rljob_runtime.engine.vllm.serve``: answers /health to whoever asks; ends at once for the model ``broken``."""

import argparse
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "served-model-name", "host", "dtype", "middleware"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "tensor-parallel-size", "pipeline-parallel-size", "max-num-seqs", "seed", "kv-cache-memory-bytes"):
        parser.add_argument(f"--{name}", required=True, type=int)
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, required=True)
    parser.add_argument("--enforce-eager", action="store_true", required=True)
    options = parser.parse_args()
    if options.model == "broken":
        sys.exit(f"no such model; a key is {'there' if os.environ.get('VLLM_API_KEY') else 'missing'}")
    print(f"pid {os.getpid()}", flush=True)
    HTTPServer((options.host, options.port), _Handler).serve_forever()


if __name__ == "__main__":
    main()
