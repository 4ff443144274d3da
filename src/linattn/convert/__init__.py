"""Softmax model -> linear model: calibrate, swap, distil, and measure the error at every stage.

Letters: B batch, H query heads, L tokens, n of them that are live or chosen, E width of a state, V vocabulary.
"""

from importlib.util import find_spec

if _missing := [name for name in ("transformers", "tensorboard", "peft") if find_spec(name) is None]:
    raise ImportError(
        f"linattn.convert trains transformers models, and {', '.join(_missing)} is missing: pip install "
        "'linattn[convert]'"
    )

from linattn.convert.config import DEFAULT_MAP as DEFAULT_MAP
from linattn.convert.config import ConvertConfig as ConvertConfig
from linattn.convert.conversion import convert_ as convert_
from linattn.convert.course import Conversion as Conversion
from linattn.convert.speed import Paying as Paying
from linattn.convert.speed import Speed as Speed
from linattn.convert.stages import Agreement as Agreement
from linattn.convert.stages import LayerError as LayerError
from linattn.convert.stages import Stage as Stage
from linattn.training import Trained as Trained
