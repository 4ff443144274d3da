"""Faults of the kernels for GPUs."""

from __future__ import annotations

from faults.fault import Fault

TRITON = "gpu/"
KERNELS = TRITON + "kernels/"
TRUTH, FOLD, BITS = (f"tests/laws/test_triton.py -k laws_{name}" for name in ("truth", "fold", "bits"))

FAULTS = (
    Fault(
        "let a row see its block's later keys",
        KERNELS + "blocks.py",
        "(numbers[:, None] >= numbers[None, :]) & live[None, :]",
        "(numbers[:, None] > -1) & live[None, :]",
        BITS,
    ),
    Fault(
        "one offset for all keys of a block",
        KERNELS + "key_offsets.py",
        "power = tl.ceil(largest) - HEADROOM",
        "power = power * 0 + tl.ceil(tl.max(largest, 0)) - HEADROOM",
        BITS,
    ),
    Fault(
        "load what masked keys hold",
        KERNELS + "blocks.py",
        'live = there & (shift < float("inf"))',
        "live = there",
        BITS,
    ),
    Fault(
        "drop a bias's fraction",
        KERNELS + "key_offsets.py",
        "tl.where(live, power - fraction,",
        "tl.where(live, power,",
        TRUTH,
    ),
    Fault(
        "no gradient of the normaliser",
        KERNELS + "row_gradients.py",
        "delta = tl.sum(y * grad, 1)",
        "delta = 0 * tl.sum(y * grad, 1)",
        TRUTH,
    ),
    Fault(
        "no gradient of a query's length",
        KERNELS + "query_gradients.py",
        "total += curved_rows(",
        "total += 0 * curved_rows(",
        TRUTH,
    ),
    Fault(
        "leave states at their former peak",
        KERNELS + "key_states.py",
        "S, z = S * fall, z * fall",
        "fall = fall",
        FOLD,
    ),
    Fault(
        "gradients of states from one query head",
        KERNELS + "state_gradients.py",
        "for member in range(cut.members):",
        "for member in range(1):",
        FOLD,
    ),
    Fault(
        "start every segment from nothing",
        TRITON + "segments.py",
        "        run(before, is_kept=True)",
        "        run(None, is_kept=True)",
        FOLD,
    ),
    Fault(
        "read before the token's own key",
        KERNELS + "token_step.py",
        "+ phi[:, None] * v[None, :]",
        "",
        FOLD,
    ),
    Fault(
        "forget the given state",
        TRITON + "folds.py",
        "start = whole_tiles(work, S * fall.unsqueeze(-1), z * fall)",
        "start = whole_tiles(work, 0 * S, 0 * z)",
        FOLD,
    ),
    Fault(
        "tiles that older GPUs have no registers for",
        TRITON + "tiles.py",
        "Tuning(64 if wide <= 64 and capability >= (9, 0) else 16, 8, 1)",
        "Tuning(64, 8, 1)",
        "tests/laws/test_triton_compiled.py -k 80-bfloat16-64",
    ),
    Fault(
        "load the first token's vectors for every tile",
        KERNELS + "blocks.py",
        "loaded = load_vectors(begin, stride, numbers, live, shape, True)",
        "loaded = load_vectors(begin, stride, 0 * numbers, live, shape, True)",
        TRUTH,
    ),
    Fault(
        "load the first token's values for every tile",
        KERNELS + "blocks.py",
        "return load_operand(begin, stride, numbers, live, shape, True)",
        "return load_operand(begin, stride, 0 * numbers, live, shape, True)",
        TRUTH,
    ),
    Fault(
        "keep wide vectors in registers",
        TRITON + "tiles.py",
        "return Tuning(16, 8, 3, reloads=True)",
        "return Tuning(16, 8, 3)",
        "tests/laws/test_triton_compiled.py -k 80-float16-128",
    ),
    Fault(
        "take kernels that no GPU has run by default",
        "attention/backends/__init__.py",
        '    if name == "auto":\n',
        '    if name == "auto":\n        if call.query.is_cuda:\n            return BACKENDS["triton"]\n',
        "tests/laws/test_triton.py -k auto",
    ),
    Fault(
        "take maps of groups for plain ones",
        TRITON + "objections.py",
        "if call.bound.is_grouped:",
        "if call.bound.is_grouped and False:",
        "tests/laws/test_triton.py -k refuses",
    ),
)
