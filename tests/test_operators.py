"""The operators as torch.library and torch.compile see them: schemas, opcheck, fake against real.

opcheck runs its whole set (schema, autograd registration, fake kernel, dispatch through AOTAutograd
with dynamic shapes) on all operators. What is compiled here is compiled with fullgraph=True.
"""

import pytest
import torch
from cases import DTYPES, VARIED, dtype_id, some
from layouts import LAYOUTS
from torch._subclasses.fake_tensor import FakeTensorMode

import convt_reduce
from convt_reduce import _layouts, _loader

ops = torch.ops.convt_reduce
SCHEMAS = {
    "fused_mean": "(Tensor input, Tensor weight, Tensor? bias=None, SymInt[] stride=[1], "
    "SymInt[] padding=[0], SymInt[] output_padding=[0], SymInt groups=1, SymInt[] dilation=[1], "
    "float multiplier=1.0) -> Tensor",
    "_fused_mean_with_sums": "(Tensor input, Tensor weight, Tensor? bias=None, "
    "SymInt[] stride=[1], "
    "SymInt[] padding=[0], SymInt[] output_padding=[0], SymInt groups=1, SymInt[] dilation=[1], "
    "float multiplier=1.0) -> (Tensor, Tensor)",
    "_tap_sums": "(Tensor input, SymInt[] kernel_size, SymInt[] stride=[1], SymInt[] padding=[0], "
    "SymInt[] output_padding=[0], SymInt[] dilation=[1]) -> Tensor",
    "_tap_spread": "(Tensor tap_grads, SymInt[] size, ScalarType dtype, SymInt[] stride=[1], "
    "SymInt[] padding=[0], SymInt[] output_padding=[0], SymInt[] dilation=[1]) -> Tensor",
    "_combine_backward": "(Tensor grad, Tensor? weight, Tensor? tap_sums, SymInt[] kernel_size, "
    "SymInt groups, float scale, float multiplier, bool bias, bool channels_last) "
    "-> (Tensor, Tensor, Tensor)",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema(name):
    """SymInt and not int: sizes that torch.compile keeps symbolic must pass."""
    expected = torch._C.parse_schema(f"convt_reduce::{name}{SCHEMAS[name]}")
    assert str(getattr(ops, name).default._schema) == str(expected)


def test_every_operator_is_known_to_the_loader_and_to_the_refusals():
    assert set(SCHEMAS) == set(_loader.OPERATORS) == set(_layouts.TENSORS)


CHECKED = some("1d-small", "2d-all-unequal", "2d-no-bias", "2d-unbatched", "3d-small")
each_checked_case = pytest.mark.parametrize("case", CHECKED, ids=lambda case: case.id)


def grad_tensors(case, dtype, device, layout=None):
    tensors = case.tensors(dtype, device)
    if layout is not None:
        tensors = (
            tuple(None if t is None else layout(t).detach() for t in tensors[:2]) + tensors[2:]
        )
    return [None if t is None else t.requires_grad_() for t in tensors]


@pytest.mark.parametrize("name", ["fused_mean", "_fused_mean_with_sums"])
@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "inference"])
@each_checked_case
def test_opcheck_of_the_mean(case, gradients, name, device):
    tensors = case.tensors(torch.float32, device)
    tensors = grad_tensors(case, torch.float32, device) if gradients else tensors
    torch.library.opcheck(getattr(ops, name).default, (*tensors, *case.op_settings))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=dtype_id)
def test_opcheck_in_other_dtypes(dtype, device):
    case = some("2d-groups-2")[0]
    torch.library.opcheck(
        ops.fused_mean.default, (*grad_tensors(case, dtype, device), *case.op_settings)
    )


@pytest.mark.parametrize("layout", LAYOUTS[1:7], ids=lambda layout: layout.__name__)
def test_opcheck_in_other_layouts(layout, device):
    case = some("2d-groups-2")[0]
    tensors = grad_tensors(case, torch.float32, device, layout)
    torch.library.opcheck(ops.fused_mean.default, (*tensors, *case.op_settings))


@each_checked_case
def test_opcheck_of_the_tap_operators(case, device):
    x = case.tensors(torch.float32, device)[0]
    sums_arguments = (case.kernel, *case.op_tap_settings)
    g = torch.randn_like(ops._tap_sums(x, *sums_arguments))
    for gradients in (True, False):
        x, g = x.detach().requires_grad_(gradients), g.detach().requires_grad_(gradients)
        torch.library.opcheck(ops._tap_sums.default, (x, *sums_arguments))
        arguments = (g, case.size, torch.float32, *case.op_tap_settings)
        torch.library.opcheck(ops._tap_spread.default, arguments)
    half = torch.float16
    torch.library.opcheck(ops._tap_sums.default, (x.detach().to(half), *sums_arguments))
    arguments = (g.detach(), case.size, half, *case.op_tap_settings)
    torch.library.opcheck(ops._tap_spread.default, arguments)


# ---- fake against real --------------------------------------------------------------------------


def same_metadata(fake, real):
    assert fake.shape == real.shape
    assert fake.stride() == real.stride()
    assert fake.dtype == real.dtype
    assert fake.device == real.device
    assert fake.layout == real.layout
    assert fake.storage_offset() == real.storage_offset()
    assert real.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("case", [*VARIED, *some("2d-batch-67")], ids=lambda case: case.id)
def test_fake_results_look_like_real_ones(case, layout, dtype, device):
    x, w, b = case.tensors(dtype, device)
    tensors = (layout(x), layout(w), b)
    mode = FakeTensorMode()
    fakes = [None if t is None else mode.from_tensor(t) for t in tensors]

    def all_results(x, w, b):
        yield ops.fused_mean(x, w, b, *case.op_settings)
        yield from ops._fused_mean_with_sums(x, w, b, *case.op_settings)
        sums = ops._tap_sums(x, case.kernel, *case.op_tap_settings)
        yield sums
        yield ops._tap_spread(sums, case.size, dtype, *case.op_tap_settings)

    real = list(all_results(*tensors))
    with mode:
        fake = list(all_results(*fakes))
    for f, r in zip(fake, real, strict=True):
        same_metadata(f, r)


def test_empty_batch_looks_the_same(device):
    x, w = torch.zeros(0, 4, 5, 6, device=device), torch.zeros(4, 3, 3, 3, device=device)
    mode = FakeTensorMode()
    with mode:
        fake = ops._fused_mean_with_sums(mode.from_tensor(x), mode.from_tensor(w))
    for f, r in zip(fake, ops._fused_mean_with_sums(x, w), strict=True):
        same_metadata(f, r)


def test_fake_cuda_tensors_need_no_gpu():
    with FakeTensorMode():
        x, w = torch.zeros(2, 4, 5, 6, device="cuda"), torch.zeros(4, 3, 3, 3, device="cuda")
        y = convt_reduce.fused_mean(x, w)
    assert y.device.type == "cuda"
    assert y.shape == (2, 3, 1, 1)


def test_meta_tensors_carry_gradients():
    x = torch.zeros(2, 4, 5, 6, device="meta", requires_grad=True)
    w = torch.zeros(4, 3, 3, 3, device="meta", requires_grad=True)
    convt_reduce.fused_mean(x, w).sum().backward()
    assert x.grad.shape == x.shape
    assert w.grad.shape == w.shape
