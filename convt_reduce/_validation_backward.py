"""The checks of ``_combine_backward`` for fake tensors, as csrc/validate.cpp makes them."""

from torch import Tensor

from convt_reduce._validation import (
    Expect,
    Ints,
    accumulate_dtype,
    check_plain,
    list_text,
    name_of,
)

_OP = "_combine_backward"


def check_combine_backward(
    grad: Tensor, weight: Tensor | None, tap_sums: Tensor | None, kernel_size: Ints, groups: int
) -> tuple[list[int], list[int]]:
    """Checks a call; returns the shapes of tap_grads and grad_weight, [0] where not wanted."""
    expect = Expect(_OP)
    given = {"grad": grad, "weight": weight, "tap_sums": tap_sums}
    given = {name: tensor for name, tensor in given.items() if name == "grad" or tensor is not None}
    for name, tensor in given.items():
        check_plain(_OP, name, tensor)
    expect.floating("grad", grad)
    spatial = expect.entries_up_to_three("kernel_size", kernel_size)
    shape = grad.shape
    batched = len(shape) == spatial + 2
    sentence = (
        "grad must have shape [N, C_out, 1..] or [C_out, 1..] with "
        f"{spatial} {'1' if spatial == 1 else '1s'}, got shape {list_text(shape)}"
    )
    expect(batched or len(shape) == spatial + 1, lambda: sentence)
    lead = 2 if batched else 1
    expect(shape[lead - 1] >= 1, lambda: sentence)
    for extent in shape[lead:]:
        expect(extent == 1, lambda: sentence)
    expect.at_least("kernel_size", kernel_size, 1)
    batch, channels = list(shape[: lead - 1]), shape[lead - 1]
    expect(groups >= 1, lambda: f"groups must be at least 1, got {groups}")
    expect(
        channels % groups == 0,
        lambda: f"groups must divide grad's {channels} channels, got {groups}",
    )
    c_in = 0
    if weight is not None or tap_sums is not None:
        of, at = (weight, 0) if weight is not None else (tap_sums, lead - 1)
        c_in = of.shape[at] if of.dim() > at else 0

    def expect_shape(name: str, tensor: Tensor, wanted: list[int]) -> None:
        wanted = [*wanted, *kernel_size]
        same = c_in >= 1 and c_in % groups == 0 and list(tensor.shape) == wanted
        expect(
            same,
            lambda: (
                f"{name} must have shape {list_text(wanted)}, its input channels at least 1 and "
                f"divided by groups, got shape {list_text(tensor.shape)}"
            ),
        )

    if weight is not None:
        expect_shape("weight", weight, [c_in, channels // groups])
        expect.like("weight", weight, grad, "grad")
    if tap_sums is not None:
        expect_shape("tap_sums", tap_sums, [*batch, c_in])
        accumulate = accumulate_dtype(grad.dtype)
        expect(
            tap_sums.dtype == accumulate,
            lambda: (
                f"tap_sums must be {name_of(accumulate)} for a grad of "
                f"{name_of(grad.dtype)}, got {name_of(tap_sums.dtype)}"
            ),
        )
        expect.same_device("tap_sums", tap_sums, grad, "grad")
        expect(
            tap_sums.is_contiguous(),
            lambda: f"tap_sums must be contiguous, got strides {list_text(tap_sums.stride())}",
        )
    tap_grads = [0] if weight is None else [*batch, c_in, *kernel_size]
    grad_weight = [0] if tap_sums is None else [c_in, channels // groups, *kernel_size]
    return tap_grads, grad_weight
