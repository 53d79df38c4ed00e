from art_core.inference.vllm_stall import Progress, StallWatch, read_progress

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="agent@0"} 3.0
vllm:num_requests_running{engine="1",model_name="agent@0"} 2.0
vllm:num_requests_running_old 99.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="agent@0"} 7.0
vllm:iteration_tokens_total_count{engine="0",model_name="agent@0"} 40.0
vllm:iteration_tokens_total_count{engine="1",model_name="agent@0"} 2.0
"""


def test_progress_is_read_over_all_engines_of_a_server():
    assert read_progress(METRICS) == Progress(running=5.0, steps=42.0)
    assert read_progress("vllm:num_requests_running 1.0\n") is None
    assert read_progress("") is None


def test_a_server_is_stalled_when_requests_run_and_no_step_ends_for_the_limit():
    watch = StallWatch(limit=10.0)
    assert not watch.stalled(Progress(2, 5), now=0.0)
    assert not watch.stalled(Progress(2, 5), now=9.9)
    assert watch.stalled(Progress(2, 5), now=10.0)
    assert not watch.stalled(Progress(2, 6), now=11.0), "a step ended"
    assert not watch.stalled(Progress(0, 6), now=50.0), "nothing runs"
    assert not watch.stalled(Progress(1, 6), now=51.0), "it has only begun to run"
    assert watch.stalled(Progress(1, 6), now=61.0)


def test_a_server_without_metrics_is_never_stalled():
    watch = StallWatch(limit=1.0)
    assert not any(watch.stalled(None, now=float(now)) for now in range(5))
    assert not watch.stalled(Progress(1, 0), now=100.0)
