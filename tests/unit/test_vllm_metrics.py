"""What is kept of vLLM's metrics, from texts in its format over real HTTP."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from art_core.inference.vllm_metrics import (
    COUNTERS,
    GAUGES,
    MetricSource,
    ServingMonitor,
    read_metrics,
)
from art_core.observe.metrics import spec_of

TEXT = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="agent@0"}} {running}
# HELP vllm:num_requests_waiting_by_reason Number of requests waiting, by reason.
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{{engine="0",model_name="agent@0",reason="capacity"}} 9.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="agent@0"}} {cache}
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{{engine="0",model_name="agent@0"}} {prompt}
# HELP vllm:prefix_cache_hits_total Prefix cache hits, in terms of number of cached tokens.
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{{engine="0",model_name="agent@0"}} {hits}
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="agent@0"}} {generated}
# HELP vllm:time_to_first_token_seconds Histogram of time to first token in seconds.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.001",model_name="agent@0"}} 0.0
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="agent@0"}} {calls}
vllm:time_to_first_token_seconds_count{{engine="0",model_name="agent@0"}} {calls}
vllm:time_to_first_token_seconds_sum{{engine="0",model_name="agent@0"}} {waited}
"""


def text(running=0, cache=0.0, prompt=0, hits=0, generated=0, calls=0, waited=0.0) -> str:
    return TEXT.format(**locals())


class Server:
    """Answers ``/metrics`` with ``text``; 404 when that is None."""

    def __init__(self) -> None:
        self.text: str | None = text()
        self.reads = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.reads += 1
                said = outer.text if self.path == "/metrics" else None
                self.send_response(404 if said is None else 200)
                self.end_headers()
                self.wfile.write((said or "").encode())

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    @property
    def source(self) -> MetricSource:
        return MetricSource(f"http://127.0.0.1:{self.http.server_port}/v1")


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    made = [Server(), Server()]
    yield made
    for server in made:
        server.http.shutdown()
        server.http.server_close()


def monitor(*servers: Server) -> ServingMonitor:
    """It reads when a test says so."""
    return ServingMonitor([server.source for server in servers], interval=3600)


def test_only_the_selected_series_are_read() -> None:
    assert read_metrics(text(running=3, calls=2, waited=0.5)) == {
        "vllm:num_requests_running": [3],
        "vllm:kv_cache_usage_perc": [0],
        "vllm:prefix_cache_queries_total": [0],
        "vllm:prefix_cache_hits_total": [0],
        "vllm:generation_tokens_total": [0],
        "vllm:time_to_first_token_seconds_count": [2],
        "vllm:time_to_first_token_seconds_sum": [0.5],
    }


def test_a_window_tells_moments_rates_and_means_over_all_replicas(servers: list[Server]) -> None:
    monitored = monitor(*servers)
    monitored.read()
    servers[0].text = text(running=6, cache=0.5, prompt=100, hits=80, generated=50, calls=1, waited=0.1)
    servers[1].text = text(running=2, cache=0.75, prompt=100, hits=0, generated=50, calls=3, waited=0.7)
    got = monitored.window()
    assert got["serving/running_max"] == 8
    assert got["serving/running_mean"] == 4
    assert got["serving/kv_cache_usage_max"] == 0.75
    assert got["serving/prefix_cache_hit_rate"] == 0.4
    assert got["serving/time_to_first_token_seconds_mean"] == pytest.approx(0.2)
    assert got["serving/generation_tokens_per_second"] > 0
    assert not any("waiting" in name or "preemptions" in name for name in got)
    later = monitored.window()
    assert later["serving/generation_tokens_per_second"] == 0
    assert "serving/prefix_cache_hit_rate" not in later
    monitored.close()


def test_every_name_that_a_window_tells_is_in_the_catalogue(servers: list[Server]) -> None:
    monitored = monitor(servers[0])
    for value in (1, 5):
        servers[0].text = "".join(f"{name} {value}\n" for name in (*GAUGES, *COUNTERS))
        monitored.read()
    told = monitored.window()
    assert len(told) == 2 * len(GAUGES) + 2 + 1 + 1 + 3
    assert [name for name in told if spec_of(name) is None] == []
    monitored.close()


def test_a_server_that_was_restarted_counts_from_zero(servers: list[Server]) -> None:
    monitored = monitor(servers[0])
    servers[0].text = text(prompt=1000, hits=1000)
    monitored.read()
    servers[0].text = text(prompt=100, hits=25)
    assert monitored.window()["serving/prefix_cache_hit_rate"] == 0.25
    monitored.close()


def test_a_server_without_metrics_is_left_alone_and_one_that_is_down_is_not(servers: list[Server]) -> None:
    without, restarting = servers
    without.text = None
    down = MetricSource("http://127.0.0.1:9/v1")
    monitored = ServingMonitor([without.source, restarting.source, down], interval=3600)
    monitored.read()
    monitored.read()
    assert without.reads == 1
    assert restarting.reads == 2
    assert monitored.window()["serving/running_max"] == 0
    monitored.close()
    monitored.close()


def test_the_thread_reads_by_itself_until_it_is_closed(servers: list[Server]) -> None:
    others = set(threading.enumerate())
    with ServingMonitor([servers[0].source], interval=0.01):
        while servers[0].reads < 3:
            pass
    reads = servers[0].reads
    assert reads >= 3
    assert not [t for t in threading.enumerate() if t.name == "art-metrics" and t not in others]
