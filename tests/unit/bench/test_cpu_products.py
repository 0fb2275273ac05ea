"""The comparison of 16-bit products: a row for each type, and its headline."""

from bench.cpu_products import headline, measure


def test_a_shape_is_measured_in_both_types_and_has_a_headline() -> None:
    rows = measure(8, 16, 4, rounds=1)
    assert [row["dtype"] for row in rows] == ["bfloat16", "float16"]
    assert all(row[key] >= 0 for row in rows for key in ("float32_s", "torch_s", "widened_s"))
    row = {"tokens": 1000, "dtype": "bfloat16", "float32_s": 0.5, "torch_s": 5.0, "widened_s": 0.75}
    assert headline([row]) == "1,000 tokens in bfloat16 take 10.0 times float32's time in torch, 1.5 times in float32"
