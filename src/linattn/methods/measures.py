"""How far an attention is from the exact one, in float64 per head, and its cost: numbers kept per head, and seconds.

Letters as in methods/__init__.py.
"""

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from linattn.feature_maps import FeatureMap


def relative_error(approximation: Tensor, exact: Tensor) -> Tensor:
    """‖Ŷ − Y‖_F / ‖Y‖_F of each head: (B, H, L, Dv) twice -> (H,) float64; 0/0 is 0; inf where Ŷ is not finite."""
    if approximation.shape != exact.shape:
        raise ValueError(f"shapes differ: {tuple(approximation.shape)} against {tuple(exact.shape)}; give equal shapes")
    approximation, exact = approximation.double(), exact.double()
    wrong, size = (torch.linalg.vector_norm(x, dim=(0, 2, 3)) for x in (approximation - exact, exact))
    # A pruned head gives zeros, and so does every approximation of it.
    error = torch.where(wrong == 0, 0.0, wrong / size)
    return torch.where(approximation.isfinite().all(dim=-1).all(dim=-1).all(dim=0), error, torch.inf)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of the angle between vectors of the last dimension, in float64; without an epsilon."""
    a, b = a.double(), b.double()
    sizes: Tensor = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
    return (a * b).sum(-1) / sizes


def uniform_average(
    value: Tensor, *, num_heads: int, num_queries: int, key_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """The mean of the values (B, Hkv, Lk, Dv) that a query may attend to, (B, H, Lq, Dv); 0 without any."""
    num_keys = value.shape[2]
    if num_heads % value.shape[1]:
        raise ValueError(f"{num_heads} query heads are no multiple of {value.shape[1]} key/value heads")
    if is_causal and num_queries > num_keys:
        raise ValueError(f"{num_queries} causal queries over {num_keys} keys: give at least as many keys as queries")
    count = torch.ones(value.shape[0], 1, num_keys, 1, dtype=torch.float64, device=value.device)
    values = value.double()
    if key_mask is not None:
        visible = key_mask[:, None, :, None]
        count, values = count * visible, torch.where(visible, values, 0.0)
    if is_causal:
        # Aligned bottom-right.
        total, count = (x.cumsum(2)[:, :, num_keys - num_queries :] for x in (values, count))
    else:
        total, count = values.sum(2, keepdim=True), count.sum(2, keepdim=True)
    mean = torch.where(count > 0, total / count.clamp(min=1.0), 0.0).to(value.dtype)
    return mean.repeat_interleave(num_heads // value.shape[1], dim=1).expand(-1, -1, num_queries, -1)


def visible_keys(query_index: Tensor, *, num_queries: int, num_keys: int, is_causal: bool) -> Tensor:
    """Which keys each of n chosen queries may attend to, (n, Lk) bool: all, or causally those j ≤ i + Lk − Lq."""
    keys = torch.arange(num_keys, device=query_index.device)
    return keys <= (query_index + (num_keys - num_queries if is_causal else num_keys)).unsqueeze(-1)


def softmax_log_rows(query: Tensor, key: Tensor, visible: Tensor, *, scale: float) -> Tensor:
    """ln p of chosen queries (B, H, n, D) over keys (B, Hkv, Lk, D), (B, H, n, Lk) float64; -inf where not visible."""
    keys = key.double().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = scale * (query.double() @ keys.mT)
    return logits.masked_fill(~visible, -torch.inf).log_softmax(dim=-1)


def map_state_numbers(feature_map: FeatureMap, *, value_dim: int, window: int | None = None) -> int:
    """Numbers in a head's state, two blocks of a window's keys among them: R·(Dv + 1) + M + 2W·(D + Dv)."""
    sums = feature_map.num_features * (value_dim + 1) + feature_map.num_exponents
    return sums + 2 * (window or 0) * (feature_map.head_dim + value_dim)


def exact_state_numbers(num_tokens: int, *, head_dim: int, value_dim: int) -> int:
    """Numbers that exact attention keeps per head, every key and value: L·(D + Dv)."""
    return num_tokens * (head_dim + value_dim)


def seconds(
    contenders: Mapping[str, Callable[[], object]], *, repeats: int, rehearse: bool = False
) -> dict[str, list[float]]:
    """Wall-clock seconds of each contender after a warm-up, interleaved: a busier machine is slower for all."""
    # On an accelerator a call must wait for its own result. To rehearse is to call each once, untimed, before every
    # timed call: for contenders that hand gigabytes back to the system, which the next one's time would include.
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    for run in contenders.values():
        run()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            if rehearse:
                run()
            start = time.perf_counter()
            run()
            samples[name].append(time.perf_counter() - start)
    return samples
