"""Faults of position encodings, gates and relative biases."""

from __future__ import annotations

from faults.fault import Fault

ROOM = "positions/"
ENCODINGS, ROTARY = (f"tests/positions/test_{name}.py" for name in ("encodings", "rotary"))
GATES, RELATIVE = "tests/positions/test_gates.py", "tests/positions/test_relative_bias.py"
AGAIN = "tests/positions/test_relative_bias_gradients.py"
FIXED, FORGET = "tests/positions/test_fixed_decay.py", "tests/positions/test_forget_gate.py"

FAULTS = (
    Fault(
        "mirror where positions should rotate",
        ROOM + "encodings.py",
        "second * cos + first * sin",
        "second * cos - first * sin",
        ROTARY,
    ),
    Fault(
        "take any map for a relative one",
        ROOM + "encodings.py",
        "if self.require_relative and not _keeps_rotations(feature_map):",
        "if False:",
        ENCODINGS,
    ),
    Fault(
        "give the last queries the first positions",
        ROOM + "encodings.py",
        "at[..., at.shape[-1] - query.shape[2] :]",
        "at[..., : query.shape[2]]",
        ENCODINGS,
    ),
    Fault(
        "count padding as positions",
        ROOM + "encodings.py",
        "first.unsqueeze(1) + seen - key_mask.long()",
        "first.unsqueeze(1) + torch.ones_like(seen).cumsum(1) - 1",
        ENCODINGS,
    ),
    Fault(
        "start each call of a stream at position 0",
        ROOM + "encodings.py",
        "first = torch.as_tensor(start, device=key_mask.device)",
        "first = torch.as_tensor(0 * start, device=key_mask.device)",
        ENCODINGS,
    ),
    Fault(
        "take one position more than there are",
        ROOM + "encodings.py",
        "high >= self.max_length",
        "high > self.max_length",
        ENCODINGS,
    ),
    Fault(
        "let a token's own forget gate weigh on it",
        ROOM + "gates.py",
        "behind[..., 1:]",
        "behind[..., :-1]",
        GATES,
    ),
    Fault(
        "let masked tokens make others fade",
        ROOM + "gates.py",
        "[torch.where(key_mask.unsqueeze(1), x, 0.0) for x in logs]",
        "logs",
        GATES,
    ),
    Fault(
        "leave the state before a call undecayed",
        ROOM + "gates.py",
        "None if state is None else state.decay(log_decay)",
        "state",
        GATES,
    ),
    Fault(
        "sum gates over a whole call",
        ROOM + "gates.py",
        "_LONGEST_FALL = 2.0**10",
        "_LONGEST_FALL = 2.0**60",
        GATES,
    ),
    Fault(
        "sum logarithms of gates of 0",
        ROOM + "gates.py",
        "logs[0].clamp(min=_LOWEST)",
        "logs[0]",
        GATES,
    ),
    Fault(
        "refuse a softmax layer's gates of 0",
        ROOM + "gates.py",
        "log_forget.detach().clamp(min=_LOWEST).abs()",
        "log_forget.detach().abs()",
        "tests/nn/test_layers.py",
    ),
    Fault(
        "let autocast narrow the gates",
        ROOM + "gates.py",
        "    with outside_autocast(x.device):\n",
        "    if True:\n",
        FORGET,
    ),
    Fault(
        "take ALiBi's slopes between from the wrong end",
        ROOM + "gates.py",
        "2.0 ** (-4 * h / lower)",
        "2.0 ** (-8 * h / lower)",
        FIXED,
    ),
    Fault(
        "compute other features for gradients",
        ROOM + "relative_bias.py",
        "if out.requires_grad and not is_traced(out):",
        "if False:",
        AGAIN,
    ),
    Fault("read tokens that were written over", ROOM + "relative_bias.py", "copy=True", "copy=False", AGAIN),
    Fault("transform nothing", ROOM + "relative_bias.py", "if not value.numel():", "if False:", AGAIN),
    Fault(
        "turn distances around",
        ROOM + "relative_bias.py",
        "torch.cat((first, gap, last), -1)",
        "torch.cat((last, gap, first), -1)",
        RELATIVE,
    ),
    Fault(
        "take the scale of keys for the features",
        ROOM + "relative_bias.py",
        "torch.exp(phi + self._peak[..., columns] - self._row_peak[:, :, at])",
        "torch.exp(phi - self._row_peak[:, :, at])",
        RELATIVE,
    ),
    Fault(
        "convolve masked keys",
        ROOM + "relative_bias.py",
        "return features if self._tokens.alive is None else features * self._tokens.alive[:, None, :, None]",
        "return features",
        RELATIVE,
    ),
    Fault(
        "measure distances over padding",
        ROOM + "relative_bias.py",
        "at = key_mask.cumsum(1)",
        "at = torch.ones_like(key_mask).cumsum(1)",
        RELATIVE,
    ),
    Fault(
        "hand out rows that the transforms have rounded away",
        ROOM + "relative_bias.py",
        "lost = noise > tolerance * den.detach().abs()",
        "lost = noise > torch.inf",
        RELATIVE,
    ),
    Fault(
        "keep every chunk for the backward pass",
        ROOM + "relative_bias.py",
        "if not torch.is_grad_enabled():",
        "if True:",
        RELATIVE,
    ),
    Fault(
        "compute a gate beside its layer",
        "positions/gates.py",
        "if is_plain and dtype != x.dtype:",
        "if True:",
        "tests/positions/test_adapted_gates.py",
    ),
    Fault(
        "load rates that were cast",
        "positions/gates.py",
        "if saved is not None and saved.dtype not in",
        "if False and saved.dtype not in",
        "tests/positions/test_fixed_decay.py",
    ),
    Fault(
        "let gates that are no number through",
        "positions/gates.py",
        "if not bool(fallen[:, -1].isfinite().all()):",
        "if False:",
        "tests/positions/test_gates.py",
    ),
    Fault(
        "take a layer with hooks for a plain one",
        "positions/gates.py",
        "is nn.Linear and not hooks",
        "is nn.Linear",
        "tests/positions/test_adapted_gates.py",
    ),
    Fault(
        "compute plain gates in half precision",
        "positions/gates.py",
        "if is_plain and dtype != x.dtype:",
        "if False:",
        "tests/positions/test_adapted_gates.py",
    ),
    Fault(
        "look at gates without values",
        "positions/gates.py",
        " or log_forget.is_meta",
        "",
        "tests/laws/test_shapes_alone.py",
    ),
    Fault(
        "look at positions without values",
        "positions/encodings.py",
        " or at.is_meta",
        "",
        "tests/laws/test_shapes_alone.py",
    ),
    Fault(
        "look at a kernel without values",
        "positions/encodings.py",
        "is_fake(turned) or ",
        "",
        "tests/laws/test_shapes_alone.py",
    ),
)
