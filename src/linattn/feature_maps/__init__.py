"""x -> φ(x): the maps that decide which kernel attention uses.

Elementwise maps (`Exponential`, `EluPlusOne`, `Relu`, `ElementwisePolynomial`, `Identity`, `Dpfp`) have kernels of
their own; `TensorPolynomial` and `Taylor` have polynomial kernels, exactly; `FavorPlus`, `Hyperbolic`, `Trigonometric`,
`Oprf` and `Sderf` estimate the softmax kernel by random features, `RandomRelu` the arc-cosine kernel; `Expansion`
expands softmax attention around query centres; `LearnedExponential` and `Hedgehog` are trained; `Centred` and
`Balanced` wrap any map for the softmax kernel.

Letters: B batch, H heads, Hkv key/value heads, G = H/Hkv query heads of a group, L tokens (Lq, Lk), D head width, R
features, m rows of a projection W: R of them, or R/2 where each makes two features.
"""

from linattn.feature_maps._fitted import FittedMap as FittedMap
from linattn.feature_maps._wrapper import Wrapper as Wrapper
from linattn.feature_maps.base import FeatureMap as FeatureMap
from linattn.feature_maps.base import features as features
from linattn.feature_maps.elementwise import Dpfp as Dpfp
from linattn.feature_maps.elementwise import ElementwisePolynomial as ElementwisePolynomial
from linattn.feature_maps.elementwise import EluPlusOne as EluPlusOne
from linattn.feature_maps.elementwise import Exponential as Exponential
from linattn.feature_maps.elementwise import Identity as Identity
from linattn.feature_maps.elementwise import Relu as Relu
from linattn.feature_maps.expansion import Expansion as Expansion
from linattn.feature_maps.expansion import GroupedFeatureMap as GroupedFeatureMap
from linattn.feature_maps.learned import Hedgehog as Hedgehog
from linattn.feature_maps.learned import LearnedExponential as LearnedExponential
from linattn.feature_maps.learned import LearnedMap as LearnedMap
from linattn.feature_maps.polynomial import Taylor as Taylor
from linattn.feature_maps.polynomial import TensorPolynomial as TensorPolynomial
from linattn.feature_maps.random_base import RandomFeatureMap as RandomFeatureMap
from linattn.feature_maps.random_features import FavorPlus as FavorPlus
from linattn.feature_maps.random_features import Hyperbolic as Hyperbolic
from linattn.feature_maps.random_features import RandomRelu as RandomRelu
from linattn.feature_maps.random_features import Trigonometric as Trigonometric
from linattn.feature_maps.tilted import Oprf as Oprf
from linattn.feature_maps.tilted import Sderf as Sderf
from linattn.feature_maps.wrappers import Balanced as Balanced
from linattn.feature_maps.wrappers import Centred as Centred

_KINDS = (
    *(Exponential, EluPlusOne, Relu, ElementwisePolynomial, Identity, Dpfp, TensorPolynomial, Taylor),
    *(FavorPlus, Hyperbolic, Trigonometric, Oprf, Sderf, RandomRelu),
    *(Expansion, LearnedExponential, Hedgehog),
)
FEATURE_MAPS: dict[str, type[FeatureMap]] = {kind.__name__: kind for kind in _KINDS}
"""Every map that is built from a head width, by class name."""

WRAPPERS: dict[str, type[Centred] | type[Balanced]] = {wrapper.__name__: wrapper for wrapper in (Centred, Balanced)}
"""Every map that is built around another, by class name."""
