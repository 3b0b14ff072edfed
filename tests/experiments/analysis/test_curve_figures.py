"""Curves over seeds: bands against scipy, merged windows by hand, distinguishable figures."""

from itertools import pairwise

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_records import record, seeds
from scipy import stats

from upgd.experiments import Results
from upgd.experiments.analysis import figures
from upgd.experiments.analysis.bands import band, interval, of_seeds
from upgd.experiments.analysis.compare import comparisons
from upgd.experiments.analysis.student import quantile
from upgd.experiments.analysis.variants import Variant, best_of_variants, by_variant, variant
from upgd.methods import METHODS
from upgd.methods.colours import colours
from upgd.store import Store

matplotlib.use("agg")


@pytest.mark.parametrize("count", [2, 3, 5, 10, 20, 31, 32, 50, 1000])
def test_the_t_distribution_is_students(count):
    assert quantile(count - 1) == pytest.approx(stats.t.ppf(0.975, count - 1), rel=1e-9)


def test_the_band_is_the_confidence_interval_of_the_mean():
    values = np.random.default_rng(0).normal(size=(7, 5))
    mean, reach = band(values)
    low, high = stats.t.interval(0.95, 6, loc=values.mean(0), scale=stats.sem(values))
    np.testing.assert_allclose(mean - reach, low, atol=1e-3)
    np.testing.assert_allclose(mean + reach, high, atol=1e-3)


def test_a_single_seed_has_no_band():
    mean, reach = band(np.ones((1, 3)))
    assert mean.tolist() == [1, 1, 1]
    assert reach.tolist() == [0, 0, 0]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 20])
def test_the_band_of_a_loss_stays_between_its_seeds(count):
    """A symmetric interval of these values would reach below zero."""
    values = np.random.default_rng(count).lognormal(sigma=2.0, size=(count, 50))
    mean, low, high = interval(values, "loss")
    np.testing.assert_allclose(mean, values.mean(0))
    assert (values.min(0) <= low * (1 + 1e-12)).all()
    assert (low <= mean * (1 + 1e-12)).all()
    assert (mean <= high * (1 + 1e-12)).all()
    assert (high <= values.max(0) * (1 + 1e-12)).all()


def test_three_seeds_of_a_loss_have_a_band_from_the_lowest_to_the_highest():
    """By the expansion for few seeds: Student's quantile of 4.3 is far out in the tail of a normal distribution."""
    values = np.array([[1.0], [2.0], [9.0]])
    mean, low, high = interval(values, "loss")
    assert [mean.item(), low.item(), high.item()] == pytest.approx([4.0, 1.0, 9.0])


def test_many_seeds_of_a_loss_have_students_band():
    """With 300 seeds the mean is normal. The end of a bootstrap of 2,000 draws has a standard error of 3% of the reach."""
    values = np.random.default_rng(3).exponential(size=(300, 10))
    mean, low, high = interval(values, "loss")
    reach = band(values)[1]
    np.testing.assert_allclose((high - low) / 2, reach, rtol=0.1)
    np.testing.assert_allclose(mean, (low + high) / 2, atol=0.1 * reach.min())


def test_the_band_of_an_accuracy_is_students_and_ends_at_0_and_1():
    values = np.array([[0.5, 0.99, 0.01], [0.6, 0.999, 0.002], [0.4, 0.9, 0.1]])
    mean, low, high = interval(values, "accuracy")
    reach = band(values)[1]
    assert (low[0], high[0]) == pytest.approx((mean[0] - reach[0], mean[0] + reach[0]))
    assert high[1] == 1
    assert low[2] == 0


def test_joined_windows_count_every_step_once():
    """Five windows, the last of 3 steps instead of 10, in two points: (0, 1, 2) and (3, 4)."""
    one = record(windows=5, steps=43)
    entry = comparisons([one])[0].entries[0]
    steps, values = of_seeds(entry, "accuracy", 2)
    assert steps.tolist() == [30, 43]
    expected = (one.accuracy[3] * 10 + one.accuracy[4] * 3) / 13
    assert values[0] == pytest.approx([one.accuracy[:3].mean(), expected], rel=1e-6)


def test_diverged_learners_are_left_out_of_the_curve():
    entry = comparisons([record(seed=0), record(seed=1, diverged_at=15)])[0].entries[0]
    assert of_seeds(entry, "accuracy", 80)[1].shape == (1, 4)


def test_variants_have_a_best_setting_each():
    records = [record("upgd", {"lr": lr}, level=level) for lr, level in ((0.1, 0.4), (0.01, 0.6))]
    records += [record("upgd", {"lr": lr, "scaling": "local"}, level=level) for lr, level in ((0.1, 0.9), (0.01, 0.8))]
    comparison = comparisons(records)[0]
    assert set(by_variant(comparison)) == {Variant("upgd"), Variant("upgd", (("scaling", "local"),))}
    chosen = best_of_variants(comparison)
    assert chosen[Variant("upgd")].entry.settings["lr"] == 0.01
    assert chosen[Variant("upgd", (("scaling", "local"),))].entry.settings["lr"] == 0.1


