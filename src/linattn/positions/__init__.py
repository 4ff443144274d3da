"""Where a token stands: encodings of queries and keys before the map, relative biases, gates and decay.

| name | weight of key j for query i | cost beyond the op's | directions | streamable | relative |
|---|---|---|---|---|---|
| `Rotary` | φ(R_i q)·φ(R_j k) | O(L·D) | both | yes | for kernels of q·k |
| `SinusoidalCodes` | φ([q; p_i])·φ([k; p_j]), p sines | O(L·P), a map P wider | both | yes | for kernels of q·k |
| `LearnedCodes` | φ([q; p_i])·φ([k; p_j]), p learned | O(L·P), a map P wider | both | up to M | no |
| `FixedDecay` | φ(q)·φ(k)·e^{-λ(i - j)} | O(L) | causal | yes | yes |
| `ForgetGate` | φ(q)·φ(k)·i_j·Π_{s=j+1..i} f_s | O(L·E) | causal | yes | yes |
| `relative_bias_attention` | φ(q_i)·φ(k_j)·e^{b(i - j)} | O(L·log L·R·Dv) | both | no | yes |

An encoding is a `Position`: `bind` once gives the map to attend with, calling it gives q and k for attention;
`token_positions` counts positions across padding and a stream. A `Gate` turns tokens into `Gates`, which
`gated_attention_with_state` takes, or `gate_bias` turns into `key_bias` and a decay of the state. Letters: B batch, H
query heads, Hkv key/value heads, G query heads per key/value head, L tokens (Lq, Lk), D head width, Dv value width, P
code width, R features, C features of a chunk, Hb heads of a bias that share a key/value head, N length of a transform,
E model width, M the longest sequence.
"""

from linattn.positions.encodings import LearnedCodes as LearnedCodes
from linattn.positions.encodings import Position as Position
from linattn.positions.encodings import Rotary as Rotary
from linattn.positions.encodings import SinusoidalCodes as SinusoidalCodes
from linattn.positions.encodings import rotary as rotary
from linattn.positions.encodings import token_positions as token_positions
from linattn.positions.gates import FixedDecay as FixedDecay
from linattn.positions.gates import ForgetGate as ForgetGate
from linattn.positions.gates import Gate as Gate
from linattn.positions.gates import GateBias as GateBias
from linattn.positions.gates import Gates as Gates
from linattn.positions.gates import gate_bias as gate_bias
from linattn.positions.gates import gated_attention_with_state as gated_attention_with_state
from linattn.positions.relative_bias import relative_bias_attention as relative_bias_attention
