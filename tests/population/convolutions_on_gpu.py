"""Requirements of the kernel for convolutions on a GPU; plain functions, as in population_on_gpu.py."""

from gpu_cases import (
    PAPERS_CONVNET,
    assert_same_bits,
    assert_same_learner,
    bits,
    both,
    check_with_kernels,
    compared,
    of_learner,
)
from population_on_gpu import CONVOLUTIONAL, clusters_of, generated_learners
from torch import Tensor

from upgd.population import Learner, Population


def _backend(device: str) -> str:
    return "kernel" if device == "cuda" else "torch"


@check_with_kernels
def same_answers_of_small_convolutions(device: str) -> str:
    """Clusters of each size; strides, padding, poolings, activations and losses; each rule somewhere."""
    lines = []
    for problem, names, size in CONVOLUTIONAL:
        if size is not None:
            with clusters_of(size):
                runs = both(problem, generated_learners(names), 30, device, _backend(device))
            lines.append(f"clusters of {size}, {', '.join(names)}: {compared(*runs)}")
    return "\n".join(lines)


@check_with_kernels
def same_answers_of_the_papers_convnet(device: str) -> str:
    """With an activation after convolutions, as in the text, and without, as in the authors' code."""
    return "\n".join(
        f"{', '.join(names)}: {compared(*both(problem, generated_learners(names), 10, device, _backend(device)))}"
        for problem, names, size in CONVOLUTIONAL
        if size is None
    )


@check_with_kernels
def convolutions_agree_in_every_bit(device: str) -> str:
    """Reproducible, in blocks of other lengths, alone and restored. Some of the learners are split."""
    network, stream = PAPERS_CONVNET[True]
    count, steps, saved = (60, 1_500, 700) if device == "cuda" else (3, 12, 5)
    settings = {"lr": 0.01, "sigma": 0.01, "beta_utility": 0.99, "weight_decay": 0.001}
    learners = [Learner(method="upgd", seed=seed, **settings) for seed in range(count)]

    def run(which: list[Learner], *lengths: int, begin: dict[str, Tensor] | None = None) -> Population:
        population = Population(network, which, device=device, backend=_backend(device))
        if begin is not None:
            population.restore(begin)
        for length in lengths:
            population.run(stream, length, window=10_000)
        return population

    once = run(learners, steps)
    assert (once.result().diverged_at < 0).all()
    assert_same_bits(bits(once), bits(run(learners, steps)), "again")
    half = run(learners, 1, 3, saved - 4)
    assert_same_bits(bits(once), bits(run(learners, steps - saved, begin=half.state())), "restored")
    alone = run(learners[2:3], steps)
    assert_same_learner(of_learner(once, 2), of_learner(alone, 0), "one alone")
    return f"{count} learners, {steps} steps"


@check_with_kernels
def a_diverged_convnet_stays_alone(device: str) -> str:
    """It is frozen at the same step as on the CPU, and other learners are not affected."""
    network, stream = PAPERS_CONVNET[True]
    calm = [Learner(method="upgd", lr=1e-3, sigma=0.0, seed=seed) for seed in (0, 9, 1)]
    mixed = [own.but(lr=1e4) if own.seed == 9 else own for own in calm]
    truth = Population(network, mixed, backend="torch").run(stream, 20)
    with_wild, without = (Population(network, who, device=device, backend=_backend(device)) for who in (mixed, calm))
    result = with_wild.run(stream, 20)
    without.run(stream, 20)
    assert result.diverged_at.tolist() == truth.diverged_at.tolist(), (result.diverged_at, truth.diverged_at)
    assert ((result.diverged_at >= 0) == [False, True, False]).all()
    for place in (0, 2):
        assert_same_learner(of_learner(with_wild, place), of_learner(without, place), mixed[place])
    return f"diverged at {result.diverged_at[1]}"
