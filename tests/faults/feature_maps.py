"""Faults of feature maps."""

from __future__ import annotations

from faults.fault import Fault

FAULTS = (
    Fault(
        "drop the sign fix of QR",
        "feature_maps/_random_base.py",
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
        "tell maps apart by their settings alone",
        "feature_maps/_base.py",
        "if digest else said",
        "if False else said",
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
        "pull a norm back twice",
        "feature_maps/_softmax_estimator.py",
        "value=-self.scale",
        "value=-2 * self.scale",
        "tests/laws/test_gradient.py",
    ),
    Fault(
        "move keys by M instead of its inverse transpose",
        "feature_maps/wrappers.py",
        "in_both_dtypes(matrix.mT.contiguous(), inverse)",
        "in_both_dtypes(matrix.mT.contiguous(), matrix.mT.contiguous())",
        "tests/feature_maps/test_balanced.py",
    ),
    Fault(
        "balance without the ridge",
        "feature_maps/wrappers.py",
        "torch.maximum(x, ridge * x.amax(-1, keepdim=True))",
        "x.clamp(min=1e-14)",
        "tests/feature_maps/test_balanced.py",
    ),
    Fault(
        "stretch a direction as another's tilt asks",
        "feature_maps/sderf.py",
        "lambda f: (1 - 4 * _best_tilt(f)).sqrt())",
        "lambda f: (1 - 4 * _best_tilt(f).mean(-1, keepdim=True)).sqrt().expand_as(f))",
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
        "expand around 0 instead of the mean key",
        "feature_maps/expansion.py",
        "u = (delta * mean).sum(-1, keepdim=True)",
        "u = (delta * mean * 0).sum(-1, keepdim=True)",
        "tests/laws/test_truth.py",
    ),
    Fault(
        "spread a sample of tokens over padding",
        "feature_maps/expansion.py",
        "(-(-number // _MOST_POINTS))",
        "(-(-live.shape[-1] // _MOST_POINTS))",
        "tests/laws/test_padding.py",
    ),
    Fault(
        "take any step for granted",
        "feature_maps/expansion.py",
        "share = _REACH / deviation.clamp(min=_REACH)",
        "share = torch.ones_like(deviation)",
        "tests/feature_maps/test_expansion.py",
    ),
    Fault(
        "load fitted tensors of any kind",
        "feature_maps/_fitted.py",
        "self._check_saved(saved, prefix)",
        "pass",
        "tests/feature_maps/test_loading.py",
    ),
    Fault(
        "load half of what was fitted",
        "feature_maps/_fitted.py",
        "if name not in saved]",
        "if False]",
        "tests/feature_maps/test_loading.py",
    ),
    Fault(
        "load fitted tensors that were cast",
        "feature_maps/_fitted.py",
        "x.dtype not in (torch.float32, torch.float64)",
        "False",
        "tests/feature_maps/test_loading.py",
    ),
)