def test_a_variants_label_names_unusual_settings():
    entry = comparisons([record("upgd", {"wise": "feature", "order": 2})])[0].entries[0]
    assert variant(entry).label == "UPGD, feature-wise, 2nd order"
    assert Variant("sgd").label == "SGD"
    assert Variant("mine").label == "mine"


def test_plot_draws_a_line_and_a_band_for_every_method_and_names_it_at_its_end():
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    results = Results([*seeds(3, "sgd", level=0.5), *seeds(3, "upgd", level=0.51)])
    assert results.plot(ax=ax) is ax
    assert [line.get_color() for line in ax.lines] == [METHODS["sgd"].colour, METHODS["upgd"].colour]
    assert len(ax.collections) == 2
    names = {text.get_text(): text.xyann[1] for text in ax.texts if text.get_text() in ("SGD", "UPGD")}
    assert names["UPGD"] - names["SGD"] >= 0.06  # the ends are 0.01 apart, the labels are farther apart


def test_a_long_subtitle_leaves_the_curves_their_width():
    (comparison,) = comparisons(seeds(3, "sgd"))
    widths = []
    for remark in ("", "; " + "thin lines: best setting in the paper's grid " * 3):
        ax = figures.curves(comparison, remark=remark)
        ax.figure.draw_without_rendering()
        widths.append(ax.get_position().width)
        (subtitle,) = (text for text in ax.texts if text.get_text().startswith("online"))
        assert subtitle.get_window_extent().x1 <= ax.figure.bbox.x1
    assert widths[1] == pytest.approx(widths[0], rel=0.01)


def test_the_plot_notes_excluded_diverged_learners():
    from matplotlib.figure import Figure

    def said(*records):
        return " ".join(text.get_text() for text in Results(records).plot(ax=Figure().subplots()).texts)

    assert "mean and 95% band of 3 seeds, without those that diverged" in said(
        *seeds(3, "sgd"), *seeds(3, "pgd", diverged_at=15)
    )
    assert "diverged" not in said(*seeds(3, "sgd"))


@given(st.lists(st.floats(0, 1), max_size=14), st.sampled_from([0.05, 0.07]))
def test_labels_keep_their_order_their_distance_and_inside(heights, distance):
    placed = figures.apart(heights, distance)
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    for lower, upper in pairwise(order):
        assert placed[upper] - placed[lower] >= distance - 1e-9
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in placed)


def test_a_label_with_room_stays_where_its_curve_ends():
    assert figures.apart([0.9, 0.1, 0.5], 0.07) == [0.9, 0.1, 0.5]


