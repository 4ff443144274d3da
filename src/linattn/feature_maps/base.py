"""The protocol every feature map follows: x -> φ(x), the choice of kernel; letters as in feature_maps/__init__.py."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from linattn.feature_maps.digests import UNREAD, digest, digest_of_weights
from linattn.feature_maps.powers import Powers, as_powers
from linattn.softmax.checking import check_count, check_dense
from linattn.softmax.precision import outside_autocast
from linattn.softmax.tracing import constant_in_graphs, is_fake, is_traced, outside_inference, outside_transforms

# Numbers, and the fewest tokens, of the pieces in which a map without a `write_query` of its own fills a buffer.
_PIECE, _FEWEST = 2**17, 16
_LIVE: WeakValueDictionary[int, FeatureMap] = WeakValueDictionary()
Versions = tuple[tuple[str, Tensor | None, int | None], ...]


class UncastBuffers(nn.Module):
    """A module whose buffers keep their dtype and values when a model is cast, and constants wherever it is put."""

    _decomposed: tuple[str, ...] = ()  # buffers whose roots or inverses are kept
    _derived_from: Versions = ()
    _digests: Mapping[tuple[str, ...], str] = {}  # of buffers, by their names

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move with the model; buffers that were cast, and constants, are taken back where they were moved to."""
        masters = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, master in masters.items():
            moved = self._buffers[name]
            if moved is not None and moved.is_meta and name in self._non_persistent_buffers_set:
                self._buffers[name] = master  # no file has it
            # `to_empty` loses values, those of a model that was built on "meta" too.
            elif moved is not None and (moved.dtype != master.dtype or not (moved.is_meta or master.is_meta)):
                self._buffers[name] = master.to(moved.device)
        self._derive_from_buffers()
        return self

    def _versions(self) -> Versions:
        """The buffers by name, and how often each was written to, as far as torch counts."""
        held = self._buffers.items()
        return tuple((name, x, None if x is None or x.is_inference() else x._version) for name, x in held)

    def _follow_buffers(self) -> bool:
        """Derive anew what depends on buffers that others wrote to or replaced, as DDP and averages of models do.

        Returns whether it was: what depends on buffers that gradients or torch.func follow is read from these.
        """
        if torch.compiler.is_compiling():
            return True
        held, then = self._buffers, self._derived_from
        for name, x, version in then:  # a decoding step asks several times
            if held.get(name) is not x or (version is not None and x is not None and x._version != version):
                break
        else:
            if len(then) == len(held):
                return True
        if is_traced():
            return True
        buffers = [x for x in held.values() if x is not None]
        if not any(x.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(x) for x in buffers):
            with outside_transforms():
                self._check_written()
                self._derive_from_buffers()
            return True
        for name in self._decomposed:
            if not any(held[name] is x for _, x, _ in then):
                raise NotImplementedError(
                    f"{type(self).__name__} keeps what it computes of {name}, a constant for gradients and torch.func; "
                    "load other values with load_state_dict, and keep it out of what is mapped or differentiated"
                )
        return False

    def extra_repr(self) -> str:
        """Every setting, those of buffers as they are now."""
        self._follow_buffers()
        return super().extra_repr()

    def _check_written(self) -> None:
        """Refuse what others wrote to the buffers and no map of these settings has."""

    def _derive_from_buffers(self) -> None:
        """Derive what depends on them, and remember for which."""
        self._derived_from, self._digests = self._versions(), {}

    def _digest_of(self, *names: str) -> str:
        """A digest of buffers, "None" where there are none yet; it waits for the device once after each change."""
        is_derived = self._follow_buffers()
        if is_derived and names in self._digests:
            return self._digests[names]
        held = [x for name in names if (x := getattr(self, name)) is not None]
        fingerprint = digest(*held) if held else str(None)
        if is_derived and fingerprint != UNREAD:  # Another time there may be values.
            self._digests = {**self._digests, names: fingerprint}
        return fingerprint


