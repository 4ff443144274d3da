"""Replace softmax attention in a transformers model by feature maps, or an encoder's by merged keys, and undo it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from linattn.feature_maps import FEATURE_MAPS, FeatureMap, FittedMap
from linattn.hf._attention_modules import AttentionModule, attention_modules, inner_model, taken_out, unwrapped
from linattn.hf._calls import CAPS, SINKS
from linattn.hf._choosing import choose, merged_alone, refuse_intercepted, refuse_merged_decoder
from linattn.hf._dispatch import NAME, UNDO, install, uninstall
from linattn.hf.calibrating import Sample, calibrate_maps, first_sample
from linattn.hf.layer_attention import Attending, LayerAttention
from linattn.kv_cache import MergedKV
from linattn.methods.method import Method, parse_method
from linattn.softmax.checking import check_seed


@dataclass(frozen=True)
class LayerReport:
    """Report of `linearize_` on one attention module.

    Attributes:
        layer: its number, from 0, in the order of the model's modules.
        module_name: its qualified name.
        feature_map: what took the softmax's place, in words; None where softmax stays.
        reason: why softmax stays; None where it was replaced.
    """

    layer: int
    module_name: str
    feature_map: str | None
    reason: str | None


@dataclass(frozen=True)
class Linearization:
    """Reports of `linearize_` on all attention modules of a model.

    Attributes:
        layers: one report per attention module, in order.
    """

    layers: tuple[LayerReport, ...]

    @property
    def replaced(self) -> tuple[LayerReport, ...]:
        """The layers that attend by a feature map, or by merged keys."""
        return tuple(layer for layer in self.layers if layer.reason is None)

    @property
    def kept(self) -> tuple[LayerReport, ...]:
        """The layers whose softmax stays."""
        return tuple(layer for layer in self.layers if layer.reason is not None)

    def __str__(self) -> str:
        """One line per layer."""
        return "\n".join(
            f"{row.layer:3} {row.module_name}: {row.feature_map or f'softmax ({row.reason})'}" for row in self.layers
        )


def linearize_(
    model: PreTrainedModel,
    method: str | MergedKV | Sequence[str | MergedKV] | Callable[[int], FeatureMap | MergedKV],
    *,
    layers: Iterable[int] | None = None,
    window: int | Sequence[int | None] | None = None,
    num_features: int | None = None,
    seed: int = 0,
    calibrate: Iterable[Sample] | None = None,
    example: Mapping[str, Any] | None = None,
) -> Linearization:
    """Replace softmax by the attention of a feature map, in place, in all attention layers of a model or in some.

        softmax(c·q·k)  ->  φ(√c·q)·φ(√c·k) / Σ,   c the temperature the model itself asks for

    Each map becomes part of its attention module, `module.linear_attention`: it moves and trains with the model, and
    its tensors are in `state_dict`. Padding, causality, grouped heads and caches work as before; `generate` keeps a
    `StateCache`, constant in the number of tokens. The model computes something else from now on, without training:
    `linattn audit` says beforehand by how much it differs. Merged keys (`linattn.MergedKV`) take the softmax's place
    in layers without causality; to bound a decoder's KV cache, give `generate` a `BoundedCache`.

    Passes of a few tokens first show what each layer asks its attention for. A layer keeps its softmax, and the report
    says why, where φ(q)·φ(k) cannot express that: position biases, masks of pairs that the model makes itself, keys
    that other layers attend to as well, a module that attends several times in a pass, a cache of the model's own
    class; soft-capped logits, but for merged keys in every layer; attention sinks, but for written forms of maps for
    the softmax kernel. So do, unless they are named in `layers`, sliding windows and chunks, masks by which tokens of a
    picture see later ones, encoders that generate, and cross attention. What only some calls ask for is refused when
    they do: packed sequences, a mask of pairs given by the caller, texts beyond a replaced layer's window, dropout on
    the weights (load the model with its attention dropout at 0), returned weights.

    Cost: five forward passes of two rows of a few tokens, or of a picture or sound; building the maps; with
    `calibrate` a forward pass per batch, and memory for at most 16384 tokens of each layer's queries and keys.
    Afterwards a replaced layer takes time linear in the tokens.

    Args:
        model: any transformers model whose layers use AttentionInterface; of a compiled or PEFT model the inner one.
        method: a written form, as "FavorPlus(num_features=256)" or "Expansion + window 16"; or, for layers without
            causality, merged keys, as `MergedKV(window=32, num_merged=96)` or "window 32 + merged 96"; or one of these
            for every replaced layer, in order; or a function from the head width to a map or merged keys, called once
            for each replaced layer, in order: the way to pass a map that was fitted. Queries reach a map multiplied by
            c / map.scale, which is 1 but for models with a temperature of their own. A window's blocks, in causal
            layers, are counted from a text's first live token.
        layers: numbers of the attention modules to replace, in the order of the model's modules; None for all that can
            be, without those of the kinds above.
        window: as in `linattn.linear_attention`, for maps that a function builds, or one for each replaced layer, in
            order; a written form has its own.
        num_features: R, for a written map whose width is free and not written.
        seed: layer n's map is drawn from seed + n; for written random maps.
        calibrate: batches like what the model will read: mappings of its inputs, as a tokenizer returns, or tensors
            (B, L) of input ids. Maps that take statistics (Expansion, Oprf, Sderf, Centred, Balanced), which a
            causal layer needs fitted, are fitted to their layer's queries and keys there, padding left out. None for
            maps that need no samples, or learn from each call.
        example: arguments of the model's forward pass, where none can be made from its configuration.

    Returns:
        A `Linearization`: what was replaced by what, and what was not and why.

    Raises:
        TypeError: if `model`, `method`, what it returns or a batch is of another kind.
        ValueError: if there are not as many methods or windows as layers, the model ignores AttentionInterface, is
            linearized or intercepted already, has no such layers, a named one cannot be replaced or none can, the model
            does not run on the example, `calibrate` holds no batches or has nothing to fit, or the map cannot be built
            or used: a causal layer needs maps that learn nothing from the call, and takes no merged keys.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> sizes = dict(vocab_size=9, hidden_size=4, num_hidden_layers=2, num_attention_heads=2, intermediate_size=4)
        >>> model = BertModel(BertConfig(**sizes))
        >>> print(linearize_(model, "Taylor(order=2)", layers=[1]))
          0 encoder.layer.0.attention.self: softmax (not among `layers`)
          1 encoder.layer.1.attention.self: Taylor(order=2)
        >>> model.encoder.layer[1].attention.self.linear_attention.feature_map
        Taylor(head_dim=2, order=2, scale=0.7071067811865476)
        >>> restore_(model)
        >>> from transformers import LlamaConfig, LlamaModel
        >>> causal = LlamaModel(LlamaConfig(**sizes))
        >>> batches = [torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])]
        >>> _ = linearize_(causal, "Expansion(num_centres=3)", calibrate=batches)
        >>> causal.layers[0].self_attn.linear_attention.feature_map.centres.shape  # heads, centres, their width
        torch.Size([2, 3, 2])

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236); transformers' documentation, "Attention interface".
    """
    model = unwrapped(model)
    if is_linearized(model):
        raise ValueError(f"{type(model).__name__} is linearized already; call restore_(model) first")
    refuse_intercepted(model)
    if isinstance(layers, int | str):
        raise ValueError(f"layers must be numbers of attention modules, as in [0, 2], or None for all, got {layers!r}")
    if example is not None and not isinstance(example, Mapping):
        raise TypeError(
            f"example must be a mapping of the model's inputs, as {{'input_ids': …}}, got {type(example).__name__}"
        )
    check_seed(seed)
    methods, layers = _methods(method), None if layers is None else list(layers)
    merged = merged_alone(model, layers, methods)
    with taken_out(model, NAME):
        sample, calibrate = first_sample(calibrate)
        maps = [FEATURE_MAPS[each.map.name] for each in methods if each.map is not None]
        # Where there are methods and each is on the softmax kernel's scale, as far as its written form says.
        sinks = [SINKS] if 0 < len(methods) == len(maps) and all(each.softmax_kernel for each in maps) else []
        takes = sinks if merged is None else [CAPS]
        modules, reasons = choose(model, layers, example, sample, takes=takes, merged=merged)
        chosen = [part for part in modules if part.number not in reasons]
        _check_counts(method, window, len(chosen), layers)
        if methods:
            methods = methods if len(methods) > 1 or isinstance(method, list | tuple) else methods * len(chosen)
            attentions = _attend_by_methods(chosen, methods, num_features, seed)
        else:
            assert callable(method)  # as `_methods` found
            pairs = zip(chosen, window if isinstance(window, Sequence) else [window] * len(chosen), strict=True)
            attentions = [(x, LayerAttention(method(x.head_dim), x.name, window=width)) for x, width in pairs]
        for part, attention in attentions:
            refuse_merged_decoder(model, part, attention.merged)
        if calibrate is not None:
            calibrate_maps(model, attentions, calibrate)
        # Written forms in exact names, the others with what was fitted.
        names = [each.label for each in methods] or [attention.summary for _, attention in attentions]
        labels = {part.number: name for part, name in zip(chosen, names, strict=True)}
        for part, attention in attentions:
            try_out(part, attention, labels[part.number])
        install(model, attentions)
    return _report(modules, reasons, labels)


def _methods(method: object) -> list[Method]:
    """The methods that are given as such, one for all layers or one for each; none where a function builds maps."""
    # A map is an nn.Module, which is callable.
    if callable(method) and not isinstance(method, FeatureMap):
        return []
    methods = []
    for each in method if isinstance(method, Sequence) and not isinstance(method, str) else [method]:
        if not isinstance(each, MergedKV | str):
            raise TypeError(
                f"method must be text, a MergedKV, one of these for each layer, or a function that builds a map from a "
                f"head width, got {type(each).__name__}; write method=lambda head_dim: FavorPlus(head_dim, 256)"
            )
        methods.append(parse_method(each) if isinstance(each, str) else Method(None, merged=each))
    return methods


def choose_layers(
    model: PreTrainedModel, layers: Iterable[int] | None = None, *, example: Mapping[str, Any] | None = None
) -> Linearization:
    """The layers `linearize_` would replace, and why it would leave the others; the model stays as it is."""
    return _report(*choose(model, layers, example), {})


def global_layers(model: PreTrainedModel) -> Linearization:
    """Choose as `choose_layers`, or all layers where each has a window: texts within it can be attended to anew."""
    modules = list(attention_modules(model))
    is_local = all(part.window is not None for part in modules)
    return choose_layers(model, range(len(modules)) if is_local else None)


def _report(modules: list[AttentionModule], reasons: dict[int, str], labels: dict[int, str]) -> Linearization:
    """Report what attends in each layer, by its number, or why softmax stays."""
    named = ((part.number, part.name) for part in modules)
    return Linearization(tuple(LayerReport(n, name, labels.get(n), reasons.get(n)) for n, name in named))


def restore_(model: PreTrainedModel) -> None:
    """Undo `linearize_`: the model attends as it did before, to the bit, and holds no feature map.

    Args:
        model: the model that was given to `linearize_`, or a copy of it.

    Raises:
        ValueError: if the model is not linearized.
    """
    model = unwrapped(model)
    if not is_linearized(model):
        raise ValueError(f"{type(model).__name__} is not linearized; give the model that linearize_ was given")
    uninstall(model)


def is_linearized(model: nn.Module) -> bool:
    """True if `linearize_` was applied to this very model, or to the one within a wrapper."""
    return hasattr(inner_model(model), UNDO)


def _check_counts(method: object, window: object, num_layers: int, layers: list[int] | None) -> None:
    """Refuse options that do not go together."""
    if isinstance(window, str):
        raise TypeError(f"window must be an integer or None, got {window!r}; write window=32")
    is_ordered = layers is None or layers == sorted(layers)
    for name, values in {"methods": method, "windows": window}.items():
        if isinstance(values, Sequence) and not (isinstance(values, str) or (len(values) == num_layers and is_ordered)):
            raise ValueError(
                f"got {len(values)} {name} for the {num_layers} layers to be replaced; give one for each, in order, or "
                f"name their layers in `layers`, in ascending order, got layers={layers}"
            )
    if window is not None and (isinstance(method, MergedKV | Sequence)):
        raise ValueError(f"{method!r} says its own window; leave window out, as in 'Expansion + window 16'")


def _attend_by_methods(
    chosen: list[AttentionModule], methods: Sequence[Method], num_features: int | None, seed: int
) -> list[Attending]:
    """The attention of each layer by its method."""
    built = []
    for part, method in zip(chosen, methods, strict=True):
        # At the default scale whatever the module's: LayerAttention makes up the difference with each call.
        scale, drawn = part.head_dim**-0.5, seed + part.number
        kernel = method.build_kernel(part.head_dim, num_features=num_features, scale=scale, seed=drawn)
        if isinstance(kernel, FeatureMap):
            # Methods are built frozen, to be measured; in a model the weights of a learned map train with the model's.
            kernel.requires_grad_(True)
        built.append((part, LayerAttention(kernel, part.name, window=method.window)))
    return built


def try_out(part: AttentionModule, attention: LayerAttention, label: str) -> None:
    """Move an attention to its module's device and attend to one token: a map that cannot be used is refused now."""
    device = part.device or next(part.module.parameters(), torch.empty(0)).device
    attention.to(device)
    # What a map holds for each key/value head is (Hkv, ·, ·), what it holds for all of them has two dimensions.
    held = (x.shape[0] for x in (*attention.parameters(), *attention.buffers()) if x.ndim == 3)
    # Modules of a folder that keep no width of their own (SAM) were given maps of theirs.
    width: int = part.head_dim or getattr(attention.feature_map, "head_dim", 1)
    token = torch.zeros(1, max(held, default=1), 1, width, device=device)
    if part.reads_another_text and (attention.window is not None or attention.merged is not None):
        raise ValueError(
            f"{part.name} (layer {part.number}) cannot attend by {label}: its queries are a decoder's and its keys "
            "another text's, so that keys merged by all queries let earlier ones learn of later ones, and "
            "a window has no place; give it a feature map alone, or leave it out of `layers`"
        )
    if part.has_sinks and SINKS not in attention.takes:
        raise ValueError(
            f"{part.name} (layer {part.number}) asks for {SINKS}, and {label} has no positive normaliser that they "
            "could share; give another map, as FavorPlus"
        )
    is_ordered = part.is_causal or part.reads_another_text or part.hides_later
    try:
        with torch.no_grad():
            # One query and one key: causality hides nothing, and refuses maps that would learn from later queries.
            attention(token, token, token, scale=width**-0.5, is_causal=is_ordered)
    except ValueError as error:
        fitted = [part for part in attention.modules() if isinstance(part, FittedMap)]
        is_unfitted = any(all(getattr(part, name) is None for name in part.fitted_buffers) for part in fitted)
        cure = "; in linearize_, calibrate=batches fits it to samples" if is_unfitted else ""
        raise ValueError(f"{part.name} (layer {part.number}) cannot attend by {label}: {error}{cure}") from error
