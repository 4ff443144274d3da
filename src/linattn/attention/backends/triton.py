"""Kernels for CUDA GPUs, from the package linattn-triton, which is loaded when a call names them."""

from linattn.attention.backends.backend import Backend, Call, Rows
from linattn.attention.sums import Sums
from linattn.softmax.extensions import missing
from linattn.softmax.tracing import constant_in_graphs


class Triton:
    """The backend of linattn-triton; experimental, by name alone."""

    def objections(self, call: Call) -> list[str]:
        """Every reason, each with what to do about it."""
        return [reason] if (reason := _missing()) else _kernels().objections(call)

    def attend(self, call: Call, before: Sums, *, span: int = 0) -> tuple[Rows, Sums]:
        """The call's rows, and the sums after it."""
        return _kernels().attend(call, before, span=span)

    def absorb(self, call: Call, before: Sums) -> Sums:
        """The sums after the call's keys."""
        return _kernels().absorb(call, before)

    def read(self, call: Call, sums: Sums) -> Rows:
        """The call's queries over the sums' keys alone."""
        return _kernels().read(call, sums)


@constant_in_graphs
def _missing() -> str:
    """Why the package cannot be called, or ""."""
    return missing("linattn_triton")


def _kernels() -> Backend:
    """The package's backend."""
    # Imported here: a package of its own, which most do not have.
    from linattn_triton import Kernels

    return Kernels()
