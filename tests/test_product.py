"""A few rows times a weight in C: against the product in float64, through every shape and layout, and where it is not used."""

import pytest
import torch
from tiny import tiny_llama, tokens

from kvlib import linear as linears
from kvlib.kernels import product as products
from kvlib.kernels.product import MOST_ROWS, product
from kvlib.linear import fast_linears, linear, plain_linears

pytestmark = pytest.mark.usefixtures("compiled_code")


def operands(rows, out, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(size, generator=generator) for size in ((rows, width), (out, width), (out,)))


def check(found, x, weight, bias=None):
    """A sum of I products in order is at most I / 2 units in the last place off, of what is summed up; here LANES at a time."""
    sure = x.double() @ weight.double().T
    size = x.abs().double() @ weight.abs().double().T
    if bias is not None:
        sure, size = sure + bias.double(), size + bias.abs().double()
    assert found.shape == sure.shape
    assert bool(((found - sure).abs() <= 64 * 2**-24 * size).all())


@pytest.mark.parametrize("rows", [1, 2, 3, MOST_ROWS])
@pytest.mark.parametrize("out", [1, 3, 4, 5, 8, 191])
@pytest.mark.parametrize("width", [1, 7, 16, 17, 64, 577])
def test_every_shape_is_the_product(rows, out, width):
    x, weight, bias = operands(rows, out, width)
    check(product(x, weight, None), x, weight)
    check(product(x, weight, bias), x, weight, bias)


def test_leading_axes_stay_and_a_view_is_read_as_its_copy():
    x, weight, bias = operands(6, 40, 33)
    assert torch.equal(product(x.view(2, 3, 33), weight, bias), product(x, weight, bias).view(2, 3, 40))
    spread = torch.stack([x, x], -1)[..., 0]
    assert not spread.is_contiguous() and torch.equal(product(spread, weight, None), product(x, weight, None))


def test_a_row_does_not_hang_on_the_rows_beside_it():
    x, weight, _ = operands(MOST_ROWS, 70, 100)
    whole = product(x, weight, None)
    for n in range(MOST_ROWS):
        assert torch.equal(product(x[n : n + 1], weight, None)[0], whole[n])


@pytest.mark.all_cores
def test_threads_do_not_change_a_bit():
    (x, weight, bias), before, found = operands(2, 501, 96), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 200):
            torch.set_num_threads(threads)
            found.append(product(x, weight, bias))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], one) for one in found[1:])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(value):
    x, weight, _ = operands(1, 9, 50)
    weight[8, 49] = value
    found = product(x, weight, None)
    assert not found[0, 8].isfinite() and found[0, :8].isfinite().all()


def test_where_it_does_not_apply_torchs_product_is_taken():
    x, weight, bias = operands(2, 12, 20)
    assert product(x.repeat(MOST_ROWS, 1), weight, None) is None
    assert product(x, torch.randn(20, 12).T, None) is None
    assert product(x, weight, bias.double()) is None
    for given in (
        (x.repeat(MOST_ROWS, 1), weight),
        (x, torch.randn(20, 12).T),
        (x.double(), weight.double()),
    ):
        assert torch.allclose(linear(*given), given[0] @ given[1].T, atol=1e-5)
    with pytest.raises(RuntimeError):
        linear(x[:, :5], weight)


def test_a_gradient_that_is_asked_for_is_there():
    x, weight, bias = operands(1, 12, 20)
    assert linear(x, weight.requires_grad_(), bias).requires_grad
    with torch.no_grad():
        check(linear(x, weight, bias), x, weight.detach(), bias)


def test_a_model_reads_one_token_through_it_and_several_by_torch(monkeypatch):
    model, seen, own = tiny_llama(), [], products.product

    def watched(x, *rest):
        found = own(x, *rest)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(linears, "product", watched)
    ids = tokens(1, 12)
    with torch.no_grad(), fast_linears(model):
        one, all_of_them = model(ids[:, :1]).logits, model(ids).logits
    layers = len(plain_linears(model))
    assert seen == [True] * layers + [False] * layers
    with torch.no_grad():
        assert torch.allclose(one, model(ids[:, :1]).logits, atol=1e-5)
        assert torch.allclose(all_of_them, model(ids).logits, atol=1e-5)


def test_without_a_compiler_torch_says_the_same(monkeypatch):
    x, weight, bias = operands(1, 12, 20)
    by_c = linear(x, weight, bias)
    monkeypatch.setenv("CC", "no-such-compiler")
    products._compiled.cache_clear()
    try:
        assert product(x, weight, bias) is None
        assert torch.allclose(linear(x, weight, bias), by_c, atol=1e-5)
    finally:
        products._compiled.cache_clear()


def test_a_layer_that_is_there_twice_counts_once_and_a_module_that_holds_its_parent_ends():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3))
    model.append(model[0])
    model.append(torch.nn.Sequential())
    model[2]._modules["up"] = model
    assert plain_linears(model) == [model[0]]
