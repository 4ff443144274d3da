"""Faults of key biases, decay and the table of backends."""

from __future__ import annotations

from faults.fault import Fault

BLOCKED = "attention/backends/blocked/"
LAWS = "tests/laws/test_bias.py"
RISING = "tests/laws/test_rising_biases.py"

FAULTS = (
    Fault(
        "forget that keys without a bias stand beside biased ones",
        BLOCKED + "features.py",
        "return self.linear if bool((c == 0).all()) else self.linear * exponential_(-c).unsqueeze(-2)",
        "return self.linear",
        LAWS,
    ),
    Fault(
        "give a bias of all heads the gradient of the first",
        BLOCKED + "features.py",
        "self.of_heads.sum(1, keepdim=True)",
        "self.of_heads[:, :1]",
        LAWS,
    ),
    Fault(
        "leave the bias out of the neighbourhood",
        "attention/window/neighbourhood.py",
        "inputs.bias.unsqueeze(-1)).mT, alpha=LOG2_E)",
        "inputs.bias.clamp(max=0).unsqueeze(-1)).mT, alpha=LOG2_E)",
        LAWS,
    ),
    Fault(
        "leave a stream's recent keys undecayed",
        "attention/window/keys.py",
        "bias=self.recent.bias + shift",
        "bias=self.recent.bias",
        LAWS,
    ),
    Fault(
        "keep the decay from gradients",
        "attention/sums.py",
        "if is_followed(shift):",
        "if False:",
        LAWS,
    ),
    Fault(
        "take statistics over keys that a bias masks",
        "attention/checking.py",
        "    live = key_bias != -torch.inf\n",
        "    live = torch.ones_like(key_bias, dtype=torch.bool)\n",
        LAWS,
    ),
    Fault(
        "run a backend against its objections",
        "attention/backends/__init__.py",
        "else backend.objections(call):",
        "else []:",
        "tests/laws/test_backends.py",
    ),
    Fault(
        "let autocast reach exact attention",
        "softmax/attention.py",
        "    with outside_autocast(query.device):\n        return _by_sdpa",
        "    if True:\n        return _by_sdpa",
        "tests/laws/test_precision.py",
    ),
    Fault(
        "let autocast reach the window",
        "attention/functional.py",
        "with outside_autocast(key.device):",
        "if True:",
        "tests/laws/test_precision.py",
    ),
    Fault(
        "let rows lose keys of weaker biases than the block's last",
        BLOCKED + "biases.py",
        "held = fall + rise < limit",
        "held = torch.ones_like(rise, dtype=torch.bool)",
        RISING,
    ),
    Fault(
        "keep biases apart where keys are far from the exponent",
        BLOCKED + "biases.py",
        "apart = held | (",
        "apart = torch.ones_like(held) | (",
        RISING,
    ),
    Fault(
        "measure how far sums fall from the largest key that there ever was",
        BLOCKED + "biases.py",
        "(c - state.m - z.log()).amax(-1)",
        "(c - state.m).amax(-1)",
        RISING,
    ),
    Fault(
        "let all rows see the block's largest bias",
        BLOCKED + "biases.py",
        "coarse(wide).cummax(-1).values",
        "coarse(wide).amax(-1, keepdim=True).expand(wide.shape)",
        RISING,
    ),
    Fault(
        "weigh keys of joint heads twice",
        BLOCKED + "biases.py",
        ".masked_fill_(joint.unsqueeze(-1), 0)",
        "",
        RISING,
    ),
    Fault(
        "pass the gradient of sums on as if they had not faded",
        BLOCKED + "causal.py",
        "pulled.S.mul_(visit.factor.unsqueeze(-1))",
        "pass",
        RISING,
    ),
    Fault(
        "forget that sums fade while a block is folded in",
        BLOCKED + "causal.py",
        "grad_S.mul_(biases.fading.unsqueeze(-1))",
        "pass",
        RISING,
    ),
    Fault(
        "give biases beside linear features the gradient of another factor",
        BLOCKED + "causal.py",
        "(grad_phi_k * visit.phi_k).sum(-1)",
        "grad_phi_k.sum(-1)",
        RISING,
    ),
    Fault(
        "let rows of spans see the largest bias of their own",
        BLOCKED + "biases.py",
        "place // span * span if span else place + 1",
        "place + 1",
        RISING,
    ),
    Fault(
        "keep biases apart where a feature of the sums is far below the keys'",
        BLOCKED + "biases.py",
        "((fall < limit) | (z == 0).all(-1))",
        "True",
        RISING,
    ),
    Fault(
        "cut heads whose biases are not within their exponents",
        BLOCKED + "causal.py",
        "safe if safe is None else safe | how.apart",
        "safe",
        RISING,
    ),
    Fault(
        "move sums far along a text to exponents that their level rounds",
        BLOCKED + "features.py",
        "coarse((peak - self.start.squeeze(-2)) * (1 / LOG2_E))",
        "(peak - self.start.squeeze(-2)) * (1 / LOG2_E)",
        RISING,
    ),
    Fault(
        "give biases of 0 the gradient of linear features",
        BLOCKED + "causal.py",
        "(biases is None and self.of_bias.of_heads is None)",
        "biases is None",
        RISING,
    ),
    Fault(
        "keep far biases within exponents as they are",
        BLOCKED + "causal.py",
        "state.relabel(last_level(bias, state.level), ~how.apart)",
        "state.relabel(torch.zeros_like(state.level), ~how.apart)",
        RISING,
    ),
    Fault(
        "lose what far exponents of rows are rounded by",
        BLOCKED + "biases.py",
        "return num * factor, den * factor, rounded",
        "return num, den, rounded",
        RISING,
    ),
    Fault(
        "cut far heads' rows without their level",
        BLOCKED + "causal.py",
        "state.views()._replace(m=state.m)",
        "state.views()",
        RISING,
    ),
    Fault(
        "cut far heads' keys by the biases of the call",
        BLOCKED + "causal.py",
        '"split ", within), value, m)',
        '"split "), value, m)',
        RISING,
    ),
)
