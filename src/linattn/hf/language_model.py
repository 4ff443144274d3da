"""`LinearLM` as a model of transformers, saved and trained as any other; letters as in hf/__init__.py."""

from typing import Any

from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel, TrainerCallback
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from linattn.feature_maps import FittedMap
from linattn.hf._calls import surely_all
from linattn.hf.language_model_config import LinearLMConfig, blocks_of
from linattn.hf.state_cache import StreamCache
from linattn.nn import LinearLM, RedrawSchedule
from linattn.softmax.checking import check_count, check_seed


class LinearLMForCausalLM(PreTrainedModel, GenerationMixin):
    """A `linattn.nn.LinearLM` that transformers saves, loads, trains and generates with.

    Importing `linattn.hf` registers it: `AutoModelForCausalLM.from_pretrained(folder)` finds it. `generate` keeps each
    block's stream, so that memory is constant where every block is linear; padding on any side changes nothing.
    Gradient checkpointing recomputes each block. A folder brings back what its maps have drawn and learned.

    Attributes:
        model: the `LinearLM` itself.

    Args:
        config: its settings.

    Raises:
        ValueError: as `LinearLMConfig` and the layers.

    Example:
        >>> import torch
        >>> model = LinearLMForCausalLM(LinearLMConfig(num_hidden_layers=2, pattern="ls")).eval()
        >>> text = torch.tensor([list(b"linear")])
        >>> model.generate(text, max_new_tokens=4, do_sample=False).shape
        torch.Size([1, 10])

    Source: transformers' documentation, "Building custom models".
    """

    config_class = LinearLMConfig
    config: LinearLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _is_stateful = True
    _input_embed_layer = "embedding"

    def __init__(self, config: LinearLMConfig) -> None:
        super().__init__(config)
        self.model = LinearLM(config.vocab_size, blocks_of(config))
        for parameter in self.model.parameters():
            # Blocks, maps and gates have initial weights of their own, which transformers is not to replace.
            parameter._is_hf_initialized = True
        self._no_split_modules = ["Block"]
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: StreamCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        inputs_embeds: None = None,
        output_attentions: bool | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits of the next tokens, and the loss against labels.

        Args:
            input_ids: (B, L) int64, the next tokens.
            attention_mask: (B, n), n ≥ L, 1 = attend, column j of which is token j of the text so far and these; of
                these tokens alone where n is too few for both. None for no padding.
            past_key_values: the text so far; it goes on with these tokens.
            labels: (B, L) int64, the tokens themselves, shifted inside; -100 is left out.
            use_cache: whether to return the text's streams; config.use_cache outside training if None.
            output_hidden_states: whether to return every layer's states; config.output_hidden_states if None.
            logits_to_keep: compute logits of so many last tokens alone; 0 for all.
            num_items_in_batch: what the summed loss is divided by, as Trainer gives it; the mean if None.
            inputs_embeds, output_attentions: those of other models, which PEFT gives too; None, or no weights.

        Returns:
            loss, if labels are given, logits (B, L, V), past_key_values and hidden_states, each (B, L, E): the
            embeddings, what each block but the last gives, and what the last one gives after the norm.

        Raises:
            TypeError: another kind of cache.
            ValueError: embeddings, or weights asked for; a mask of single pairs, or one that changes earlier tokens;
                shapes that do not fit, as labels of some tokens alone, or other rows than the cache's.
        """
        if input_ids is None or inputs_embeds is not None or output_attentions:
            raise ValueError("a LinearLM takes input_ids alone; leave out inputs_embeds and output_attentions")
        shape, cache = tuple(input_ids.shape), past_key_values
        if len(shape) != 2 or input_ids.is_floating_point():
            raise ValueError(f"input_ids must be integers of shape (B, L), got {shape} of {input_ids.dtype}")
        if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
            raise ValueError(f"logits_to_keep must be a number of tokens, or 0 for all, got {logits_to_keep!r}")
        if labels is not None and (tuple(labels.shape) != shape or logits_to_keep):
            raise ValueError(
                f"labels must be (B, L) = {shape}, as the tokens, and beside all logits; got {tuple(labels.shape)} and "
                f"logits_to_keep={logits_to_keep}; give labels of all tokens, -100 where one does not count"
            )
        if cache is not None and not isinstance(cache, StreamCache):
            raise TypeError(
                f"past_key_values must be a linattn.hf.StreamCache, got {type(cache).__name__}; or leave it out"
            )
        if cache is not None and len(cache) != len(self.model.blocks):
            raise ValueError(
                f"the StreamCache has {len(cache)} layers and the model {len(self.model.blocks)} blocks; give "
                f"StreamCache({len(self.model.blocks)})"
            )
        by_default = self.config.use_cache and not self.training and labels is None
        if cache is None and (by_default if use_cache is None else use_cache):
            cache = StreamCache(len(self.model.blocks))
        mask_shape = shape if attention_mask is None else tuple(attention_mask.shape)
        if len(mask_shape) != 2 or mask_shape[0] != shape[0] or mask_shape[1] < shape[1]:
            raise ValueError(
                f"attention_mask must be (B, n) with (B, L) = {shape} and n ≥ L, got {mask_shape}; a kernel masks "
                "keys, not single pairs"
            )
        key_mask = None if attention_mask is None else attention_mask.bool()
        key_mask = key_mask if cache is None else cache.checked_mask(key_mask, *shape)
        # Without a mask softmax blocks need no (L, L) one either.
        key_mask = None if key_mask is None or surely_all(key_mask[:, : shape[1]]) else key_mask[:, : shape[1]]
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states: list[Tensor] | None = [] if wants_states else None
        if cache is None:
            x = self.model.vectors(input_ids, key_mask=key_mask, inputs=states)
        else:
            x, streams = self.model.vectors_with_state(input_ids, cache.streams, key_mask=key_mask, inputs=states)
        logits = self.model.logits(x[:, -logits_to_keep:])
        sizes = {"vocab_size": self.config.vocab_size, "num_items_in_batch": num_items_in_batch}
        loss = None if labels is None else self.loss_function(logits=logits, labels=labels, **sizes)
        hidden_states = None if states is None else (*states, self.model.norm(x))
        if cache is not None:  # Last: an error leaves the cache as it was.
            cache.advance(streams, input_ids.shape[1])
        return CausalLMOutputWithPast(loss, logits, cache, hidden_states)

    def save_pretrained(self, *args: Any, **options: Any) -> None:
        """Write a folder as transformers does.

        Raises:
            ValueError: maps were fitted to samples: a model that is loaded has no places for their tensors.
        """
        maps = {name: part for name, part in self.named_modules() if isinstance(part, FittedMap)}
        fitted = [name for name, part in maps.items() if any(getattr(part, x) is not None for x in part.fitted_buffers)]
        if fitted:
            raise ValueError(
                f"{', '.join(fitted)} of this LinearLM were fitted to samples, and a folder brings no such tensors "
                "back; keep the model by torch.save, or take maps that learn or are drawn, as FavorPlus"
            )
        super().save_pretrained(*args, **options)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """Load a folder as transformers does, but refuse weights that do not fit, instead of a warning.

        Raises:
            ValueError: weights are missing, or have no place: those of other settings.
        """
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **options)
        model, loading_info = loaded
        if wrong := sorted(loading_info["missing_keys"] | loading_info["unexpected_keys"]):
            raise ValueError(
                f"the weights do not fit the model that config.json describes, missing there or without a place here: "
                f"{', '.join(wrong)}; give the config they were saved with"
            )
        if constants := dict(model.named_non_persistent_buffers()):  # No file has them, and transformers empties them.
            made = cls(model.config)
            for name, x in constants.items():
                x.copy_(made.get_buffer(name))
        # Tensors were set one by one: what maps derive from theirs is derived anew.
        model.load_state_dict(model.state_dict())
        return loaded if output_loading_info else model

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: Any, generation_mode: Any, batch_size: int, max_cache_length: int
    ) -> Any:
        """`generate`'s cache: the one given, or one of streams."""
        named, cache = generation_config.cache_implementation, model_kwargs.get("past_key_values")
        if named is not None:
            raise ValueError(
                f"a LinearLM keeps streams, not keys and values, got cache_implementation={named!r}; leave it out"
            )
        if cache is not None and generation_config.use_cache is False:
            raise ValueError("use_cache=False gives the whole text again for each token; leave out that, or the cache")
        if cache is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = StreamCache(len(self.model.blocks))

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse a text that the cache holds all of, which transformers would give again."""
        if (count := kwargs.get("next_sequence_length")) is not None and count <= 0:
            raise ValueError("the cache holds all of the text already; add a token to it, or give a new cache")
        inherited: Any = super()
        return inherited.prepare_inputs_for_generation(*args, **kwargs)


class RedrawCallback(TrainerCallback):
    """Let transformers' Trainer redraw a model's random maps every so many steps, as `linattn.nn.RedrawSchedule`.

    A run that goes on from a checkpoint has the draws of an uncut one: a draw is a function of the step's number.

    Args:
        every: how many steps a draw serves, ≥ 1.
        seed: of the schedule.

    Raises:
        ValueError: `every` or `seed` is not an integer in its range.

    Example:
        >>> RedrawCallback(every=1000).every
        1000
    """

    def __init__(self, *, every: int, seed: int = 0) -> None:
        self.every, self.seed = check_count("every", every), check_seed(seed)
        self._schedule: RedrawSchedule | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin, or go on, at the step that training is at."""
        self._schedule = RedrawSchedule(kwargs["model"], every=self.every, seed=self.seed)
        self._schedule.load_state_dict({"num_steps": state.global_step, "every": self.every, "seed": self.seed})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One step of the optimiser is done."""
        assert self._schedule is not None
        self._schedule.step()


AutoConfig.register(LinearLMConfig.model_type, LinearLMConfig, exist_ok=True)
AutoModelForCausalLM.register(LinearLMConfig, LinearLMForCausalLM, exist_ok=True)
