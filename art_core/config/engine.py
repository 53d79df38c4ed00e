"""How the policy is served, by which engine.

Invariant: an address, a key, replicas and merged weights are refused with a kind that has none; the others
are read by the kinds that their description names, or by all.
"""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from art_core.config.settings import Settings

DTypeName = Literal["auto", "float32", "bfloat16"]


class EngineConfig(Settings):
    """How the policy is served."""

    kind: Literal["auto", "embedded", "vllm", "external"] = Field(
        default="auto",
        description="auto: vLLM where CUDA and vLLM are present, else embedded; external: servers that "
        "somebody else runs, at base_url",
    )
    base_url: str | tuple[str, ...] | None = Field(
        default=None, description="external: where it answers, ending in /v1; several for several replicas"
    )
    api_key: str | None = Field(default=None, repr=False, description="external: sent as the bearer token")
    replicas: int = Field(
        default=1, ge=1, description="vLLM: servers to start, with a gateway in front that shares them out"
    )
    gateway: bool = Field(
        default=False,
        description="put a gateway in front, so that stock clients are captured and metrics are served; "
        "several replicas, and servers of somebody else's, always have one",
    )
    devices: tuple[str, ...] | None = Field(
        default=None,
        description="vLLM: CUDA_VISIBLE_DEVICES of each replica, such as ('0,1', '2,3'); None: one replica "
        "has all, several have tensor_parallel_size * data_parallel_size each",
    )
    dtype: DTypeName = Field(
        default="auto", description="weights' type; auto: bfloat16, float32 if deterministic"
    )
    host: str = Field(
        default="127.0.0.1", description="address to listen on; loopback unless you know why not"
    )
    port: int | None = Field(
        default=None, ge=1, le=65535, description="port to listen on; None: any free one"
    )
    max_model_len: int = Field(
        default=4096, ge=16, description="most tokens of prompt and completion together"
    )
    max_batch: int = Field(default=64, ge=1, description="most sequences decoded together")
    gpu_memory_utilization: float = Field(
        default=0.3, gt=0, le=1, description="share of the GPU that vLLM takes"
    )
    colocate: bool = Field(
        default=False,
        description="vLLM: it sleeps while the trainer trains on the same GPU, so that each has the whole "
        "GPU in its turn; False: both stay, the trainer in what gpu_memory_utilization leaves",
    )
    publish: Literal["adapter", "merged"] = Field(
        default="adapter",
        description="vLLM: versions are adapters beside the base model, several at a time, or (merged) full "
        "weights that take the place of the version before: no cost per token, one at a time",
    )
    prefix_cache_tokens: int = Field(
        default=65536,
        ge=0,
        description="embedded: most tokens whose keys and values are in memory, those of running requests "
        "and the prefix cache together; never less than max_model_len, so that one request fits",
    )
    deterministic: bool = Field(
        default=False,
        description="embedded: batch-invariant decoding, so a seed gives the same tokens twice (slower)",
    )
    enforce_eager: bool = Field(
        default=False, description="vLLM: no CUDA graphs, quicker to start, slower after"
    )
    max_loras: int = Field(
        default=4, ge=1, description="vLLM: versions answering at one moment; at least staleness + 2"
    )
    max_cpu_loras: int | None = Field(
        default=None, ge=1, description="vLLM: most versions served side by side; None: 4 * max_loras"
    )
    max_lora_rank: int | None = Field(
        default=None, ge=1, description="vLLM: room for adapters up to this rank; None: LoRAConfig.rank"
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, description="vLLM: GPUs that share each layer, for a model too large for one"
    )
    data_parallel_size: int = Field(
        default=1, ge=1, description="vLLM: copies of the model that share the requests of one server"
    )
    chat_template: Path | None = Field(
        default=None,
        description="a Jinja file to render messages with, in serving and in fine-tuning alike; None: the "
        "model's own template; external: names the one that its server was given",
    )
    tool_call_parser: str | None = Field(
        default="auto",
        description="what reads tool calls out of answers; auto: by template and model; None: requests with "
        "tools are refused; embedded: hermes or llama3_json",
    )
    reasoning_parser: str | None = Field(
        default="auto",
        description="what splits reasoning from content; auto: by model; None: it stays in the content",
    )
    start_timeout: float = Field(default=600.0, gt=0, description="seconds until a server must answer")
    hang_timeout: float = Field(
        default=30.0, gt=0, description="vLLM: seconds without an answer after which it counts as dead"
    )
    stall_timeout: float = Field(
        default=300.0,
        gt=0,
        description="vLLM: seconds without an engine step while requests run, likewise",
    )
    hold_timeout: float = Field(
        default=3600.0,
        gt=0,
        description="vLLM: seconds that a request waits at most while the server sleeps (colocate) or reads "
        "new weights (publish='merged'); then it is refused",
    )
    max_restarts: int = Field(
        default=5, ge=0, description="vLLM: how often it is restarted when it dies, in restart_window"
    )
    restart_window: float = Field(
        default=3600.0, gt=0, description="vLLM: seconds after which a restart is forgotten"
    )
    python: Path | None = Field(default=None, description="vLLM: interpreter of another environment")
    packed_tokens: bool = Field(
        default=True,
        description="vLLM: send exact tokens packed, by a plugin of ours inside the server; False: spelled "
        "out as in stock vLLM, which halves the throughput where many requests run at once",
    )
    extra_args: tuple[str, ...] = Field(
        default=(), description="vLLM: further command-line arguments, as they are"
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.kind == "external") != bool(self.base_urls):
            raise ValueError("base_url and kind='external' belong together: give both or neither")
        if self.api_key is not None and not self.base_urls:
            raise ValueError("api_key is for kind='external'; servers of ours ask for none")
        if self.publish == "merged" and self.kind in ("embedded", "external"):
            raise ValueError(
                f"publish='merged' with kind={self.kind!r}: only a vLLM that is started here reads new "
                "weights"
            )
        if self.replicas > 1 and self.kind in ("embedded", "external"):
            raise ValueError(
                f"replicas={self.replicas} with kind={self.kind!r}: replicas are vLLM servers that are "
                "started here; for servers that run already, give several addresses as base_url"
            )
        if self.devices is not None and len(self.devices) != self.replicas:
            raise ValueError(
                f"replicas={self.replicas}, but devices={self.devices} are for {len(self.devices)}"
            )
        return self

    @property
    def base_urls(self) -> tuple[str, ...]:
        """Addresses of servers that somebody else runs."""
        return (self.base_url,) if isinstance(self.base_url, str) else self.base_url or ()
