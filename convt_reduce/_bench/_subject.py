"""What is called and what it should give: a case's tensors, its calls, and the check of a result.

The three kinds of case differ in nothing else: forward calls the peer's function, training calls it
and takes the gradients of all three tensors, spread calls it on tap gradients.
"""

import contextlib
import dataclasses
import functools
import math

import torch
from torch import Tensor

from convt_reduce._bench import _oracle
from convt_reduce._bench._case import Case, inputs
from convt_reduce._bench._oracle import Check, Expected
from convt_reduce._bench._peers import Function, Peer, matmul_operands
from convt_reduce._bench._timing import Call, Cpu, Cuda

MODES = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
}


class Subject:
    """A case on a device: its rotated inputs, and what every kind of peer should return."""

    def __init__(self, case: Case, clock: Cuda | Cpu, device: torch.device) -> None:
        self.case, self.device = case, device
        graph = "graph" in case.protocols or "cpu" in case.protocols
        self.copies = clock.copies(case.bytes) if graph else 1
        self.cold = clock.is_cold(case.bytes, self.copies)
        self.inputs = inputs(case, device, self.copies)
        self.wants_grad = case.kind == "training" or case.mode == "grad"
        self.grad = torch.empty(0)
        if case.kind == "training":
            generator = torch.Generator(device).manual_seed(46)
            self.grad = torch.randn(
                case.shape[0],
                case.c_out,
                dtype=case.torch_dtype,
                device=device,
                generator=generator,
            )
        if self.wants_grad:
            leaves = {t for one in self.inputs for t in one}  # weight and bias are in all of them
            for leaf in leaves:
                leaf.requires_grad_()

    def mode(self) -> contextlib.AbstractContextManager:
        """The grad mode that every call of this case is made in."""
        return MODES["grad" if self.wants_grad else self.case.mode]()

    @property
    def keep(self) -> bool:
        """Whether a result is so large that a graph's calls must not share its memory."""
        return self.case.kind != "forward"

    def call(self, peer: Peer, function: Function, copy: int) -> Call:
        """What is timed, without arguments, on one copy of the inputs."""
        tensors = self.inputs[copy]
        if self.case.kind != "training" or peer.computes != "mean":
            return functools.partial(function, *tensors)
        grad = self.grad

        def forward_and_backward() -> tuple[Tensor, ...]:
            y = function(*tensors)
            return torch.autograd.grad(y, tensors, grad.view_as(y))

        return forward_and_backward

    def calls(self, peer: Peer, function: Function) -> list[Call]:
        """One call per copy."""
        return [self.call(peer, function, copy) for copy in range(self.copies)]

    def check(self, peer: Peer, result: Tensor | tuple[Tensor, ...]) -> Check:
        """Whether what the call on the first copy returned is what this peer should give."""
        with torch.no_grad():
            return self._check(peer, result)

    def _check(self, peer: Peer, result: Tensor | tuple[Tensor, ...]) -> Check:
        if peer.computes == "mean" and self.case.kind == "training":
            checks = [
                _oracle.check(part, expected, peer.rounding, self.case.torch_dtype)
                for part, expected in zip(result, self._gradients, strict=True)
            ]
            return max(checks, key=lambda check: (not check.right, check.max_share))
        expected = self._expected(peer.computes)
        return _oracle.check(result, expected, peer.rounding, self.case.torch_dtype)

    def _expected(self, computes: str) -> Expected:
        case, first = self.case, self.inputs[0]
        if computes == "mean":
            return self._mean
        if computes == "sum":
            return _oracle.sums(case, first)
        if computes == "copy":
            return _exactly(first.x.detach().double())
        if computes == "fill":
            return _exactly(torch.ones(case.shape, dtype=torch.float64, device=self.device))
        if computes == "spread":
            return _oracle.spread(case, first.x)
        if computes == "matmul":
            left, right = (t.double() for t in matmul_operands(case, self.device))
            return Expected(left @ right, left.abs() @ right.abs(), left.shape[1])
        raise ValueError(f"computes must be one that Peer documents, got {computes!r}")

    @functools.cached_property
    def _mean(self) -> Expected:
        return _oracle.mean(self.case, self.inputs[0])

    @functools.cached_property
    def _gradients(self) -> list[Expected]:
        with torch.enable_grad():
            return _oracle.gradients(self.case, self.inputs[0], self.grad)

    def definition_gap(self) -> float | None:
        """How far the oracle is from the convolution in float64, or None where that is too large;
        a spread has no convolution."""
        if self.case.kind == "spread":
            return None
        with torch.no_grad():
            return _oracle.definition(self.case, self.inputs[0])


def _exactly(value: Tensor) -> Expected:
    """A result that must come bit for bit: `check` allows a rounding, and a copy needs none."""
    return Expected(value, torch.zeros_like(value), 0)


def check_record(check: Check) -> dict:
    """The check as JSON holds it: NaN and infinity, which JSON lacks, become None."""
    return {
        name: value if not isinstance(value, float) or math.isfinite(value) else None
        for name, value in dataclasses.asdict(check).items()
    }
