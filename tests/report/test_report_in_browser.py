"""The page in a real browser: charts, switches, keyboard access, and no network requests."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from made_records import record

from upgd.report import write
from upgd.store import Store

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    records = [
        record(method, {"lr": lr, "sigma": sigma}, seed=seed, level=0.6 - lr - sigma)
        for method in ("upgd", "shrink-and-perturb")
        for lr, sigma in itertools.product((0.1, 0.01), (0.1, 0.01))
        for seed in range(2)
    ]
    records += [record("sgd", seed=seed, level=0.4, diverged_at=20 if seed else None) for seed in range(2)]
    records += [record(EVIL, {EVIL: EVIL}, problem=EVIL, network=EVIL, device=EVIL)]
    with Store.write(folder / "r.db") as store:
        store.add(records)
    return write(folder / "r.db", folder / "report.html").as_uri()


def lines(page):
    """The colours of the curves that the first chart shows."""
    chart = page.locator('[data-chart="curves"]').first
    chart.scroll_into_view_if_needed()
    chart.locator(".main-svg").first.wait_for(state="attached")
    page.settle()
    return chart.locator(".scatterlayer .trace path.js-line").evaluate_all(
        "paths => paths.filter(p => parseFloat(getComputedStyle(p).strokeWidth) > 1).map(p => p.style.stroke)",
    )


def drawn(page):
    """Return whether each chart is drawn, from the top down."""
    return page.eval_on_selector_all(".chart", "all => all.map((chart) => chart.querySelector('.main-svg') !== null)")


def test_charts_are_drawn_near_the_viewport_without_errors_or_requests(open_page, address):
    page = open_page(address, viewport={"width": 800, "height": 400})
    assert drawn(page) == sorted(drawn(page), reverse=True)
    assert not all(drawn(page))
    for top in range(0, page.evaluate("document.documentElement.scrollHeight"), 300):
        page.evaluate("top => scrollTo({ top, behavior: 'instant' })", top)
        page.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
        )  # it may be drawn now
        page.settle()
    assert len(drawn(page)) == 4  # curves of two problems; lr and sigma of the first
    assert all(drawn(page))
    assert page.complaints == []
    assert [url for url in page.requests_made if not url.startswith(("file:", "data:", "blob:"))] == []


def test_layout_is_stable_while_charts_are_drawn(open_page, address):
    page = open_page(address, viewport={"width": 800, "height": 400})
    before = page.evaluate("document.documentElement.scrollHeight")
    page.evaluate("[...document.querySelectorAll('.chart')].at(-1).scrollIntoView({ behavior: 'instant' })")
    page.locator(".chart").last.locator(".main-svg").first.wait_for(state="attached")
    page.settle()
    assert page.evaluate("document.documentElement.scrollHeight") == before


def test_switching_a_method_off_hides_its_line_and_on_shows_it(open_page, address):
    page = open_page(address)
    before = lines(page)
    assert len(before) == 3
    button = page.get_by_role("button", name="UPGD", exact=True).first
    button.focus()
    page.keyboard.press("Space")
    assert button.get_attribute("aria-pressed") == "false"
    blue = "rgb(0, 114, 178)"
    assert blue in before
    assert lines(page) == [colour for colour in before if colour != blue]
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "true"
    assert sorted(lines(page)) == sorted(before)
    page.get_by_role("button", name="Hide all").first.click()
    assert lines(page) == []
    assert page.complaints == []


def test_the_charts_of_hyperparameters_have_a_legend_that_switches_and_titles(open_page, address):
    page = open_page(address)
    legend = page.locator('#comparison-1 .switches[data-only="searched"]')
    assert legend.get_by_role("button").all_inner_texts() == ["UPGD", "Shrink & Perturb"]  # SGD has one setting
    charts = page.locator("#comparison-1 .multiples .chart")
    charts.first.scroll_into_view_if_needed()
    charts.first.locator(".main-svg").first.wait_for(state="attached")
    page.settle()
    assert charts.locator(".ytitle").all_text_contents() == ["mean accuracy"] * charts.count()
    legend.get_by_role("button", name="UPGD").click()
    main = page.locator("#comparison-1 .switches").first.get_by_role("button", name="UPGD", exact=True)
    assert main.get_attribute("aria-pressed") == "false"
    page.settle()
    assert charts.first.evaluate("chart => chart.data.map((trace) => trace.name)")[1::2] == ["Shrink &amp; Perturb"]
    assert page.complaints == []


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """A regression with long, noisy curves, whose symmetric bands would reach below zero."""
    folder = tmp_path_factory.mktemp("noisy")
    generator = np.random.default_rng(0)
    records = []
    for seed in range(4):
        one = record("sgd", {"lr": 0.1}, seed=seed, windows=60, regression=True)
        records.append(replace(one, loss=generator.lognormal(size=60)))
    with Store.write(folder / "r.db") as store:
        store.add(records)
    return write(folder / "r.db", folder / "report.html").as_uri()


def traces(page):
    page.settle()
    return page.locator('[data-chart="curves"]').evaluate("chart => chart.data.map(({ y }) => y)")


def test_noisy_curves_can_be_smoothed(open_page, noisy):
    page = open_page(noisy)
    field = page.get_by_label("smoothing")
    assert field.locator("option").all_inner_texts() == ["none", "30 steps", "50 steps", "90 steps", "150 steps"]
    _, raw = traces(page)
    field.focus()
    field.select_option("50 steps")
    _, smooth = traces(page)
    expected = [np.mean(raw[i - reach : i + reach + 1]) for i in range(60) for reach in [min(2, i, 59 - i)]]
    np.testing.assert_allclose(smooth, expected)
    assert page.locator('[data-chart="curves"] .ytitle').text_content() == "squared error, mean over 50 steps"
    assert field.evaluate("field => field === document.activeElement")
    assert page.complaints == []


def test_squared_errors_have_no_band_or_axis_below_zero(open_page, noisy):
    page = open_page(noisy)
    band, _ = traces(page)
    assert min(band) >= 0
    axis = page.locator('[data-chart="curves"]').evaluate(
        "chart => (({ type, range }) => ({ type, range }))(chart._fullLayout.yaxis)"
    )
    assert axis["type"] == "linear"
    assert axis["range"][0] >= 0


def test_scores_that_span_decades_have_a_logarithmic_axis(open_page, tmp_path):
    """A loss of 100 would hide everything else on a linear axis."""
    records = [
        replace(record("sgd", {"lr": lr}, seed=seed, regression=True), loss=np.full(4, loss))
        for lr, loss in ((0.1, 100.0), (0.01, 0.5), (0.001, 0.3))
        for seed in range(2)
    ]
    with Store.write(tmp_path / "r.db") as store:
        store.add(records)
    page = open_page(
        write(tmp_path / "r.db", tmp_path / "report.html").as_uri(), viewport={"width": 800, "height": 2000}
    )
    page.locator(".multiples .chart .main-svg").first.wait_for(state="attached")
    assert page.locator(".multiples .chart").evaluate("chart => chart._fullLayout.yaxis.type") == "log"


def test_on_a_phone_text_is_large_enough_and_no_number_is_cut(open_page, address):
    page = open_page(address, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.locator("details").evaluate_all("all => all.forEach((details) => { details.open = true; })")
    assert page.locator(".scroll").evaluate_all("all => all.map((box) => box.scrollWidth - box.clientWidth)") == [0] * (
        page.locator(".scroll").count()
    )
    cells = page.locator("td.number")
    assert cells.count() > 20
    assert cells.evaluate_all("all => all.every((cell) => cell.getBoundingClientRect().right <= innerWidth)")
    names = "all => all.map((cell) => getComputedStyle(cell, '::before').content)"
    assert cells.evaluate_all(names)[:4] == ['"mean ± s.e."', '"first quarter"', '"last quarter"', '"vs. best"']
    sizes = "all => Math.min(...all.map((one) => parseFloat(getComputedStyle(one).fontSize)))"
    assert page.locator("main :is(p, td, th, button, select, figcaption, caption)").evaluate_all(sizes) >= 15
    lines(page)
    assert page.locator('[data-chart="curves"]').first.locator("text").evaluate_all(sizes) >= 13


def test_no_button_sends_results_anywhere(open_page, address):
    page = open_page(address)
    titles = page.locator(".modebar-btn").evaluate_all(
        "all => [...new Set(all.map((one) => one.dataset.title))].sort()"
    )
    assert titles == ["Download plot as a PNG", "Pan", "Reset axes", "Zoom", "Zoom in", "Zoom out"]


def test_the_keyboard_finds_the_buttons_of_a_chart(open_page, address):
    page = open_page(address)
    button = page.get_by_label("Zoom in").first
    button.focus()
    page.wait_for_function("getComputedStyle(document.activeElement.closest('.modebar')).opacity === '1'")


def test_names_stay_text(open_page, address):
    page = open_page(address)
    alerts = []
    page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
    heading = page.get_by_role("heading", level=2, name=EVIL)
    assert heading.inner_text() == EVIL
    chart = page.locator('[data-chart="curves"][data-of="comparison-2"]')
    chart.scroll_into_view_if_needed()
    chart.locator(".main-svg").first.wait_for(state="attached")
    page.settle()
    box = chart.bounding_box()
    for attempt in range(100):  # a chart reacts to a moving pointer once its listeners are attached
        page.mouse.move(box["x"] + box["width"] / 2 + attempt % 2, box["y"] + box["height"] / 2)
        if chart.locator(".hoverlayer text").count():
            break
        page.wait_for_timeout(100)
    assert EVIL in chart.locator(".hoverlayer").text_content()
    assert page.eval_on_selector_all("script", "all => all.length") == 3
    assert alerts == []
    assert page.complaints == []


def test_the_heat_map_has_the_best_of_every_pair_and_shows_another_method_when_asked(open_page, address):
    page = open_page(address)
    pairs = page.locator('[data-of="comparison-1"].pairs')
    assert pairs.locator("th").all_inner_texts() == ["0.01", "0.1", "0.01", "0.1"]
    # A curve rises from half its level to the level; the two seeds are 0.01 apart.
    means = [f"{0.75 * (0.6 - lr - sigma) + 0.005:.4g}" for lr, sigma in itertools.product((0.01, 0.1), (0.01, 0.1))]
    assert [float(cell) for cell in pairs.locator("tbody td").all_inner_texts()] == [float(mean) for mean in means]
    assert float(pairs.locator("td.top").inner_text()) == max(map(float, means))
    field = pairs.get_by_label("method")
    assert field.locator("option").all_inner_texts() == ["UPGD", "Shrink & Perturb"]
    field.focus()
    field.select_option("1")
    assert pairs.get_by_label("method").input_value() == "1"
    assert pairs.locator("caption").inner_text().startswith("Shrink & Perturb")
    assert pairs.get_by_label("method").evaluate("field => field === document.activeElement")
    assert page.complaints == []


def test_a_setting_of_which_most_diverge_is_not_the_best(open_page, tmp_path):
    records = [
        record("pgd", {"lr": lr, "sigma": sigma}, seed=seed, level=level, diverged_at=20 if diverges and seed else None)
        for lr, level, diverges in ((1.0, 0.9, True), (0.1, 0.6, False))
        for sigma in (0.1, 0.01)
        for seed in range(4)
    ]
    with Store.write(tmp_path / "r.db") as store:
        store.add(records)
    page = open_page(write(tmp_path / "r.db", tmp_path / "report.html").as_uri())
    heat = page.locator(".heat")
    assert sum("75% diverged" in cell for cell in heat.locator("tbody td").all_inner_texts()) == 2
    assert [float(top) for top in heat.locator("td.top").all_inner_texts()] == [0.465, 0.465]
    assert page.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_and_a_phone_show_something(open_page, address, scheme, tmp_path):
    page = open_page(address, color_scheme=scheme, viewport={"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 28)"}[scheme]
    chart = page.locator('[data-chart="curves"]').first
    chart.scroll_into_view_if_needed()
    path = tmp_path / "chart.png"
    chart.screenshot(path=path)
    assert len(_colours(path)) > 30


def test_touching_a_chart_scrolls_the_page(open_page, address):
    page = open_page(address, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    chart = page.locator('[data-chart="curves"]').first
    chart.scroll_into_view_if_needed()
    box, before = chart.bounding_box(), page.evaluate("scrollY")
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    finger = page.context.new_cdp_session(page)
    finger.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
    for up in range(20, 220, 20):
        finger.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": [{"x": x, "y": y - up}]})
    finger.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    page.wait_for_function("before => scrollY > before + 100", arg=before, timeout=10_000)


def test_on_paper_all_charts_are_drawn_in_light_colours(open_page, address):
    page = open_page(address, color_scheme="dark", viewport={"width": 800, "height": 400})
    blue, light_blue = "rgb(0, 114, 178)", "rgb(61, 155, 224)"
    assert light_blue in lines(page)
    page.emulate_media(media="print", color_scheme="dark")
    page.locator("html.paper").wait_for()
    assert all(drawn(page))
    assert blue in lines(page)
    assert page.locator("details.on-paper:not([open])").count() == 0
    wide = "all => all.every((svg) => svg.getBoundingClientRect().right <= 690 + document.body.offsetWidth / 2)"
    assert page.eval_on_selector_all(".main-svg", wide)
    page.emulate_media(media="screen", color_scheme="dark")
    page.locator("html:not(.paper)").wait_for()
    assert light_blue in lines(page)
    assert page.locator("details[open]").count() == 0
    assert page.complaints == []


def test_it_prints(open_page, address):
    page = open_page(address, color_scheme="dark", viewport={"width": 800, "height": 400})
    assert len(page.pdf(format="A4")) > 20_000
    assert all(drawn(page))
    page.settle()
    assert page.complaints == []


def _colours(path):
    import matplotlib.image

    return {tuple(pixel) for row in matplotlib.image.imread(path) for pixel in row.round(3).tolist()}
