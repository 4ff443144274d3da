"""Faults of what compiled code is given."""

from __future__ import annotations

from faults.fault import Fault

COMPILED, LAWS = "attention/backends/compiled.py", "tests/laws/test_compiled.py"

FAULTS = (
    Fault("share the first head's W", COMPILED, "x.shape[0] == 1 else x.stride(0)", "True else x.stride(0)", LAWS),
    Fault("share the first head's biases", COMPILED, "1 if bias is None else bias.shape[1]", "1", LAWS),
    Fault("read sums that lie apart as if they did not", COMPILED, "(x.contiguous() for x in before)", "before", LAWS),
    Fault("write over the state", COMPILED, "Sums(*(torch.empty_like(x) for x in (S, z, m)))", "Sums(S, z, m)", LAWS),
    Fault("cut the gradient of a state", COMPILED, "powers is None or is_followed(*before)", "powers is None", LAWS),
    Fault("cut the gradient of a token", COMPILED, "or is_followed(query, key, call.value, call.bias)", "", LAWS),
    Fault("round rows to 32 bits", COMPILED, "rows._replace(out=out.to(call.query.dtype))", "rows", LAWS),
    Fault("run with code that means something else", COMPILED, "if found != _INTERFACE", "if False", LAWS),
)