class FeatureMap(nn.Module, ABC):
    """A map x -> φ(x) whose inner product φ(q)·φ(k) is the attention kernel.

    Abstract: concrete maps are final. A map knows nothing of attention; it turns queries and keys into features, or
    into the exponents of features, and says which kernel their inner product equals or estimates.

    Attributes:
        head_dim: D, the width of a query or key.
        num_features: R, the width of φ.
        exponential: True when `query` and `key` return exponents, the features being their exponentials. Attention then
            keeps a running maximum of the keys' exponents and never overflows.
        nonnegative: True when every weight φ(q)·φ(k) is ≥ 0, so that attention is a convex combination of the values.
        softmax_kernel: True when φ(q)·φ(k) stands for exp(scale · q·k) on its true scale, so that it may be combined
            with exact softmax attention over other keys.
        scale: the factor on q·k, for maps with `softmax_kernel`.
    """

    head_dim: int
    num_features: int
    exponential: bool = False
    nonnegative: bool = True
    softmax_kernel: bool = False
    scale: float
    _settings: tuple[str, ...] = ("head_dim",)  # attributes that `repr` names

    def __init__(self, head_dim: int, num_features: int) -> None:
        super().__init__()
        self.head_dim = check_count("head_dim", head_dim)
        self.num_features = check_count("num_features", num_features)
        self._register_handle()

    def _register_handle(self) -> None:
        """Give this object the number by which graphs find it, which no map of another process has."""
        self.handle = int.from_bytes(os.urandom(8)) >> 2
        _LIVE[self.handle] = self

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """`nn.Module.register_buffer`; a tensor of a map built under inference mode serves training too."""
        tensor = None if tensor is None else outside_inference(tensor, even_within=True)
        super().register_buffer(name, tensor, persistent)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, or a map read from a file, is another object, whose buffers count their writes from 0."""
        super().__setstate__(state)
        self._derived_from: Versions = ()
        self._register_handle()

    @property
    def positive_normalizer(self) -> bool:
        """Whether Σ_j φ(q)·φ(k_j) is positive whatever the keys, so that an exact part may share it."""
        return self.nonnegative

    @property
    def num_exponents(self) -> int:
        """M: how many running maxima of the keys' exponents attention keeps per head, each for R/M features."""
        return self.num_features if self.exponential else 1

    def fingerprint(self, followed: Collection[str] = ()) -> str:
        """A name that tells this map from every other one: its `repr`, and a digest of its parameters and buffers.

        A `State` keeps it and refuses a map with another one, so a step of an optimiser or other weights loaded end the
        life of a state. Trainable parameters are read at each call, frozen ones (`requires_grad_(False)`) and buffers
        once, until torch says that they were written to; writes through `.data` are not noticed. A compiled function
        keeps the fingerprint that it was compiled with: compile after training.

        Args:
            followed: names of parameters to leave out, which somebody else answers for.
        """
        if torch.compiler.is_compiling():
            return _constant_fingerprint(self.handle, *followed)
        return self.read_fingerprint(followed)

    def read_fingerprint(self, followed: Collection[str]) -> str:
        """`fingerprint`, outside a graph: values are read."""
        has_any = self._parameters or self._modules  # torch's iterator costs a decoding step more than the rest
        parameters = [x for name, x in self.named_parameters() if name not in followed] if has_any else []
        weights, draws = digest_of_weights(parameters) if parameters else "", self.draw_digest()
        both = f"{weights}-{draws}" if weights and draws else weights + draws
        # Of a map without modules torch's own `repr` says the same, at a tenth of a decoding step's time.
        said = repr(self) if self._modules else f"{self._get_name()}({self.extra_repr()})"
        return f"{said} with weights {both}" if both else said

    def draw_digest(self) -> str:
        """A digest of buffers that `repr` does not name: draws, a user's own, masks; "" for maps without any."""
        held = [] if isinstance(self, UncastBuffers) else [x for x in self._buffers.values() if x is not None]
        held += [x for child in self.children() if not isinstance(child, FeatureMap) for x in child.buffers()]
        digests = [child.draw_digest() for child in self.children() if isinstance(child, FeatureMap)]
        return "".join([digest_of_weights(held), *digests] if held else digests)

    @abstractmethod
    def query(self, x: Tensor) -> Tensor:
        """Features, or their exponents, of queries: (..., L, D) -> (..., L, R)."""

    def key(self, x: Tensor) -> Tensor:
        """Features, or their exponents, of keys: (..., L, D) -> (..., L, R); the same as `query` unless overridden."""
        return self.query(x)

    def write_query(self, x: Tensor, out: Tensor) -> Tensor:
        """`query`, written into a buffer (..., L, R) unless it is the input itself; no gradient is recorded.

        Attention calls this block by block on one buffer: fresh memory costs more than arithmetic. Maps with a matrix
        product override it, exponential ones `write_query_powers`, whose exponents are written over by attention.
        """
        return _written(self.query, x, out)

    def write_key(self, x: Tensor, out: Tensor) -> Tensor:
        """`key` written into a buffer (..., L, R), which is returned; no gradient is recorded."""
        return self.write_query(x, out) if type(self).key is FeatureMap.key else _written(self.key, x, out)

    def write_query_powers(self, x: Tensor, out: Tensor, rows: Tensor | None, columns: Tensor) -> Tensor:
        """log₂e·`query` + rows + columns: exponents of base 2, written into a buffer; only where `exponential`.

        Maps with a matrix product override it, so that the sum is the product's own: passes over (..., L, R) are dear.

        Args:
            x: (B, H, L, D), in float32 or float64.
            out: (B, H, L, R), contiguous.
            rows: (B, H or 1, L, 1), or None for 0.
            columns: (B, H, 1, R).
        """
        return as_powers(self.write_query(x, out), rows, columns, out)

    def write_key_powers(self, x: Tensor, out: Tensor, rows: Tensor | None, columns: Tensor) -> Tensor:
        """`write_query_powers` of keys."""
        if type(self).key is FeatureMap.key:
            return self.write_query_powers(x, out, rows, columns)
        return as_powers(self.write_key(x, out), rows, columns, out)

    def query_vjp(self, x: Tensor, grad: Tensor) -> Tensor:
        """The gradient of `query`'s input, given that of its output: (..., L, D), (..., L, R) -> (..., L, D).

        `grad` may be written over. Attention's backward pass calls this block by block, for maps whose own tensors are
        not followed. Maps with a matrix product override it: autograd would compute the product once more.
        """
        return _pulled_back(self.query, x, grad)

    def key_vjp(self, x: Tensor, grad: Tensor) -> Tensor:
        """The gradient of `key`'s input, given that of its output; shapes and use are those of `query_vjp`."""
        return self.query_vjp(x, grad) if type(self).key is FeatureMap.key else _pulled_back(self.key, x, grad)

    def query_log_weight(self, x: Tensor) -> Tensor | None:
        """Logarithm of a positive factor on all features of a query, (..., L), or None; only where not `exponential`.

        Attention's output does not depend on it, its log-normaliser does.
        """
        return None

    def key_log_weight(self, x: Tensor) -> Tensor | None:
        """Logarithm of a positive factor on all features of a key, (..., L), or None; only where not `exponential`.

        A factor such as exp(|k|²/2) overflows on its own; kept as a logarithm it shares the running maximum. The same
        as `query_log_weight` where keys have the queries' features, unless overridden.
        """
        return self.query_log_weight(x) if type(self).key is FeatureMap.key else None

    def powers(self, dtype: torch.dtype) -> Powers | None:
        """Exponents of an exponential map as products and a term of each row; None where they are not of that form."""
        return None

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """The kernel that φ(q)·φ(k) equals, or estimates without bias: (..., Lq, D), (..., Lk, D) -> (..., Lq, Lk).

        φ(q)·φ(k) itself, in float64, unless overridden, as by maps that estimate another kernel or equal a simpler one.
        """
        return torch.matmul(features(self, q.double(), "query"), features(self, k.double(), "key").mT)

    def call_tensors(
        self, query: Tensor, key: Tensor, *, key_mask: Tensor | None, is_causal: bool
    ) -> Mapping[str, Tensor]:
        """The map's tensors for one call of attention, by name; none, unless it takes statistics from the call.

        Masked keys do not enter, whatever they hold. In self-attention a masked position is padding among the queries
        too: they are left out where Lq = Lk.

        Args:
            query: (B, H, Lq, D).
            key: (B, Hkv, Lk, D).
            key_mask: (B, Lk) or (B, Hkv or 1, Lk) bool, True = attend, or None.
            is_causal: whether later tokens must stay unseen.

        Returns:
            Tensors of shape (B, Hkv, ·, D), by the names of the map's buffers.
        """
        return {}

    def extra_repr(self) -> str:
        """Every setting, from Python values only: reading it never waits for a device."""
        return ", ".join(f"{name.lstrip('_')}={getattr(self, name)!r}" for name in self._settings)

    def _check(self, x: Tensor) -> None:
        """Refuse inputs of another head width or number of heads."""
        self._check_width(x)
        heads = getattr(self, "num_heads", None)
        if heads is not None and x.dim() > 2 and x.shape[-3] not in (1, heads):
            raise ValueError(
                f"{type(self).__name__} was built for num_heads={heads}, got inputs with {x.shape[-3]} heads; "
                f"build it with num_heads={x.shape[-3]}, or num_heads=None to share one set for all heads"
            )

    def _check_width(self, *inputs: Tensor) -> None:
        """Refuse inputs of another head width, and nested ones."""
        for x in inputs:
            check_dense(x=x)
            if x.shape[-1] != self.head_dim:
                raise ValueError(
                    f"{type(self).__name__} was built for head_dim={self.head_dim}, got vectors of width "
                    f"{x.shape[-1]}; build it with head_dim={x.shape[-1]}"
                )


