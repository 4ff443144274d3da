"""Modules that own weights: attention layers, blocks of them, and models that are lists of blocks.

A model is written out as the list of its blocks; a hybrid has softmax layers among them:

    blocks = [Block(LinearAttention(…, is_causal=True)), …, Block(SoftmaxAttention(…, is_causal=True))]
    model = LinearLM(256, blocks)

Every layer has `forward`, for whole sequences, and `forward_with_state`, for streams cut anywhere. Letters: B batch,
H query heads, Hkv key/value heads, L tokens (Lq, Lk), E a layer's width, D head width, Dv value width, R features.
"""

from linattn.nn.attention import Attention as Attention
from linattn.nn.linear_attention import LinearAttention as LinearAttention
from linattn.nn.models import Block as Block
from linattn.nn.models import LinearLM as LinearLM
from linattn.nn.models import Predicted as Predicted
from linattn.nn.multihead_attention import MultiheadAttention as MultiheadAttention
from linattn.nn.redrawing import RedrawSchedule as RedrawSchedule
from linattn.nn.softmax_attention import SoftmaxAttention as SoftmaxAttention
from linattn.nn.streams import KeptTokens as KeptTokens
from linattn.nn.streams import Stream as Stream
