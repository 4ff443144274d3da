"""The one room that knows transformers: load a model, read its attention calls, answer them differently."""

from importlib.util import find_spec

if find_spec("transformers") is None:
    raise ImportError("linattn.hf reads transformers models, and transformers is missing: pip install 'linattn[hf]'")

from linattn.hf.capturing import Capture as Capture
from linattn.hf.capturing import capture as capture
from linattn.hf.interception import AttentionCall as AttentionCall
from linattn.hf.interception import intercept as intercept
from linattn.hf.loading import LoadedModel as LoadedModel
from linattn.hf.loading import load as load
