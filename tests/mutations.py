"""Deliberate faults, each of which the laws must catch: this script breaks copies of the source and says which did.

Not a test of its own (it runs the laws once per fault, some minutes): it shows that the laws can fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BLOCKED = "attention/_blocked/"


class Fault(NamedTuple):
    """One edit of one file, and the tests expected to turn red."""

    name: str
    file: str
    old: str
    new: str
    tests: str


FAULTS = (
    Fault(
        "drop the sign fix of QR",
        "feature_maps/_draw.py",
        "q * torch.sign(torch.diagonal(r, dim1=-2, dim2=-1)).unsqueeze(-2)",
        "q * 1.0",
        "tests/feature_maps/test_draw.py tests/feature_maps/test_kernel.py",
    ),
    Fault(
        "forget 1/√R",
        "feature_maps/_softmax_estimator.py",
        "-math.log(self.num_features) / 2",
        "0.0",
        "tests/feature_maps/test_kernel.py",
    ),
    Fault(
        "forget |x|²/2",
        "feature_maps/_softmax_estimator.py",
        "self._half_square(x, -self._constant())",
        "-self._constant()",
        "tests/feature_maps/test_kernel.py",
    ),
    Fault(
        "draw in evaluation",
        "feature_maps/_random_base.py",
        '"""The input in float32 or float64, and the weights in its dtype."""',
        '"""Mutated."""\n        self.redraw(self._seed + 1)',
        "tests/laws/test_fold.py",
    ),
    Fault(
        "add an epsilon to the denominator",
        BLOCKED + "reading.py",
        "    den.copy_(total.reshape(den.shape))",
        "    total = total + 1e-6\n    den.copy_(total.reshape(den.shape))",
        "tests/laws/test_truth.py",
    ),
    Fault(
        "mask the values only",
        BLOCKED + "features.py",
        "if mask is not None:",
        "if False:",
        "tests/laws/test_masking.py",
    ),
    Fault(
        "let masked tokens hold NaN",
        BLOCKED + "blocks.py",
        "rows if mask is None else rows.masked_fill_",
        "rows if True else rows.masked_fill_",
        "tests/laws/test_masking.py",
    ),
    Fault(
        "tell maps apart by their settings alone",
        "feature_maps/_base.py",
        "if not names:",
        "if True:",
        "tests/feature_maps/test_learned.py",
    ),
    Fault(
        "hold on to a trainable weight's digest",
        "feature_maps/_digest.py",
        "weight.requires_grad or ",
        "",
        "tests/feature_maps/test_learned.py",
    ),
    Fault(
        "one key maximum for all rows, heads and features",
        BLOCKED + "features.py",
        "torch.maximum(m, self.log.amax(-2))",
        "torch.maximum(m, self.log.amax())",
        "tests/laws/test_independence.py tests/laws/test_convexity.py",
    ),
    Fault(
        "sum over heads instead of tokens",
        BLOCKED + "causal.py",
        "rows.tril_()",
        "scores.transpose(0, 1).tril_()",
        "tests/laws/test_truth.py",
    ),
    Fault(
        "shift the causal diagonal up", BLOCKED + "causal.py", ".tril_()", ".tril_(1)", "tests/laws/test_causality.py"
    ),
    Fault(
        "shift the causal diagonal down", BLOCKED + "causal.py", ".tril_()", ".tril_(-1)", "tests/laws/test_truth.py"
    ),
    Fault(
        "no guard against jumps",
        BLOCKED + "causal.py",
        "_MAX_JUMP = 60.0",
        "_MAX_JUMP = 1e30",
        "tests/laws/test_causality.py",
    ),
    Fault(
        "do not rescale the state when the maximum rises",
        BLOCKED + "blocks.py",
        "decay = per_feature((self.m - c).exp_(), self.z.shape[-1]).flatten(0, 1)",
        "decay = torch.ones_like(self.z[..., :1])",
        "tests/laws/test_fold.py",
    ),
    Fault(
        "keep the state in the inputs' dtype",
        BLOCKED + "blocks.py",
        "return torch.promote_types(dtype, torch.float32)",
        "return dtype",
        "tests/laws/test_precision.py",
    ),
    Fault(
        "unwind the state by subtraction",
        BLOCKED + "causal_backward.py",
        "            found.append(Visit(entry, c, keys, phi_k, safe, start, stop))",
        "            rise = (c - entry.m).exp()\n"
        "            S = entry.S * (entry.m - c).exp().unsqueeze(-1) + phi_k.mT @ v\n"
        "            entry = Moments((S - phi_k.mT @ v) * rise.unsqueeze(-1), entry.z, entry.m) if start else entry\n"
        "            found.append(Visit(entry, c, keys, phi_k, safe, start, stop))",
        "tests/laws/test_gradient.py",
    ),
    Fault(
        "forget the normaliser's gradient",
        BLOCKED + "reading.py",
        "torch.sub(grad_den.unsqueeze(-1).masked_fill(dead, 0), from_out)",
        "grad_den.unsqueeze(-1).masked_fill(dead, 0)",
        "tests/laws/test_gradient.py",
    ),
    Fault(
        "ignore the incoming state",
        "attention/functional.py",
        "        if state is not None:\n            return state.moments",
        "        if state is not None:\n            pass",
        "tests/laws/test_fold.py",
    ),
    Fault(
        "start a segment's recomputation from the state before it",
        BLOCKED + "causal_backward.py",
        "[x[:, index - 1] for x in self._checkpoints]",
        "[x[:, max(index - 2, 0)] for x in self._checkpoints]",
        "tests/laws/test_truth.py",
    ),
    Fault(
        "pull a norm back twice",
        "feature_maps/_softmax_estimator.py",
        "value=-self.scale",
        "value=-2 * self.scale",
        "tests/laws/test_gradient.py",
    ),
    Fault(
        "let a step forget the old state",
        BLOCKED + "stepping.py",
        "z = phi.addcmul_(z, decay)",
        "z = phi",
        "tests/laws/test_fold.py",
    ),
    Fault(
        "interleave grouped heads",
        "attention/functional.py",
        "query.unflatten(1, (key.shape[1], -1))",
        "query.unflatten(1, (-1, key.shape[1])).transpose(1, 2)",
        "tests/laws/test_truth.py",
    ),
    Fault(
        "merge without a common exponent",
        "attention/state.py",
        "m = torch.maximum(self.m, other.m)",
        "m = self.m",
        "tests/laws/test_fold.py",
    ),
    Fault(
        "move keys by M instead of its inverse transpose",
        "feature_maps/balanced.py",
        "backward = matrix.reciprocal() if self.diagonal else torch.linalg.inv(matrix)",
        "backward = forward",
        "tests/feature_maps/test_balanced.py",
    ),
    Fault(
        "balance without the ridge",
        "feature_maps/_spectral.py",
        "torch.maximum(x, floor * x.amax(-1, keepdim=True))",
        "x.clamp(min=1e-14)",
        "tests/feature_maps/test_balanced.py",
    ),
    Fault(
        "stretch a direction as another's tilt asks",
        "feature_maps/sderf.py",
        "spectral(self._tilt, lambda a: (1 - 4 * a).sqrt())",
        "spectral(self._tilt, lambda a: (1 - 4 * a.mean(-1, keepdim=True)).sqrt().expand_as(a))",
        "tests/feature_maps/test_sderf.py",
    ),
    Fault(
        "fit what is inside on what is outside",
        "feature_maps/_wrapper.py",
        "self.inner.fit(self.inner_query(query), self.inner_key(key))",
        "self.inner.fit(query, key)",
        "tests/feature_maps/test_balanced.py tests/feature_maps/test_centred.py",
    ),
    Fault(
        "forget the ridge of landmarks",
        "feature_maps/nystrom.py",
        "eigenvalues.clamp(min=0) + self.ridge",
        "eigenvalues.clamp(min=0)",
        "tests/feature_maps/test_nystrom.py",
    ),
    Fault(
        "invert what is rounding",
        "feature_maps/nystrom.py",
        "torch.where(kept, raised, math.inf).rsqrt()",
        "raised.clamp(min=1e-30).rsqrt()",
        "tests/feature_maps/test_nystrom.py",
    ),
    Fault(
        "accept a state of another draw",
        "attention/state.py",
        "if state.built_with != fingerprint:",
        "if False:",
        "tests/laws/test_fold.py tests/laws/test_refusals.py",
    ),
    Fault(
        "expand around 0 instead of the mean key",
        "feature_maps/expansion.py",
        "u = (delta * mean).sum(-1, keepdim=True)",
        "u = (delta * mean * 0).sum(-1, keepdim=True)",
        "tests/laws/test_truth.py",
    ),
    Fault(
        "take any step for granted",
        "feature_maps/expansion.py",
        "share = _REACH / deviation.clamp(min=_REACH)",
        "share = torch.ones_like(deviation)",
        "tests/feature_maps/test_expansion.py",
    ),
    Fault(
        "read the state at another scale than the block",
        BLOCKED + "grouped_causal.py",
        "decay = torch.exp(from_state - reference).unsqueeze(-1)",
        "decay = torch.ones_like(reference).unsqueeze(-1)",
        "tests/laws/test_fold.py",
    ),
    Fault(
        "count a repeated query twice in a key's mass",
        BLOCKED + "mass.py",
        "(den == 0) | part.free",
        "den == 0",
        "tests/laws/test_exact_part.py",
    ),
    Fault(
        "see one's own span of tokens",
        BLOCKED + "causal.py",
        "return number.unsqueeze(-1) > number",
        "return number.unsqueeze(-1) >= number",
        "tests/laws/test_exact_part.py",
    ),
    Fault(
        "leave heavy keys to the map too",
        "attention/_exact/bidirectional.py",
        "rest = seen.scatter(-1, chosen, False)",
        "rest = seen",
        "tests/laws/test_exact_part.py",
    ),
    Fault(
        "see one key ahead in the window",
        "attention/_exact/neighbourhood.py",
        ".tril(self.window)",
        ".tril(self.window + 1)",
        "tests/laws/test_exact_part.py",
    ),
    Fault(
        "keep the lightest keys",
        "attention/_exact/heavy.py",
        "descending=True",
        "descending=False",
        "tests/laws/test_exact_part.py",
    ),
    Fault(
        "favour keys that many queries saw",
        "attention/_exact/causal.py",
        "(2 * window - places)",
        "(2 * window)",
        "tests/laws/test_exact_part.py",
    ),
    Fault(
        "take figures again that were kept",
        "lab/experiments/reproduction.py",
        "if (measurement.series, measurement.x) not in taken:",
        "if measurement:",
        "tests/lab/experiments/test_reproduction.py",
    ),
    Fault(
        "let a crash end the run",
        "lab/experiments/reproduction.py",
        "        except Exception:",
        "        except KeyError:",
        "tests/lab/experiments/test_reproduction.py",
    ),
    Fault(
        "lose what another setting measured",
        "lab/commands/reproduce.py",
        "shutil.copy2(file, aside)",
        "aside.touch()",
        "tests/lab/commands/test_reproduce.py",
    ),
    Fault(
        "call what could not be decided a success",
        "lab/commands/reproduce.py",
        "if undecided or run.crashes:",
        "if run.crashes:",
        "tests/lab/commands/test_reproduce.py",
    ),
    Fault(
        "leave a last line that was cut off",
        "lab/jsonl.py",
        '(line for line in lines if line.endswith("\\n"))',
        "lines",
        "tests/lab/commands/test_reproduce.py",
    ),
    Fault(
        "draw bars of one standard error",
        "lab/report/claims/figures.py",
        "_BAR = 2",
        "_BAR = 1",
        "tests/lab/report/test_claims.py",
    ),
    Fault(
        "leave charts in folds undrawn",
        "lab/report/templates/page.js",
        "if (details.open) draw(id);",
        "",
        "tests/lab/report/browser",
    ),
    Fault(
        "sort numbers as text",
        "lab/report/templates/page.js",
        ": x - y;",
        ": a.localeCompare(b);",
        "tests/lab/report/browser",
    ),
    Fault(
        "keep the charts' colours when the theme changes",
        "lab/report/templates/page.js",
        """  redraw();
}""",
        "}",
        "tests/lab/report/browser",
    ),
    Fault(
        "give every layer the first columns of the mask",
        "hf/_mask.py",
        "mask.allowed[..., -num_keys:]",
        "mask.allowed[..., :num_keys]",
        "tests/hf/test_state_cache.py",
    ),
    Fault(
        "let a module attend without the state that took its keys",
        "hf/state_cache.py",
        "self._is_expected = False\n        if self._is_pending:",
        "self._is_expected = False\n        if False:",
        "tests/hf/test_state_cache.py",
    ),
)


def main() -> int:
    """The number of faults no law caught."""
    survivors = 0
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "src"
            shutil.copytree(ROOT / "src", source)
            target = source / "linattn" / fault.file
            text = target.read_text()
            if text.count(fault.old) < 1:
                sys.exit(f"{fault.name}: {fault.file} no longer contains {fault.old!r}; bring the fault up to date")
            target.write_text(text.replace(fault.old, fault.new))
            command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *fault.tests.split()]
            environment = os.environ | {"PYTHONPATH": str(source)}
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            red = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
            sys.stdout.write(f"{'caught' if red else 'SURVIVED':9s} {fault.name}: {red[0] if red else ''}\n")
            sys.stdout.flush()
            survivors += not red
    return survivors


if __name__ == "__main__":
    sys.exit(main())
