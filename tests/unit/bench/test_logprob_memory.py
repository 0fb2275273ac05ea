"""The peak of log-probs in chunks: a point is measured in a process of its own."""

from bench.logprob_memory import run_point


def test_a_point_is_measured_in_a_process_of_its_own() -> None:
    point = run_point(("chunked", 64, 256, 32))
    assert (point["method"], point["tokens"], point["vocabulary"], point["chunk_tokens"]) == ("chunked", 64, 256, 32)
    assert point["peak_mib"] >= 0
    assert point["logprob_mean"] < 0
