"""The one room that knows transformers: load a model, read its attention calls, answer them differently.

`capture` and `intercept` read a model and leave it as it was; `linearize_` replaces its softmax attention, `restore_`
undoes that. Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq, Lk), n of them seen so far, N of all
samples, D head width, Dv value width, E width of a model, V vocabulary.
"""

from importlib.util import find_spec

if _missing := [package for package in ("transformers", "pydantic") if find_spec(package) is None]:
    raise ImportError(
        f"linattn.hf reads transformers models with {' and '.join(_missing)}, not installed here: "
        "pip install 'linattn[hf]'"
    )

from transformers import Cache as Cache
from transformers import PreTrainedModel as PreTrainedModel

from linattn.hf._bounded_layers import BoundedLayer as BoundedLayer
from linattn.hf._text_caches import cache_bytes as cache_bytes
from linattn.hf.bounded_cache import BoundedCache as BoundedCache
from linattn.hf.bounded_cache import BoundedLayerReport as BoundedLayerReport
from linattn.hf.byte_tokenizer import ByteTokenizer as ByteTokenizer
from linattn.hf.context_parallel import context_parallel as context_parallel
from linattn.hf.interception import AttentionCall as AttentionCall
from linattn.hf.interception import Capture as Capture
from linattn.hf.interception import capture as capture
from linattn.hf.interception import intercept as intercept
from linattn.hf.language_model import LinearLMForCausalLM as LinearLMForCausalLM
from linattn.hf.language_model import RedrawCallback as RedrawCallback
from linattn.hf.language_model_config import LinearLMConfig as LinearLMConfig
from linattn.hf.layer_attention import LayerAttention as LayerAttention
from linattn.hf.linearization import LayerReport as LayerReport
from linattn.hf.linearization import Linearization as Linearization
from linattn.hf.linearization import is_linearized as is_linearized
from linattn.hf.linearization import linearize_ as linearize_
from linattn.hf.linearization import restore_ as restore_
from linattn.hf.loading import LoadedModel as LoadedModel
from linattn.hf.loading import load as load
from linattn.hf.saving import from_pretrained as from_pretrained
from linattn.hf.saving import save_pretrained as save_pretrained
from linattn.hf.state_cache import EncoderDecoderStates as EncoderDecoderStates
from linattn.hf.state_cache import StateCache as StateCache
from linattn.hf.state_cache import StateLayer as StateLayer
from linattn.hf.state_cache import StreamCache as StreamCache
from linattn.hf.state_cache import StreamLayer as StreamLayer
from linattn.hf.streaming import load_language_model as load_language_model
from linattn.hf.streaming import new_cache as new_cache
from linattn.hf.streaming import stream_tokens as stream_tokens
