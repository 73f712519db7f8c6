"""The float32 reference of ``verify --gpu`` against a loop over single numbers.

Needs a Python with torch (any device): ``SM75_TORCH_PYTHON``, or this one.
"""

from __future__ import annotations

import pytest

from tests.unit import gpukit


@pytest.fixture(scope="module")
def python() -> str:
    found = gpukit.torch_python()
    if found is None:
        pytest.skip("no torch: name a Python that has it in SM75_TORCH_PYTHON")
    return found


NAIVE = """
import math, sys, torch
from sm75.gpu import reference
from sm75.smem.models import Layer


def naive(q, key, value, at, window, softcap, causal, sink, ranges):
    scores = []
    for k in range(len(key)):
        seen = k <= at or not causal
        if window:
            seen = seen and at - k < window and (causal or k - at < window)
        for first, last in ranges:
            both = first <= at <= last and first <= k <= last
            seen = seen or (both and (not window or at - k < window))
        score = sum(float(q[i]) * float(key[k, i]) for i in range(8)) / math.sqrt(8)
        score = softcap * math.tanh(score / softcap) if softcap else score
        scores.append(score if seen else -math.inf)
    top = max(scores + sink)
    weights = [math.exp(score - top) for score in scores]
    whole = sum(weights) + sum(math.exp(score - top) for score in sink)
    return [sum(w * float(value[k, i]) for k, w in enumerate(weights)) / whole for i in range(8)]


def check(text):
    features = dict(pair.split("=") for pair in text.split())
    window, softcap = int(features.get("window", 0)), float(features.get("softcap", 0))
    causal = features.get("causal") != "no"
    layer = Layer(head=8, q_heads=4, kv_heads=2, window=window)
    queries, counts = (1, 3, 5), (4, 3, 9)
    q = torch.randn(sum(queries), 4, 8)
    keys = [torch.randn(n, 2, 8) for n in counts]
    values = [torch.randn(n, 2, 8) for n in counts]
    sinks = torch.randn(4) if "sinks" in features else None
    ranges = [[], [(0, 1)], [(2, 4), (6, 8)]] if "ranges" in features else None
    got = reference.attention(
        q, keys, values, queries, layer, causal=causal, softcap=softcap, sinks=sinks, ranges=ranges
    )
    row, worst = 0, 0.0
    for request, count in enumerate(queries):
        for token in range(count):
            for head in range(4):
                wanted = naive(
                    q[row, head], keys[request][:, head // 2], values[request][:, head // 2],
                    counts[request] - count + token, window, softcap, causal,
                    [float(sinks[head])] if sinks is not None else [],
                    ranges[request] if ranges else (),
                )
                worst = max(worst, max(abs(w - float(got[row, head, i]))
                                       for i, w in enumerate(wanted)))
            row += 1
    assert worst < 1e-5, (text, worst)


torch.manual_seed(0)
for text in sys.argv[1:]:
    check(text)
print("ok")
"""
FEATURES = (
    "", "window=3", "softcap=2", "sinks=yes", "causal=no", "causal=no window=3", "ranges=yes",
    "ranges=yes window=3", "softcap=2 sinks=yes window=2",
)  # fmt: skip


def test_reference_is_the_definition(python: str) -> None:
    done = gpukit.run(python, NAIVE, *FEATURES)
    assert done.stdout == "ok\n", done.stderr[-2000:]


def test_long_requests_are_cut_and_joined(python: str) -> None:
    program = """
import torch
from sm75.gpu import reference
from sm75.smem.models import Layer
layer = Layer(head=8, q_heads=2, kv_heads=1, window=50)
q, k, v = (torch.randn(600, heads, 8) for heads in (2, 1, 1))
whole = reference.attention(q, [k], [v], [600], layer)
reference._ROWS = 7
assert torch.allclose(whole, reference.attention(q, [k], [v], [600], layer), atol=1e-6)
print("ok")
"""
    done = gpukit.run(python, program)
    assert done.stdout == "ok\n", done.stderr[-2000:]


def test_rotation(python: str) -> None:
    """Against the definition of Sylvester's matrices, whole and in blocks; and back."""
    program = """
import torch
from sm75.gpu import reference
h = torch.ones(1, 1)
while len(h) < 16:
    h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
signs = torch.tensor([1.0, -1.0] * 8)
x = torch.randn(3, 2, 16)
assert torch.allclose(reference.rotate(x, signs), (x * signs) @ h, atol=1e-5)
assert torch.allclose(reference.unrotate(reference.rotate(x, signs), signs), x, atol=1e-5)
wide = torch.randn(3, 48)
parts = torch.cat([reference.rotate(part, signs) for part in wide.split(16, 1)], 1)
assert torch.allclose(reference.rotate(wide, signs), parts, atol=1e-5)
print("ok")
"""
    done = gpukit.run(python, program)
    assert done.stdout == "ok\n", done.stderr[-2000:]
