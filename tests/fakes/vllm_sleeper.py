"""A fake vLLM that can sleep, pause, reload and lose its adapters' weights, for `fakes.vllm_interpreter`.

A version's logprobs are a function of what lies in its adapter directory (with ``"zero": true`` in its
configuration they are the base model's), and may be noisy. Chats are answered with a
fingerprint of the base model's weights, so a test can tell whose weights answered. It keeps vLLM's rules: a
paused server answers nobody, one that sleeps cannot load or compute and dies over trying, sleeping aborts
what runs or waits inside, and waking up ends a pause. It has a door like that of `art_versions`.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import zlib
from pathlib import Path
from typing import Any

from fakes.loopback_server import send
from fakes.vllm_server import FakeVLLM, Reply
from fakes.vllm_wire import error_body

MAIN = "from fakes.vllm_sleeper import main; main()"
"""The source of its ``api_server`` module."""

HALF_WOKEN = "answered by weights that sleep has damaged"
"""What is said under the name of an adapter that slept and was not loaded again."""


class SleepingVLLM(FakeVLLM):
    """The server.

    Args:
        names: of the base model.
        fault: ``adapters``: they are lost by sleep; ``adapters-for-good``: even when loaded again;
            ``base``: so is the base model; ``wake-dies``: it dies when it is woken; ``wake-refuses``: it
            stays asleep;
            ``refuses``: to sleep; ``no-reload``: it cannot read new weights; ``reload-dies``: it dies
            over it.
        model: the directory of its weights.
        noise: nats by which each logprob of an adapter is off at most, otherwise each time.
    """

    def __init__(
        self, names: tuple[str, ...], *, fault: str = "", model: str = "", noise: float = 0.0, **more: Any
    ) -> None:
        super().__init__(self._say, models=names, **more)
        self.model = model
        self.fault = fault
        self.noise = noise
        self._random = random.Random(0)
        self.adapters: dict[str, str] = {}
        self.damaged: set[str] = set()
        self.asleep = False
        self.acts: list[str] = []
        self._open = asyncio.Event()
        self._open.set()
        self._door = asyncio.Event()
        self._door.set()
        self._aborted = False
        self._running = 0
        self._sleeps = 0
        self._patience: float | None = None
        self._why = ""
        self.arrived = 0

    def _say(self, request: dict[str, Any]) -> Reply:
        if self._aborted:
            return Reply("", finish_reason="abort")
        return Reply(HALF_WOKEN if request["model"] in self.damaged else fingerprint(self.model))

    async def _respond(self, method, path, headers, raw, reader, writer) -> None:  # type: ignore[no-untyped-def]
        if not path.endswith("completions"):
            if path == "/pause":
                self.acts.append("pause")
                self._open.clear()
                while self._running:
                    await asyncio.sleep(0.005)
            if path == "/art/version/hold":
                self.acts.append("hold")
                self._door.clear()
                while self._running:
                    await asyncio.sleep(0.005)
            if path == "/art/version/hold":
                held = json.loads(raw)
                self._patience, self._why = held["seconds"], held["why"]
            await super()._respond(method, path, headers, raw, reader, writer)
            return
        self.arrived += 1
        if "x-art-owner" not in headers:
            try:
                await asyncio.wait_for(self._door.wait(), self._patience)
            except TimeoutError:
                send(writer, 503, error_body(f"the request was held for {self._patience:g} s: {self._why}"))
                return
        sleeps = self._sleeps
        await self._open.wait()
        if self.asleep:
            self._die("CUDA error: an illegal memory access was encountered")
        self._running += 1
        self._aborted = self._sleeps != sleeps
        try:
            await super()._respond(method, path, headers, raw, reader, writer)
        finally:
            self._running -= 1

    def _text(self, request, choices) -> bytes:  # type: ignore[no-untyped-def]
        if request.get("prompt_logprobs") is None:
            return super()._text(request, choices)
        self.acts.append(f"canary {request['model']}")
        assert request["cache_salt"], "the prefix cache must not answer it"
        prompt: list[int] = request["prompt"]
        weights = self._weights(request["model"])
        # Whose kernels compute it, whatever has become of its weights.
        noise = self.noise if request["model"] in self.adapters else 0.0

        def read(token: int, position: int) -> float:
            return _logprob(weights, token, position) + self._random.uniform(-noise, noise)

        entries: list[Any] = [None]
        for position, token in enumerate(prompt[1:], 1):
            entries.append({str(token): {"logprob": read(token, position), "rank": 1}})
        # The allowed token that has a bias is certain, so that the other one says what the weights are.
        (forced,) = map(int, request["logit_bias"])
        (other,) = set(request["allowed_token_ids"]) - {forced}
        bias = request["logit_bias"][str(forced)]
        places = range(len(prompt), len(prompt) + request["max_tokens"])
        tops = [{f"token_id:{forced}": 0.0, f"token_id:{other}": read(other, i) - bias} for i in places]
        choice = {"index": 0, "text": "", "prompt_logprobs": entries, "finish_reason": "length"}
        choice["logprobs"] = {
            "top_logprobs": tops if request["logprobs"] >= 2 else [],
            "token_logprobs": [0.0] * len(places),
            "tokens": [f"token_id:{forced}"] * len(places),
        }
        return json.dumps({"choices": [choice]}).encode()

    def _weights(self, name: str) -> bytes:
        base = b"broken" if "base" in self.damaged else b"base"
        if name not in self.adapters or name in self.damaged:
            return base
        config = (Path(self.adapters[name]) / "adapter_config.json").read_bytes()
        return base if json.loads(config).get("zero") else config

    def _plain(self, method: str, path: str, raw: bytes) -> tuple[int, bytes]:
        body = json.loads(raw) if raw else {}
        if path == "/tokenize":
            return 200, json.dumps({"tokens": list(body["prompt"].encode())}).encode()
        if path == "/v1/load_lora_adapter":
            self._must_be_awake()
            name = body["lora_name"]
            if not Path(body["lora_path"]).is_dir():
                return 404, error_body(f"No adapter found for {body['lora_path']}")
            self.acts.append(f"load {name}")
            self.adapters[name] = body["lora_path"]
            self.models = (*(self.models or ()), name)
            if self.fault != "adapters-for-good":
                self.damaged.discard(name)
            return 200, b"{}"
        if path == "/v1/unload_lora_adapter":
            self._must_be_awake()
            self.acts.append(f"unload {body['lora_name']}")
            if self.adapters.pop(body["lora_name"], None) is None:
                return 404, b'{"error": {"message": "no such adapter"}}'
            self.models = tuple(n for n in self.models or () if n != body["lora_name"])
            return 200, b"{}"
        if path == "/v1/models":
            cards = [{"id": n, "root": self.adapters.get(n, "base")} for n in self.models or ()]
            return 200, json.dumps({"data": cards}).encode()
        if path in ("/pause", "/art/version/hold"):
            return 200, b"{}"
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            assert not self._running
            if self.fault == "no-reload":
                return 500, b'{"error": {"message": "this loader cannot reload"}}'
            if self.fault == "reload-dies":
                self._die("RuntimeError: EngineCore encountered an issue.")
            self.acts.append("reload")
            self.model = body["kwargs"]["weights_path"]
            return 200, b"{}"
        if path == "/art/version":
            self.acts.append("rename " + " ".join(body["names"]))
            self.models = tuple(body["names"])
            self._door.set()
            return 200, b"{}"
        if path == "/sleep" and self.fault == "refuses":
            return 500, b'{"error": {"message": "not enough main memory"}}'
        if path == "/sleep":
            self.acts.append(f"sleep {self._running} running")
            self.asleep = True
            self._sleeps += 1
            if self.fault.startswith("adapters"):
                self.damaged |= set(self.adapters)
            if self.fault == "base":
                self.damaged |= {"base"}
            return 200, b"{}"
        if path == "/wake_up":
            if self.asleep and self.fault == "wake-dies":
                self._die("torch.OutOfMemoryError: CUDA out of memory.")
            if self.asleep and self.fault == "wake-refuses":
                return 500, error_body("CUDA out of memory")
            self.acts.append("wake")
            self.asleep = False
            self._open.set()
            return 200, b"{}"
        if path == "/art/version/release":
            self.acts.append("open")
            self._door.set()
            return 200, b"{}"
        if path == "/arrived":
            return 200, str(self.arrived).encode()
        if path == "/resume":
            self.acts.append("resume")
            self._open.set()
            return 200, b"{}"
        if path == "/reset_prefix_cache":
            self.acts.append("reset_prefix_cache")
            return 200, b'{"success": true}'
        if path == "/acts":
            return 200, json.dumps(self.acts).encode()
        return super()._plain(method, path, raw)

    def _must_be_awake(self) -> None:
        if self.asleep:
            self._die("CUDA error: an illegal memory access was encountered")

    def _die(self, why: str) -> None:
        print(why, flush=True)
        os._exit(1)


def fingerprint(model: str) -> str:
    """What tells the weights in a directory from others."""
    files = sorted(Path(model).glob("*.safetensors"))
    return f"weights {zlib.crc32(b''.join(path.read_bytes() for path in files)):08x}"


def _logprob(weights: bytes, token: int, position: int) -> float:
    return -(zlib.crc32(weights + bytes([token % 251, position % 251])) % 4096) / 1024


def main() -> None:
    """Serve as vLLM's command line says. The fault is in ``FAKE_SLEEP_FAULT``, for the first life only.

    (For all, with ``FAKE_EVERY_LIFE``: several servers are several lives.)

    The noise is in ``FAKE_CANARY_NOISE``, for every life.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--model")
    parser.add_argument("--served-model-name", nargs="+")
    args, _ = parser.parse_known_args()
    print("arguments:", sys.argv[1:], flush=True)
    fault = os.environ.get("FAKE_SLEEP_FAULT", "")
    lives = Path(os.environ["FAKE_LIVES"])
    first = not lives.exists()
    lives.touch()

    async def serve() -> None:
        await server._serve()

    server = SleepingVLLM(
        tuple(args.served_model_name),
        fault=fault if first or os.environ.get("FAKE_EVERY_LIFE") else "",
        model=args.model,
        noise=float(os.environ.get("FAKE_CANARY_NOISE", 0)),
        port=args.port,
        latency=float(os.environ.get("FAKE_LATENCY", 0)),
    )
    asyncio.run(serve())
