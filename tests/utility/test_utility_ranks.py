"""Rank correlation, against scipy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from scipy import stats

from upgd import utility

#: Few different values, so that there are many ties.
tied_values = st.integers(-3, 3).map(float)


def arrays(count):
    return npst.arrays(np.float64, count, elements=tied_values)


@given(st.integers(1, 30).flatmap(arrays))
def test_average_ranks_are_those_of_scipy(values):
    ranks = utility.average_ranks(torch.from_numpy(values))
    np.testing.assert_array_equal(ranks.numpy(), stats.rankdata(values))


@given(st.integers(2, 30).flatmap(lambda n: st.tuples(arrays(n), arrays(n))))
def test_spearman_is_that_of_scipy(pair):
    a, b = pair
    ours = utility.spearman(torch.from_numpy(a), torch.from_numpy(b)).item()
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        assert np.isnan(ours)
    else:
        assert ours == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)


def test_spearman_of_a_batch_is_that_of_its_rows():
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(0, 9, (4, 3, 20), generator=generator).float() for _ in range(2))
    rows = [[utility.spearman(a[i, j], b[i, j]) for j in range(3)] for i in range(4)]
    torch.testing.assert_close(utility.spearman(a, b), torch.tensor(rows, dtype=torch.float64))


def test_ranks_of_nothing():
    assert utility.average_ranks(torch.empty(3, 0)).shape == (3, 0)


def test_nan_has_no_rank():
    a, b = torch.tensor([[1.0, torch.nan, 3.0], [1.0, 2.0, 3.0]]), torch.arange(6.0).view(2, 3)
    for ours in (utility.spearman(a, b), utility.spearman(b, a)):
        assert ours.isnan().tolist() == [True, False]
    assert not utility.spearman(torch.tensor([1, 2, 3]), torch.tensor([1, 3, 2])).isnan()
    layers = {"0.weight": a[0], "2.weight": a[1]}, {"0.weight": b[0], "2.weight": b[1]}
    for scope in ("global", "local"):
        assert utility.correlation(*layers, scope=scope).isnan()


def test_different_shapes_are_refused():
    with pytest.raises(ValueError, match=r"same shape, not \(2,\) and \(3,\)"):
        utility.spearman(torch.zeros(2), torch.zeros(3))


def test_global_and_local_correlation_of_weights():
    true = {
        "0.weight": torch.tensor([[1.0, 2.0]]),
        "0.bias": torch.tensor([3.0]),
        "2.weight": torch.tensor([[7.0, 5.0]]),
    }
    # Within layer 0 the order is correct, within layer 2 it is reversed.
    other = {
        "0.weight": torch.tensor([[10.0, 20.0]]),
        "0.bias": torch.tensor([30.0]),
        "2.weight": torch.tensor([[0.0, 1.0]]),
    }
    assert utility.correlation(other, true, scope="local").item() == pytest.approx((1 - 1) / 2)
    expected = stats.spearmanr([10, 20, 30, 0, 1], [1, 2, 3, 7, 5]).statistic
    assert utility.correlation(other, true, scope="global").item() == pytest.approx(expected)


def test_layers_of_features_are_the_entries():
    true = {"net.1": torch.tensor([1.0, 2.0, 3.0]), "net.3": torch.tensor([1.0, 2.0, 3.0])}
    other = {"net.1": torch.tensor([1.0, 3.0, 2.0]), "net.3": torch.tensor([11.0, 12.0, 13.0])}
    assert utility.correlation(other, true, scope="local", of="features").item() == pytest.approx((0.5 + 1) / 2)


def test_correlation_skips_a_layer_without_an_order():
    true = {"a.weight": torch.tensor([1.0, 2.0]), "b.weight": torch.tensor([1.0, 1.0])}
    assert utility.correlation(true, true, scope="local").item() == 1


def test_correlation_of_different_items_is_refused():
    with pytest.raises(ValueError, match="same names"):
        utility.correlation({"a": torch.zeros(2)}, {"b": torch.zeros(2)})


@pytest.mark.parametrize("wrong", [{"scope": "layer"}, {"of": "units"}])
def test_a_wrong_choice_gets_one_sentence(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name} must be '.*' or '.*', not '{value}'"):
        utility.correlation({"w": torch.ones(2)}, {"w": torch.ones(2)}, **wrong)
