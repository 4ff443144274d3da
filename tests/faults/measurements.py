"""Faults of audits of heads, and of benchmarks."""

from __future__ import annotations

from faults.fault import Fault

FAULTS = (
    Fault(
        "write over an interrupted benchmark of other settings",
        "lab/bench/records.py",
        "repr(header).encode()",
        "header.map.encode()",
        "lab/tests/commands/test_bench.py",
    ),
    Fault(
        "count what a stream keeps without causality too",
        "lab/bench/measuring.py",
        "state_numbers(built, value_dim=settings.head_dim, is_causal=settings.is_causal)",
        "state_numbers(built, value_dim=settings.head_dim, is_causal=True)",
        "lab/tests/bench/test_measuring.py",
    ),
    Fault(
        "measure finished methods of an audit again",
        "lab/audit/measuring.py",
        "is_done=is_whole or self._has_layer(configuration, number, kept)",
        "is_done=False",
        "lab/tests/commands/test_audit.py",
    ),
    Fault(
        "keep the rows of a layer that was cut short",
        "lab/audit/kept.py",
        "number == wanted[group[0]][group[-1]]",
        "number > 0",
        "lab/tests/commands/test_audit.py",
    ),
    Fault(
        "leave nothing out of an audit",
        "lab/audit/leaving_out.py",
        "_LENGTH = 8192",
        "_LENGTH = 2**40",
        "lab/tests/commands/test_audit.py",
    ),
    Fault(
        "look for the length from which a method pays until it is slower",
        "lab/audit/paying.py",
        "if ours < theirs or",
        "if ours > theirs or",
        "lab/tests/audit/test_paying.py",
    ),
    Fault(
        "time a method that another beats in error and in time",
        "lab/audit/paying.py",
        "min((1 - _SMALL_GAIN) * uniform, least)",
        "(1 - _SMALL_GAIN) * uniform",
        "lab/tests/audit/test_paying.py",
    ),
    Fault(
        "begin a benchmark of a method that no call can have",
        "lab/bench/settings.py",
        "        built.check_call(self.lengths[-1], is_causal=self.is_causal)\n",
        "",
        "lab/tests/commands/test_bench.py",
    ),
    Fault(
        "verify a benchmark within a single block",
        "lab/bench/errors.py",
        "NUM_VERIFIED = 2_500",
        "NUM_VERIFIED = 512",
        "lab/tests/bench/test_measuring.py",
    ),
    Fault(
        "hold causal keys in few bits to float64",
        "lab/bench/settings.py",
        "if in_few_bits or not built.nonnegative:",
        "if not built.nonnegative:",
        "lab/tests/bench/test_measuring.py",
    ),
    Fault(
        "begin an audit with methods that its model cannot call",
        "lab/audit/leaving_out.py",
        "check_call(num_tokens, is_causal=is_causal)",
        "check_call(num_tokens, is_causal=False)",
        "lab/tests/commands/test_audit.py",
    ),
    Fault(
        "refuse a named method after others were measured",
        "lab/audit/measuring.py",
        "            built.check_call(num_tokens, is_causal=call.is_causal)\n",
        "            pass\n",
        "lab/tests/commands/test_audit.py",
    ),
    Fault(
        "keep the rows of every draw for the explorer",
        "lab/audit/measuring.py",
        'if draw == 0 and not kept.has("weights", label, width, layer=number):',
        'if not kept.has("weights", label, width, layer=number):',
        "lab/tests/audit/test_weights.py",
    ),
    Fault(
        "lose the sign of a weight",
        "lab/audit/weights.py",
        ".round() * cells.sign() + STEPS",
        ".round() + STEPS",
        "lab/tests/audit/test_weights.py",
    ),
)