def test_saved_figures_are_the_same_byte_for_byte(tmp_path):
    from matplotlib.figure import Figure

    def drawn(name):
        figure = Figure(layout="constrained")
        Results(seeds(3, "sgd")).plot(ax=figure.subplots())
        return figures.save(figure, tmp_path / name)

    first, second = drawn("a"), drawn("b")
    assert [path.name for path in first] == ["a.svg", "a.png", "a.pdf"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
        assert len(one.read_bytes()) > 2_000


@pytest.mark.parametrize("name", ["a", "a.png", "a.svg"])
def test_axes_are_saved_with_their_figure_under_any_ending(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    figures.save(Results(seeds(3, "sgd")).plot(), name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pdf", "a.png", "a.svg"]


def test_methods_have_distinct_colours():
    assert len(set(colours([*METHODS, "mine", "yours"]).values())) == len(METHODS) + 2
    assert colours(["mine"]) == {"mine": colours(["yours", "mine"])["mine"]}  # regardless of the rest of the figure


def figure_axes():
    from matplotlib.figure import Figure

    return Figure().subplots()


FOUR = [*seeds(3, "sgd"), *seeds(3, "upgd", level=0.7), *seeds(3, "upgd", {"scaling": "local"}), *seeds(3, "mine")]


def test_a_plot_shows_the_requested_methods_in_order():
    ax = Results(FOUR).plot(ax=figure_axes(), methods=["mine", "UPGD, local", "sgd"])
    assert [line.get_label() for line in ax.lines] == ["mine", "UPGD, local", "SGD"]
    ax = Results(FOUR).plot(ax=figure_axes(), methods="upgd")
    assert [line.get_label() for line in ax.lines] == ["UPGD", "UPGD, local"]
    with pytest.raises(ValueError, match=r"there is no 'adamw' in .*; choose among SGD; UPGD; UPGD, local; mine"):
        Results(FOUR).plot(methods=["adamw"])


def test_a_legend_replaces_the_names_at_the_ends():
    def names(ax):
        return {text.get_text() for text in ax.texts} & {"SGD", "UPGD", "mine"}

    ax = Results(FOUR).plot(ax=figure_axes())
    assert (names(ax), ax.get_legend()) == ({"SGD", "UPGD", "mine"}, None)
    ax = Results(FOUR).plot(ax=figure_axes(), legend=True, title="Mine")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["SGD", "UPGD", "UPGD, local", "mine"]
    assert (names(ax), ax.get_title(loc="left")) == (set(), "Mine")
    ax = Results(FOUR).plot(ax=figure_axes(), legend=False)
    assert (names(ax), ax.get_legend()) == (set(), None)


def test_bands_match_their_names():
    values = np.array([r.accuracy for r in FOUR[:3]], np.float64)
    mean, spread = values.mean(0), values.std(0, ddof=1)
    reaches = {"sd": (mean - spread, mean + spread), "range": (values.min(0), values.max(0))}
    for kind, (low, high) in reaches.items():
        ax = Results(FOUR[:3]).plot(ax=figure_axes(), band=kind)
        path = ax.collections[0].get_paths()[0].vertices
        drawn = [sorted(y for x, y in path if x == step) for step in (10, 20, 30, 40)]
        assert [ys[0] for ys in drawn] == pytest.approx(low)
        assert [ys[-1] for ys in drawn] == pytest.approx(high)
    for nothing in (None, False):
        ax = Results(FOUR[:3]).plot(ax=figure_axes(), band=nothing)
        assert not ax.collections
        assert "online accuracy, mean of 3 seeds" in {text.get_text() for text in ax.texts}
    with pytest.raises(ValueError, match="band must be 'ci', 'sd', 'range' or None, not 'se'"):
        Results(FOUR[:3]).plot(band="se")


def test_plots_follow_the_rc_params_of_the_user():
    mpl = matplotlib
    from matplotlib import pyplot as plt

    own = {
        "figure.figsize": (3, 2),
        "lines.linewidth": 5,
        "axes.titlesize": 30,
        "axes.titlelocation": "right",
        "text.color": "#ff0000",
        "xtick.color": "#00ff00",
        "axes.prop_cycle": mpl.cycler(color=["#111111", "#222222", "#333333"]),
        "font.size": 20,
    }
    with mpl.rc_context(own):
        ax = Results(FOUR).plot()
        assert tuple(ax.figure.get_size_inches()) == (3, 2)
        assert [line.get_linewidth() for line in ax.lines] == [5] * 4
        assert [line.get_color() for line in ax.lines] == ["#111111", "#222222", "#222222", "#333333"]
        assert ax.get_title(loc="right") == "output-permuted-digits"
        assert {text.get_color() for text in ax.texts if "online" in text.get_text()} == {"#ff0000"}
        assert ax.xaxis.get_ticklabels()[0].get_color() == "#00ff00"
        assert {text.get_fontsize() for text in ax.texts if text.get_text() == "SGD"} == {20}
    plain = Results(FOUR).plot()
    assert tuple(plain.figure.get_size_inches()) == (7.2, 4.2)
    assert plain.lines[0].get_linewidth() == 2
    plt.close("all")


@pytest.mark.parametrize("background", ["white", "black", "#808080", "none"])
@pytest.mark.parametrize("colour", ["#0072B2", "#ffffff", "#000000", "#E69F00"])
def test_names_can_be_read_on_any_background(colour, background):
    from matplotlib.colors import to_hex, to_rgba

    from upgd.report.colours import contrast

    ground = "#ffffff" if background == "none" else to_hex(to_rgba(background))
    assert contrast(figures.readable(colour, background), ground) >= 4.45  # 4.5, but for the rounding to eight bits


def test_panels_have_a_figure_for_several_problems():
    records = [*seeds(3, "sgd"), *seeds(3, "sgd", problem="other")]
    figure = figures.panels(Results(records).comparisons(), title="Both")
    assert [ax.get_title(loc="left").split(",")[0] for ax in figure.axes] == ["output-permuted-digits", "other"]
    assert figure.get_suptitle() == "Both"
    (ax,) = figures.panels(Results(records[:3]).comparisons(), title="One").axes
    assert ax.get_title(loc="left") == "One"


@pytest.mark.parametrize(
    ("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF"), ("a", b"\x89PNG")]
)
def test_the_plot_command(upgd, tmp_path, monkeypatch, name, begins):
    monkeypatch.chdir(tmp_path)
    with Store.write("a.db") as store:
        store.add([*FOUR, *seeds(3, "sgd", problem="other")])
    code, out, err = upgd(
        "plot", "a.db", "-o", name, "--methods", "sgd,upgd", "--legend", "--band", "none", "--title", "x"
    )
    assert (code, out, err) == (0, "", f"wrote {name}\n")
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_the_plot_command_reports_errors_and_never_overwrites_stores(upgd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Store.write("a.db") as store:
        store.add(FOUR)
    before = (tmp_path / "a.db").read_bytes()
    code, _, err = upgd("plot", "a.db", "-o", "curves.gif")
    assert (code, "curves.gif must end with .png, .svg or .pdf" in err) == (2, True)
    (tmp_path / "link.png").symlink_to("a.db")
    code, _, err = upgd("plot", "a.db", "-o", "link.png")
    assert (code, "link.png is a store" in err) == (1, True)
    assert (tmp_path / "a.db").read_bytes() == before
    code, _, err = upgd("plot", "a.db", "--problem", "nothing")
    assert (code, "no matching results" in err) == (1, True)
    assert upgd("plot", "--store", "a.db", "--no-legend")[0] == 0
    assert (tmp_path / "curves.png").exists()
