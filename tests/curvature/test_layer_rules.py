"""Every layer and every loss, in small networks, against the naive implementation and exact Hessians."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_hesscale import hessian_diagonal, naive_diagonals
from torch import nn
from torch.func import functional_call

from upgd.activations import CReLU
from upgd.curvature import Gate, HesScale, Residual

ACTIVATIONS = {
    "relu": nn.ReLU(),
    "leaky_relu": nn.LeakyReLU(0.1),
    "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(),
    "elu": nn.ELU(0.7),
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "gelu-tanh": nn.GELU(approximate="tanh"),
    "softplus": nn.Softplus(beta=2.0, threshold=1.0),
    "identity": nn.Identity(),
    "log_softmax": nn.LogSoftmax(dim=1),
}

DENSE = {
    **{name: [nn.Linear(3, 4), activation, nn.Linear(4, 3)] for name, activation in ACTIVATIONS.items()},
    "no bias": [nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False)],
    "crelu": [nn.Linear(3, 4), CReLU(), nn.Linear(8, 3)],
    "deep": [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)],
    "layer norm": [nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)],
    "layer norm, no weights": [nn.Linear(3, 5), nn.LayerNorm(5, elementwise_affine=False), nn.Linear(5, 3)],
    "group norm": [nn.Linear(3, 6), nn.GroupNorm(2, 6), nn.Tanh(), nn.Linear(6, 3)],
    "batch norm": [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)],
    "batch norm, no weights": [nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3)],
    "gate": [nn.Linear(3, 4), nn.Tanh(), Gate(4), nn.Linear(4, 3)],
    "residual": [nn.Linear(3, 4), Residual(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), nn.Linear(4, 3)],
    "residual with shortcut": [
        nn.Linear(3, 4),
        Residual(nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 5)), shortcut=nn.Linear(4, 5)),
        nn.Tanh(),
        nn.Linear(5, 3),
    ],
    "residual at the input": [Residual(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 3)],
    "dropout, eval": [nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 3)],
}


def images(*layers: nn.Module) -> list[nn.Module]:
    """Layers on images, between a convolution that needs no input curvature and a dense output."""
    return with_output([nn.Conv2d(2, 4, 2), nn.Tanh(), *layers, nn.Flatten()], torch.ones(2, 2, 6, 5))


def rows(*layers: nn.Module) -> list[nn.Module]:
    return with_output([nn.Conv1d(2, 4, 2), nn.Tanh(), *layers, nn.Flatten()], torch.ones(2, 2, 8))


def with_output(layers: list[nn.Module], x: torch.Tensor) -> list[nn.Module]:
    return [*layers, nn.Linear(nn.Sequential(*layers)(x).shape[1], 3)]


# Images come as 2×6×5, so that the layers under test see 4×5×4.
CONVOLUTIONS = {
    "plain": images(nn.Conv2d(4, 3, 3)),
    "stride": images(nn.Conv2d(4, 3, 2, stride=(2, 1))),
    "padding": images(nn.Conv2d(4, 2, 3, padding=(1, 2))),
    "dilation": images(nn.Conv2d(4, 3, 2, dilation=(3, 2))),
    "groups": images(nn.Conv2d(4, 6, 3, groups=2)),
    "all of them": images(nn.Conv2d(4, 4, 2, 2, 1, 2, groups=4, bias=False)),
    "same": images(nn.Conv2d(4, 2, 3, padding="same")),
    "same, even kernel": images(nn.Conv2d(4, 2, (2, 4), padding="same")),
    "valid": images(nn.Conv2d(4, 2, 3, padding="valid")),
    "batch norm": images(nn.BatchNorm2d(4), nn.ReLU()),
    "layer norm": images(nn.LayerNorm((5, 4))),
    "group norm": images(nn.GroupNorm(2, 4), nn.Tanh()),
    "group norm, no weights": images(nn.GroupNorm(4, 4, affine=False)),
    "group norm of one group": images(nn.GroupNorm(1, 4, eps=0.1)),
    "gate": images(Gate(4)),
    "max pool": images(nn.MaxPool2d(2)),
    "max pool, overlapping": images(nn.MaxPool2d(3, stride=1, padding=1)),
    "max pool, dilated": images(nn.MaxPool2d(2, stride=1, dilation=2)),
    "max pool, ceil": images(nn.MaxPool2d(2, ceil_mode=True)),
    "average pool": images(nn.AvgPool2d(2)),
    "average pool, overlapping": images(nn.AvgPool2d((3, 2), stride=(1, 2), padding=1)),
    "average pool, without padding": images(nn.AvgPool2d(3, 2, padding=1, count_include_pad=False)),
    "average pool, ceil": images(nn.AvgPool2d(2, ceil_mode=True)),
    "average pool, divisor": images(nn.AvgPool2d(2, divisor_override=3)),
    "adaptive average pool": images(nn.AdaptiveAvgPool2d((3, 1))),
    "global average pool": images(nn.AdaptiveAvgPool2d(1)),
    "residual": images(Residual(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ELU()))),
    "unflatten": [
        nn.Conv2d(2, 4, 2),
        nn.Flatten(),
        nn.Tanh(),
        nn.Unflatten(1, (2, 40)),
        nn.Flatten(),
        nn.Linear(80, 3),
    ],
}

# Rows come as 2×8, so that the layers under test see 4×7.
ROWS = {
    "plain": rows(nn.Conv1d(4, 3, 3)),
    "stride, padding, dilation, groups": rows(nn.Conv1d(4, 4, 2, 2, 1, 2, 2)),
    "same": rows(nn.Conv1d(4, 3, 4, padding="same")),
    "max pool": rows(nn.MaxPool1d(3, stride=2, padding=1)),
    "average pool": rows(nn.AvgPool1d(3, stride=2, padding=1)),
    "average pool, without padding": rows(nn.AvgPool1d(3, 2, padding=1, count_include_pad=False)),
    "adaptive average pool": rows(nn.AdaptiveAvgPool1d(3)),
    "batch norm": rows(nn.BatchNorm1d(4), nn.ReLU()),
    "group norm": rows(nn.GroupNorm(2, 4)),
}

# Of the six words, the second comes twice in a sample, the fourth never; the first one pads.
WORDS = torch.tensor([[0, 1, 1], [2, 5, 0], [4, 1, 2]])
EMBEDDINGS = {
    "plain": [nn.Embedding(6, 4), nn.Flatten(), nn.Linear(12, 3)],
    "through layers": [nn.Embedding(6, 4), nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Flatten(), nn.Linear(15, 3)],
    "padding": [nn.Embedding(6, 4, padding_idx=0), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)],
}


def prepared(layers: list[nn.Module], seed: int = 0) -> nn.Sequential:
    """Return a float64 network in eval mode with distinct parameters and statistics."""
    model = nn.Sequential(*layers).double().eval()
    generator = torch.Generator().manual_seed(seed)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.data = noise * 0.6 if tensor.requires_grad else noise.abs() + 0.5
    return model


def followed(model: nn.Module, criterion: nn.Module, x, target) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with HesScale(model, criterion) as curvature:
        criterion(model(x), target).backward()
    return {name: curvature.diagonal(p) for name, p in model.named_parameters()}


def agree(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, diagonal in ours.items():
        torch.testing.assert_close(
            diagonal, theirs[name].detach(), rtol=1e-10, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert diagonal.abs().max() > 0, name


@pytest.mark.parametrize("name", DENSE)
def test_dense_layer_equals_naive(name):
    model = prepared(DENSE[name])
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    criterion, target = nn.CrossEntropyLoss(), torch.tensor([0, 2, 1, 1])
    agree(followed(model, criterion, x, target), naive_diagonals(model, criterion, x, target))


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_image_layer_equals_naive(name):
    model = prepared(CONVOLUTIONS[name])
    x = torch.randn(2, 2, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    criterion, target = nn.CrossEntropyLoss(), torch.tensor([0, 2])
    agree(followed(model, criterion, x, target), naive_diagonals(model, criterion, x, target))


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embedding_equals_naive(name):
    model = prepared(EMBEDDINGS[name])
    criterion, target = nn.CrossEntropyLoss(), torch.tensor([0, 2, 1])
    diagonals = followed(model, criterion, WORDS, target)
    agree(diagonals, naive_diagonals(model, criterion, WORDS, target))
    assert not diagonals["0.weight"][3].any()
    assert diagonals["0.weight"][0].any() != (name == "padding")


def test_an_embedding_before_one_output_is_exact():
    model = prepared([nn.Embedding(6, 4), nn.Tanh(), nn.Linear(4, 1)])
    words, target = torch.tensor([0, 2, 5, 2]), torch.arange(4.0, dtype=torch.float64)[:, None]
    agree(followed(model, nn.MSELoss(), words, target), exact_diagonals(model, nn.MSELoss(), words, target))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_indices_are_not_rounded(dtype):
    model, criterion = nn.Sequential(nn.Embedding(5000, 2), nn.Linear(2, 1)).to(dtype), nn.MSELoss()
    diagonal = followed(model, criterion, torch.tensor([4097, 301]), torch.zeros(2, 1, dtype=dtype))["0.weight"]
    assert diagonal.any(1).nonzero().flatten().tolist() == [301, 4097]


@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_embeddings_with_other_gradients_are_refused(option):
    model = nn.Sequential(nn.Embedding(6, 2, **{option: True}), nn.Linear(2, 1))
    with pytest.raises(RuntimeError, match=f"create it with {option}=False"):
        followed(model, nn.MSELoss(), torch.tensor([1]), torch.zeros(1, 1))


@pytest.mark.parametrize("criterion", [nn.MSELoss(), nn.MSELoss(reduction="sum")])
def test_one_unit_behind_a_group_norm_is_exact(criterion):
    """The output is linear in each input separately, so no term is missing."""
    model = prepared([nn.GroupNorm(2, 4), nn.Linear(4, 1)])
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    target = torch.randn(3, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    agree(followed(model, criterion, x, target), exact_diagonals(model, criterion, x, target))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_row_layer_equals_naive(name):
    model = prepared(ROWS[name])
    x = torch.randn(3, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    criterion, target = nn.CrossEntropyLoss(), torch.tensor([0, 2, 1])
    agree(followed(model, criterion, x, target), naive_diagonals(model, criterion, x, target))


CLASSES = torch.tensor([0, 2, 1, 1, 2])
DISTRIBUTIONS = torch.softmax(torch.arange(15.0, dtype=torch.float64).sin().view(5, 3), 1)
WEIGHTS = torch.tensor([0.5, 1.0, 2.5], dtype=torch.float64)
LOSSES = {
    "cross-entropy": (nn.CrossEntropyLoss(), CLASSES),
    "cross-entropy, sum": (nn.CrossEntropyLoss(reduction="sum"), CLASSES),
    "cross-entropy, weights": (nn.CrossEntropyLoss(weight=WEIGHTS), CLASSES),
    "cross-entropy, smoothing": (nn.CrossEntropyLoss(label_smoothing=0.3), CLASSES),
    "cross-entropy, smoothing and weights": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.3), CLASSES),
    "cross-entropy, ignored": (nn.CrossEntropyLoss(ignore_index=2), CLASSES),
    "cross-entropy, all options": (
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.3, ignore_index=1, reduction="sum"),
        CLASSES,
    ),
    "cross-entropy, all options, mean": (
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.3, ignore_index=1),
        CLASSES,
    ),
    "cross-entropy, distributions": (nn.CrossEntropyLoss(), DISTRIBUTIONS),
    "cross-entropy, distributions, all options": (
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.3, reduction="sum"),
        DISTRIBUTIONS,
    ),
    "cross-entropy, distributions, weights": (nn.CrossEntropyLoss(weight=WEIGHTS), DISTRIBUTIONS),
    "squared error": (nn.MSELoss(), DISTRIBUTIONS),
    "squared error, sum": (nn.MSELoss(reduction="sum"), DISTRIBUTIONS),
    "binary cross-entropy": (nn.BCEWithLogitsLoss(), DISTRIBUTIONS),
    "binary cross-entropy, sum": (nn.BCEWithLogitsLoss(reduction="sum"), DISTRIBUTIONS),
    "binary cross-entropy, weights": (nn.BCEWithLogitsLoss(weight=WEIGHTS, pos_weight=1 / WEIGHTS), DISTRIBUTIONS),
}


@pytest.mark.parametrize("name", LOSSES)
def test_last_layer_is_exact_for_every_loss(name):
    criterion, target = LOSSES[name]
    check_last_layer(prepared([nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)]), criterion, target)


def test_classes_may_have_8_bits():
    model = prepared([nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)])
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    criterion = nn.CrossEntropyLoss(weight=WEIGHTS)
    agree(followed(model, criterion, x, CLASSES.to(torch.uint8)), followed(model, criterion, x, CLASSES))


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"weight": WEIGHTS, "ignore_index": 1}])
def test_likelihood_after_log_softmax_is_cross_entropy(options):
    model = prepared([nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)])
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    together = followed(model, nn.CrossEntropyLoss(**options), x, CLASSES)
    apart = followed(nn.Sequential(*model, nn.LogSoftmax(dim=1)), nn.NLLLoss(**options), x, CLASSES)
    agree(apart, together)


def test_dense_predictions_have_a_loss_at_every_position():
    model = prepared([nn.Conv2d(2, 3, 1)])
    x = torch.randn(2, 2, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    target = torch.arange(12).view(2, 3, 2) % 3
    for criterion in (nn.CrossEntropyLoss(ignore_index=2), nn.CrossEntropyLoss(label_smoothing=0.2, weight=WEIGHTS)):
        ours = followed(model, criterion, x, target)
        agree(ours, exact_diagonals(model, criterion, x, target))


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=WEIGHTS)])
@pytest.mark.parametrize("shape", [(4,), (1, 4)])
def test_a_single_sample_with_and_without_batch(shape, criterion):
    model = prepared([nn.Linear(4, 3)])
    x = torch.ones(shape, dtype=torch.float64)
    target = torch.tensor(2) if len(shape) == 1 else torch.tensor([2])
    agree(followed(model, criterion, x, target), exact_diagonals(model, criterion, x, target))


def test_an_unbatched_image():
    model = prepared([nn.Conv2d(2, 4, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(0), nn.Linear(8, 3)])
    batched = prepared([nn.Conv2d(2, 4, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)])
    x = torch.randn(2, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    one = followed(model, nn.CrossEntropyLoss(), x, torch.tensor(2))
    agree(one, followed(batched, nn.CrossEntropyLoss(), x[None], torch.tensor([2])))


def test_any_memory_format():
    model = prepared(images(nn.Conv2d(4, 3, 2), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)))
    x = torch.randn(2, 2, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    criterion, target = nn.CrossEntropyLoss(), torch.tensor([0, 2])
    expected = followed(model, criterion, x, target)
    model.to(memory_format=torch.channels_last)
    agree(followed(model, criterion, x.to(memory_format=torch.channels_last), target), expected)


def test_sequences_are_batches_of_positions():
    model = prepared([nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)])
    x = torch.randn(5, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    target = torch.randn(5, 6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    sequences = followed(model, nn.MSELoss(), x, target)
    agree(sequences, followed(model, nn.MSELoss(), x.flatten(0, 1), target.flatten(0, 1)))


def exact_diagonals(model: nn.Module, criterion: nn.Module, x, target) -> dict[str, torch.Tensor]:
    def loss(name):
        return lambda p: criterion(functional_call(model, {name: p}, (x,)), target)

    return {name: hessian_diagonal(loss(name), p.detach()) for name, p in model.named_parameters()}


def check_last_layer(model: nn.Sequential, criterion: nn.Module, target) -> None:
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours, exact = followed(model, criterion, x, target), exact_diagonals(model, criterion, x, target)
    for name in ("2.weight", "2.bias"):
        torch.testing.assert_close(ours[name], exact[name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", [n for n in ACTIVATIONS if n != "log_softmax"])
@pytest.mark.parametrize("criterion", [nn.MSELoss(), nn.BCEWithLogitsLoss()])
def test_a_chain_of_single_units_is_exact(name, criterion):
    act = ACTIVATIONS[name]
    model = prepared([nn.Linear(3, 1), act, nn.Linear(1, 1), act, nn.Linear(1, 1), act, nn.Linear(1, 1)], seed=3)
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    target = torch.rand(4, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    ours, exact = followed(model, criterion, x, target), exact_diagonals(model, criterion, x, target)
    for key, diagonal in ours.items():
        torch.testing.assert_close(diagonal, exact[key], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("activation", [nn.Identity(), nn.ReLU(), nn.LeakyReLU(0.2), nn.Tanh(), nn.SiLU()])
def test_one_hidden_layer_with_one_output_is_exact(activation):
    model = prepared([nn.Linear(4, 6), activation, nn.Linear(6, 1)])
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    target = torch.randn(5, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    agree(followed(model, nn.MSELoss(), x, target), exact_diagonals(model, nn.MSELoss(), x, target))


# -------------------------------------------------------------------------------------------------------------- by hand

SMOOTH = {
    "tanh": (
        nn.Tanh,
        math.tanh,
        lambda a: 1 - math.tanh(a) ** 2,
        lambda a: -2 * math.tanh(a) * (1 - math.tanh(a) ** 2),
    ),
    "relu": (nn.ReLU, lambda a: max(a, 0.0), lambda a: float(a > 0), lambda a: 0.0),
    "exp-linear": (
        nn.ELU,
        lambda a: a if a > 0 else math.exp(a) - 1,
        lambda a: 1.0 if a > 0 else math.exp(a),
        lambda a: 0.0 if a > 0 else math.exp(a),
    ),
}


def by_hand(weights, biases, activation, samples, labels, mean):
    """The recursion of the paper, unit by unit, in plain Python."""
    _, act, first, second = SMOOTH[activation]
    weight_diagonal = [[[0.0] * len(row) for row in w] for w in weights]
    bias_diagonal = [[0.0] * len(b) for b in biases]
    for x, label in zip(samples, labels, strict=True):
        inputs, sums = [], []
        for number, (w, b) in enumerate(zip(weights, biases, strict=True)):
            inputs.append(x)
            a = [sum(w[i][j] * x[j] for j in range(len(x))) + b[i] for i in range(len(b))]
            sums.append(a)
            x = [act(v) for v in a] if number < len(weights) - 1 else a
        total = sum(math.exp(v) for v in sums[-1])
        q = [math.exp(v) / total for v in sums[-1]]
        g = [q[i] - (i == label) for i in range(len(q))]
        h = [q[i] - q[i] ** 2 for i in range(len(q))]
        for number in reversed(range(len(weights))):
            for i in range(len(h)):
                bias_diagonal[number][i] += h[i] / (len(samples) if mean else 1)
                for j in range(len(inputs[number])):
                    value = h[i] * inputs[number][j] ** 2
                    weight_diagonal[number][i][j] += value / (len(samples) if mean else 1)
            if number == 0:
                break
            w, a = weights[number], sums[number - 1]
            h = [
                sum(h[k] * w[k][i] ** 2 * first(a[i]) ** 2 + g[k] * w[k][i] * second(a[i]) for k in range(len(h)))
                for i in range(len(a))
            ]
            g = [sum(g[k] * w[k][i] for k in range(len(g))) * first(a[i]) for i in range(len(a))]
    return weight_diagonal, bias_diagonal


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=5),
    activation=st.sampled_from(sorted(SMOOTH)),
    batch=st.integers(1, 4),
    mean=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_network_equals_the_recursion_by_hand(sizes, activation, batch, mean, seed):
    sizes[-1] += 1  # at least two classes
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), SMOOTH[activation][0]()]
    model = prepared(layers[:-1], seed)
    x = torch.randn(batch, sizes[0], dtype=torch.float64, generator=generator)
    target = torch.randint(sizes[-1], (batch,), generator=generator)
    ours = list(followed(model, nn.CrossEntropyLoss(reduction="mean" if mean else "sum"), x, target).values())
    linear = [m for m in model if isinstance(m, nn.Linear)]
    weights, biases = by_hand(
        [m.weight.tolist() for m in linear],
        [m.bias.tolist() for m in linear],
        activation,
        x.tolist(),
        target.tolist(),
        mean,
    )
    for number in range(len(linear)):
        for diagonal, expected in ((ours[2 * number], weights[number]), (ours[2 * number + 1], biases[number])):
            torch.testing.assert_close(diagonal, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-14)
