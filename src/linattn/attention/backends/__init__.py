"""The table of backends, and the choice among them. A new one is an object with `Backend`'s methods and a line here."""

from linattn.attention.backends.backend import Backend as Backend
from linattn.attention.backends.backend import Call as Call
from linattn.attention.backends.backend import Rows as Rows
from linattn.attention.backends.blocked import Blocked
from linattn.attention.backends.compiled import Compiled
from linattn.attention.backends.reference import Reference
from linattn.attention.backends.triton import Triton
from linattn.attention.sums import Sums

# "auto" takes the first that has no objection, and for one token compiled code, if it can run the call. Triton's
# kernels run by name alone, until a GPU has run their laws.
_IN_C = Compiled()
BACKENDS: dict[str, Backend] = {"blocked": Blocked(), "reference": Reference(), "triton": Triton(), "compiled": _IN_C}


def check_backend(name: str) -> None:
    """Refuse names that stand for no backend."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, ('auto', *BACKENDS)))}, got {name!r}")


def choose(name: str, call: Call, before: Sums | None = None, window: int | None = None) -> Backend:
    """The backend of this name, refused with every reason if it cannot run the call; the first that can for "auto"."""
    if name == "auto":
        is_token = call.key.shape[2] == call.query.shape[3] == 1 and BACKENDS.get("compiled") is _IN_C
        if is_token and _IN_C.is_faster(call) and not _IN_C.objections(call, before, window):
            return _IN_C
        return next(backend for backend in BACKENDS.values() if not backend.objections(call))
    backend = BACKENDS[name]
    if reasons := _IN_C.objections(call, before, window) if backend is _IN_C else backend.objections(call):
        raise ValueError(f'backend={name!r} cannot run this call: {"; ".join(reasons)}; choose another, or "auto"')
    return backend