def _written(function: Callable[[Tensor], Tensor], x: Tensor, out: Tensor) -> Tensor:
    """function(x) written into `out` in pieces, so that what lies between is small enough to be allocated again."""
    size = max(_PIECE * x.shape[-2] // max(out.numel(), 1), _FEWEST)
    for part, target in zip(x.split(size, -2), out.split(size, -2), strict=True):
        target.copy_(function(part))
    return out


def _pulled_back(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of a function's input, by autograd, with a graph of its own."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return pulled([function(leaf)], (leaf,), [grad])[0]


def pulled(outputs: Sequence[Tensor], leaves: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The leaves' gradients; outputs that no leaf reaches add nothing."""
    live = [(x, grad) for x, grad in zip(outputs, grads, strict=True) if x.requires_grad]
    if not live:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    reached, live_grads = zip(*live, strict=True)
    return torch.autograd.grad(reached, leaves, live_grads, allow_unused=True, materialize_grads=True)


def has_number(x: Tensor) -> bool:
    """Whether a tensor of one number tells it: not on the meta device, nor under FakeTensorMode."""
    return not (x.is_meta or is_fake(x))


def in_both_dtypes(*tensors: Tensor) -> dict[torch.dtype, tuple[Tensor, ...]]:
    """Tensors in the dtypes that maps compute in, so that a call casts none."""
    return {dtype: tuple(x.to(dtype) for x in tensors) for dtype in (torch.float64, torch.float32)}


def live_map(handle: int) -> FeatureMap:
    """The map with this handle, while it lives."""
    if handle not in _LIVE:
        raise RuntimeError(
            "a compiled function calls a feature map that no longer exists; keep the map alive, for example as an "
            "attribute of the module, or compile again; an exported program runs in the process that exported it"
        )
    return _LIVE[handle]


@constant_in_graphs
def _constant_fingerprint(handle: int, *followed: str) -> str:
    """A map's `fingerprint`, found while a graph is made, which may not read values."""
    return live_map(handle).read_fingerprint(followed)


def features(feature_map: FeatureMap, x: Tensor, side: str) -> Tensor:
    """φ(x) itself, exponentials and weights applied: (..., L, D) -> (..., L, R).

    For looking at a map and for tests; attention never calls it, because the exponentials may overflow here.

    Args:
        feature_map: any map.
        x: (..., L, D) queries or keys.
        side: "query" or "key".

    Example:
        >>> import torch, linattn
        >>> relu = linattn.feature_maps.Relu(2, floor=0.0)
        >>> features(relu, torch.tensor([[3.0, -1.0]]), "key").tolist()
        [[3.0, 0.0]]
    """
    if side not in ("query", "key"):
        raise ValueError(f'side must be "query" or "key", got {side!r}')
    with outside_autocast(x.device):
        phi = feature_map.query(x) if side == "query" else feature_map.key(x)
        weight = feature_map.query_log_weight(x) if side == "query" else feature_map.key_log_weight(x)
    if feature_map.exponential:
        return torch.exp(phi)
    if weight is None:
        return phi
    # Where every key has one weight per group of features, the features are all products of both.
    weight = weight.unsqueeze(-1)
    return (torch.exp(weight) * phi.unsqueeze(-2)).flatten(-2) if weight.ndim > phi.ndim else phi * torch.exp(weight)
