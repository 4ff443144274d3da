"""Faults of the kernels for GPUs."""

from __future__ import annotations

from faults.fault import Fault

TRITON = "attention/backends/triton/"
KERNELS = TRITON + "kernels/"
TRUTH, FOLD, BITS = (f"tests/laws/test_triton.py -k laws_{name}" for name in ("truth", "fold", "bits"))

FAULTS = (
    Fault(
        "let a row see its block's later keys",
        KERNELS + "blocks.py",
        "(numbers[:, None] >= numbers[None, :]) & kept[None, :]",
        "(numbers[:, None] > -1) & kept[None, :]",
        BITS,
    ),
    Fault(
        "one offset for all keys of a block",
        KERNELS + "key_offsets.py",
        "own = tl.ceil(largest) - HEADROOM",
        "own = own * 0 + tl.ceil(tl.max(largest, 0)) - HEADROOM",
        BITS,
    ),
    Fault(
        "load what masked keys hold",
        KERNELS + "blocks.py",
        'kept = there & (shift < float("inf"))',
        "kept = there",
        BITS,
    ),
    Fault(
        "drop a bias's fraction",
        KERNELS + "key_offsets.py",
        "tl.where(kept, own - fraction,",
        "tl.where(kept, own,",
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
        "leave a step's key out of its centre's mean",
        KERNELS + "centre_step.py",
        "z_key * fall + phi * k",
        "z_key * fall",
        FOLD,
    ),
    Fault(
        "read another centre's part in a step",
        KERNELS + "centre_step.py",
        "(tl.sum(p * c, 1) / 2)[None, :]",
        "tl.sum(p * c, 1)[None, :]",
        FOLD,
    ),
    Fault(
        "forget the given state",
        TRITON + "causal.py",
        "start = whole_tiles(work, S * fall.unsqueeze(-1), z * fall)",
        "start = whole_tiles(work, 0 * S, 0 * z)",
        FOLD,
    ),
    Fault(
        "let a query around a centre see later keys of its group",
        KERNELS + "centres.py",
        "tl.where(span == 0, token + 1,",
        "tl.where(span == 0, token + 3,",
        BITS,
    ),
    Fault(
        "read the next centre's part",
        KERNELS + "centre_rows.py",
        "S_one, z_one, S_key, z_key = load_moments(states, index, centre, shape)",
        "S_one, z_one, S_key, z_key = load_moments(states, index, (centre + 1) % shape.num_centres, shape)",
        TRUTH,
    ),
    Fault(
        "drop the last rows around a centre",
        KERNELS + "centres.py",
        "numbers = (end - begin + shape.rows - 1) // shape.rows",
        "numbers = (end - begin) // shape.rows",
        TRUTH,
    ),
    Fault(
        "leave a centre's sums at their former peak",
        KERNELS + "centre_states.py",
        "S_one = S_one * fall +",
        "S_one = S_one +",
        TRUTH,
    ),
    Fault(
        "take the whole of every step in the gradient",
        KERNELS + "centre_query_gradients.py",
        "- shrink[:, None] * steps",
        "- 0 * shrink[:, None] * steps",
        TRUTH,
    ),
    Fault(
        "no gradient of a key through its weight",
        KERNELS + "centre_key_gradients.py",
        "of_keys += (of_powers * places.scale)[:, None] * c[None, :]",
        "of_keys += (0 * of_powers * places.scale)[:, None] * c[None, :]",
        TRUTH,
    ),
    Fault(
        "gradients of a centre's sums at the peak after them",
        KERNELS + "centre_state_gradients.py",
        "S_one, z_one = S_one * fall, z_one * fall",
        "S_one, z_one = S_one, z_one",
        TRUTH,
    ),
    Fault(
        "sum segments of a centre's gradients without their fall",
        TRITON + "expanding.py",
        "S, z = state.S * fall.unsqueeze(-1) + totals.S[:, segment]",
        "S, z = state.S + totals.S[:, segment]",
        FOLD,
    ),
    Fault(
        "follow no gradient of centres, and say nothing",
        TRITON + "objections.py",
        "if call.bound.tensors and feature_map.centres is not None:",
        "if call.bound.tensors and feature_map.centres is None:",
        "tests/laws/test_triton.py -k refuses",
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
        "own = load_vectors(begin, stride, numbers, kept, shape, True)",
        "own = load_vectors(begin, stride, 0 * numbers, kept, shape, True)",
        TRUTH,
    ),
    Fault(
        "load the first token's values for every tile",
        KERNELS + "blocks.py",
        "return load_operand(begin, stride, numbers, kept, shape, True)",
        "return load_operand(begin, stride, 0 * numbers, kept, shape, True)",
        TRUTH,
    ),
    Fault(
        "keep wide vectors in registers",
        TRITON + "tiles.py",
        "return Tuning(16, 8, 3, reloads=True)",
        "return Tuning(16, 8, 3)",
        "tests/laws/test_triton_compiled.py -k 80-float16-128",
    ),
)
