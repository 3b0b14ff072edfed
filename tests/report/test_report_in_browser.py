"""The page in a real browser: drawn, switched, read by keyboard, and silent on the network."""

import itertools

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
    return page.eval_on_selector_all(
        '[data-chart="curves"][data-of="comparison-1"] .scatterlayer .trace path.js-line',
        "paths => paths.filter(p => parseFloat(getComputedStyle(p).strokeWidth) > 1).map(p => p.style.stroke)",
    )


def test_charts_are_drawn_without_complaints_or_requests(open_page, address):
    page = open_page(address)
    assert len(lines(page)) == 3
    assert page.locator('[data-chart="sensitivity"] .js-plotly-plot').count() == 2  # lr and sigma
    assert page.locator(".heatmaplayer image, .heatmaplayer path").count() > 0
    assert page.complaints == []
    assert [url for url in page.requests_made if not url.startswith(("file:", "data:", "blob:"))] == []


def test_switching_a_method_off_hides_its_line_and_on_shows_it(open_page, address):
    page = open_page(address)
    before = lines(page)
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


def test_names_stay_text(open_page, address):
    page = open_page(address)
    alerts = []
    page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
    heading = page.get_by_role("heading", level=2, name=EVIL)
    assert heading.inner_text() == EVIL
    chart = page.locator('[data-chart="curves"][data-of="comparison-2"]')
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    chart.locator(".hoverlayer text").first.wait_for()
    assert EVIL in chart.locator(".hoverlayer").text_content()
    assert page.eval_on_selector_all("script", "all => all.length") == 3
    assert alerts == []
    assert page.complaints == []


def test_the_heat_map_shows_another_pair_when_asked(open_page, address):
    page = open_page(address)
    field = page.locator('[data-of="comparison-1"].pairs').get_by_label("method")
    assert field.locator("option").all_inner_texts() == ["UPGD", "Shrink & Perturb"]
    field.select_option("1")
    assert page.locator('[data-of="comparison-1"].pairs').get_by_label("method").input_value() == "1"
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


def test_it_prints(open_page, address):
    page = open_page(address, color_scheme="dark")
    assert len(page.pdf(format="A4")) > 20_000
    assert page.complaints == []


def _colours(path):
    import matplotlib.image

    return {tuple(pixel) for row in matplotlib.image.imread(path) for pixel in row.round(3).tolist()}
