"""Faults of the checks of states, and of what decays them."""

from __future__ import annotations

from faults.fault import Fault

CHECKS, STATE, LAWS = "attention/_check.py", "attention/state.py", "tests/laws/test_state_checks.py"
FAR, SUMS, STREAMS, STREAM_LAWS = "attention/sums.py", "attention/sums.py", "nn/streams.py", "tests/nn/test_streams.py"
TENSORS, MERGED_CHECKS = "softmax/checking.py", "kv_cache/state_checks.py"
MERGED_STATE, MERGED_LAWS = "kv_cache/state.py", "tests/kv_cache/test_state_checks.py"
RESTORED, FACTOR_LAWS = "softmax/tokens.py", "tests/laws/test_large_factors.py"

FAULTS = (
    Fault(
        "take z of any shape",
        CHECKS,
        'check_tensor("z", z, (batch, heads, num_features), dtype, device, _REMEDY)',
        "pass",
        LAWS,
    ),
    Fault(
        "take exponents of any dtype",
        CHECKS,
        'check_tensor("m", m, (batch, heads, num_exponents), dtype, device, _REMEDY)',
        "pass",
        LAWS,
    ),
    Fault(
        "take sums of another map's size",
        CHECKS,
        "num_features, num_exponents = feature_map.num_features",
        "_, num_exponents = feature_map.num_features",
        LAWS,
    ),
    Fault(
        "look at sums alone",
        CHECKS,
        "_check_keys(S, window, _head_dim_of(window) if head_dim is None else head_dim)",
        "pass",
        LAWS,
    ),
    Fault("take more merged keys than a config keeps", TENSORS, "and count > most", "and False", MERGED_LAWS),
    Fault("compare shapes alone", TENSORS, "or x.dtype != dtype", "", LAWS),
    Fault("forget the device", TENSORS, " or x.device != device:", ":", LAWS),
    Fault(
        "look at the latest tokens of merged keys alone",
        MERGED_CHECKS,
        'check_tokens("sinks", keys.sinks, config.num_sinks, sizes, dtype, device, _REMEDY)',
        "pass",
        MERGED_LAWS,
    ),
    Fault("take the query sample of more heads", MERGED_CHECKS, "sample_size(num_groups)", "None", MERGED_LAWS),
    Fault(
        "select from merged keys that do not belong together",
        MERGED_STATE,
        "self._check_whole()\n        if isinstance",
        "if isinstance",
        MERGED_LAWS,
    ),
    Fault("read a config from a file unchecked", "kv_cache/config.py", "self.__post_init__()", "pass", MERGED_LAWS),
    Fault(
        "believe a file that its merged keys were looked at",
        RESTORED,
        "self.__dict__.update({field.name: state.get(field.name) for field in fields(record) if field.repr})",
        "self.__dict__.update(state)",
        MERGED_LAWS,
    ),
    Fault(
        "believe merged keys that they fit any tokens",
        MERGED_STATE,
        "self._fits != (head_dim, num_groups)",
        "self._fits is None",
        MERGED_LAWS,
    ),
    Fault(
        "decay what does not belong together",
        STATE,
        "self.check_tensors()\n        factor",
        "factor",
        LAWS,
    ),
    Fault(
        "select from what does not belong together",
        STATE,
        "self.check_tensors()\n        groups",
        "groups",
        LAWS,
    ),
    Fault("take a window of any width from a file", CHECKS, "check_width(window.width)", "pass", LAWS),
    Fault(
        "believe a file that its state was looked at",
        RESTORED,
        "self.__dict__.update({field.name: state.get(field.name) for field in fields(record) if field.repr})",
        "self.__dict__.update(state)",
        LAWS,
    ),
    Fault("take a factor of NaN", FAR, "if not bool((log_factor < torch.inf).all()):", "if False:", LAWS),
    Fault("decay by -inf to exponents of no size", SUMS, "torch.where(gone, none, m)", "m", FACTOR_LAWS),
    Fault(
        "let exponents take a large factor",
        FAR,
        "if before is None and bool(",
        "if before is None or bool(",
        FACTOR_LAWS,
    ),
    Fault(
        "keep a factor apart from tokens that outweigh it",
        FAR,
        "torch.where(apart + _peak(state) >= newest",
        "torch.where(apart == apart",
        FACTOR_LAWS,
    ),
    Fault(
        "forget the factor that is apart in a call",
        FAR,
        "return near, (biases - apart.unsqueeze(-1)).to(near.m.dtype), apart",
        "return near, bias, None",
        FACTOR_LAWS,
    ),
    Fault(
        "merge factors that are apart as if they were one",
        STATE,
        "first, second = (x.without(apart)._relative_sums for x in (self, other))",
        "first, second = (x._relative_sums for x in (self, other))",
        FACTOR_LAWS,
    ),
    Fault(
        "tell no reader of a factor apart",
        STATE,
        "part.times(self.apart)",
        "part",
        FACTOR_LAWS,
    ),
    Fault(
        "cut the gradient of a large factor",
        FAR,
        "log_factor - log_factor.detach()",
        "torch.zeros_like(log_factor)",
        FACTOR_LAWS,
    ),
    Fault(
        "take a factor apart of any shape",
        CHECKS,
        'check_tensor("apart", apart, (batch, heads), torch.float64, device, _REMEDY)',
        "pass",
        FACTOR_LAWS,
    ),
    Fault("broadcast the tokens seen", STREAMS, "n.shape != x.shape[:1]", "False", STREAM_LAWS),
    Fault("go on with tokens kept of any kind", STREAMS, "    _check_kept(past, new)\n", "", STREAM_LAWS),
    Fault(
        "write over a query",
        "attention/backends/blocked/__init__.py",
        "t = t + column",
        "t = t.add_(column)",
        "tests/laws/test_causality.py",
    ),
    Fault(
        "give two streams that part the same places for their keys",
        "attention/window/keys.py",
        "or not self.free.pop(self.stop, False)",
        "or not self.free",
        "tests/laws/test_window_buffer.py",
    ),
    Fault(
        "write the places after a stream's keys into its file",
        "attention/window/keys.py",
        "if self.buffer is None else",
        "if True else",
        "tests/laws/test_window_buffer.py",
    ),
    Fault(
        "take a buffer of keys from a file",
        "softmax/tokens.py",
        " for field in fields(record) if field.repr})",
        " for field in fields(record)})",
        "tests/laws/test_window_buffer.py",
    ),
    Fault(
        "let later keys undo what a backward pass has saved",
        "attention/window/keys.py",
        "places.data[:, :, self.stop : stop] = x",
        "places[:, :, self.stop : stop] = x",
        "tests/laws/test_window_buffer.py",
    ),
)
