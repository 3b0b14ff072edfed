"use strict";
// Draws the charts from the data in the page, in the colours of the current theme, and shows or hides methods.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 620px)");
  const touch = matchMedia("(pointer: coarse)");
  const hidden = new Map(); // section → names of the hidden methods
  const chosen = new Map(); // the reader's choices, by section and kind of chart
  let data = {};
  let printing = false;

  // --- Charts are drawn when they come near the viewport; all of them are drawn before the page is printed.

  const charts = new Map(); // element → function that draws it
  const stale = new Set(); // charts that must be redrawn
  const near = new Set(); // charts in the viewport or less than half a viewport away
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) isIntersecting ? near.add(target) : near.delete(target);
    drawNear();
  }, { rootMargin: "50% 0px" });

  function chart(element, draw) {
    charts.set(element, draw);
    stale.add(element);
    watcher.observe(element);
  }
  function drawOne(element) {
    stale.delete(element);
    charts.get(element)();
    performance.mark("upgd: chart");
  }
  // Draw one chart at a time, so that the page stays responsive.
  let drawing = false;
  function drawNear() {
    if (drawing) return;
    const next = [...near].find((element) => stale.has(element));
    document.body.dataset.drawn = next ? "no" : "yes";
    if (!next) return;
    drawing = true;
    drawOne(next);
    setTimeout(() => {
      drawing = false;
      drawNear();
    });
  }
  function redraw(elements = charts.keys()) {
    for (const element of elements) stale.add(element);
    drawNear();
  }

  // --- Helpers shared by all charts.

  const sectionOf = (element) => element.closest("section").id;
  const off = (section) => hidden.get(section) ?? hidden.set(section, new Set()).get(section);
  const shown = (section) => data[section].methods.filter((method) => !off(section).has(method.name));
  const colour = (method) => (dark.matches && !printing ? method.dark : method.light);
  const faint = (hex, share) => hex + Math.round(share * 255).toString(16).padStart(2, "0");
  const short = (value) => (typeof value === "number" ? String(Number(value.toPrecision(4))) : String(value));
  // Plotly interprets text as HTML-like markup, so names must be escaped.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const create = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };

  let tones = {}; // colours of the theme, cached, because reading a computed style forces the browser to recompute styles
  function readTones() {
    const style = getComputedStyle(document.documentElement);
    const names = ["paper", "card", "ink", "soft", "line", "grid", "accent"];
    tones = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }
  const axis = (extra) => ({
    gridcolor: tones.grid, linecolor: tones.line, zerolinecolor: tones.grid, fixedrange: touch.matches, ...extra,
  });
  const stepAxis = (section) => axis({
    title: { text: "step", standoff: 8 }, range: [0, data[section].steps], showgrid: false, hoverformat: ",d",
  });
  function draw(element, traces, extra) {
    const small = element.closest(".multiples") !== null;
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, autosize: !printing,
      font: { family: "system-ui, sans-serif", size: small && !narrow.matches ? 12 : 13, color: tones.soft },
      margin: small ? { l: 60, r: 14, t: 8, b: 44 } : { l: 64, r: 24, t: 10, b: 46 },
      hovermode: "x unified", dragmode: touch.matches ? false : "zoom", // on touch screens, dragging scrolls the page
      hoverlabel: { bgcolor: tones.card, bordercolor: tones.line, font: { color: tones.ink }, namelength: -1 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: tones.soft, activecolor: tones.accent },
      ...extra,
    };
    if (!traces.length) {
      layout.xaxis = layout.yaxis = { visible: false };
      layout.annotations = [{ text: "Nothing to show: hidden or diverged.", showarrow: false }];
    }
    if (printing) [layout.width, layout.height] = small ? [220, 190] : [690, 300]; // must match the print sizes in page.css
    Plotly.react(element, traces, layout, {
      responsive: true, displaylogo: false, displayModeBar: small || touch.matches ? false : "hover",
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]], // none that needs the network
    });
  }

  function select(label, entries, current, onChange) {
    const field = create("select", {}, ...entries.map((entry, i) => create("option", { value: i }, entry)));
    field.value = current;
    field.addEventListener("change", () => onChange(Number(field.value)));
    return create("label", {}, label, field);
  }
  // Replaces the fields and preserves keyboard focus.
  function replaceFields(box, fields) {
    const focused = [...box.querySelectorAll("select")].indexOf(document.activeElement);
    box.replaceChildren(...fields);
    if (focused >= 0) box.querySelectorAll("select")[Math.min(focused, fields.length - 1)].focus();
  }

  // --- Curves.

  const finite = (values) => values.filter((value) => value !== null);
  const noun = (section) => data[section].noun;
  function spansDecades(section, values) {
    const all = finite(values);
    return data[section].metric === "loss" && Math.min(...all) > 0 && Math.max(...all) > 30 * Math.min(...all);
  }

  // An axis for the section's metric. Losses are never negative; on a logarithmic axis every tick has a label.
  const metricAxis = (section, log, title, extra) => axis({
    title: { text: title, standoff: 10 }, type: log ? "log" : "linear",
    ...(log ? { tickformat: "~g" } : data[section].metric === "loss" && { rangemode: "nonnegative" }), ...extra,
  });

  // Smooths noisy curves with a centred moving average, which does not shift them in time.
  const WIDTHS = [1, 3, 5, 9, 15, 25];
  function smoothed(values, width) {
    const half = (width - 1) / 2;
    return values.map((value, i) => {
      if (value === null || !half) return value;
      const reach = Math.min(half, i, values.length - 1 - i); // symmetric window, narrower near the ends
      const around = finite(values.slice(i - reach, i + reach + 1));
      return around.reduce((sum, one) => sum + one, 0) / around.length;
    });
  }
  // The window widths that suit curves with these points, and the selected width.
  function smoothing(key, steps) {
    const widths = WIDTHS.filter((width) => width === 1 || width <= steps.length / 3);
    const width = widths.includes(chosen.get(key)) ? chosen.get(key) : 1;
    const over = (points) => `${(points * (steps[1] - steps[0])).toLocaleString("en")} steps`;
    const field = (onChange) => select("smoothing", widths.map((one) => (one === 1 ? "none" : over(one))), widths.indexOf(width), (i) => {
      chosen.set(key, widths[i]);
      onChange();
    });
    return { width, words: width === 1 ? "" : `, mean over ${over(width)}`, fields: (onChange) => (widths.length > 1 ? [field(onChange)] : []) };
  }

  function curves(element) {
    const section = sectionOf(element);
    const longest = data[section].methods.reduce((most, { x }) => (x.length > most.length ? x : most), []);
    const smooth = () => smoothing(`${section} curves`, longest);
    const lines = (method, width) => {
      const tint = colour(method);
      const [y, low, high] = [method.y, method.low, method.high].map((values) => smoothed(values, width));
      const line = {
        name: plain(method.name), x: method.x, y, mode: method.x.length > 1 ? "lines" : "markers",
        line: { color: tint, width: 2.4, dash: method.dash }, marker: { color: tint, size: 8 },
        hovertemplate: "%{y:.4g}",
      };
      if (method.seeds < 3) return [line]; // two seeds give no useful estimate of the spread
      const band = {
        x: [...method.x, ...[...method.x].reverse()], y: [...high, ...low.reverse()],
        fill: "toself", fillcolor: faint(tint, 0.16), line: { width: 0 }, mode: "lines", hoverinfo: "skip",
      };
      return [band, line];
    };
    const log = spansDecades(section, data[section].methods.flatMap((method) => method.y));
    chart(element, () => {
      const { width, words } = smooth();
      draw(element, shown(section).flatMap((method) => lines(method, width)), {
        xaxis: stepAxis(section), yaxis: metricAxis(section, log, noun(section) + words),
      });
    });
    element.previousElementSibling.replaceChildren(...smooth().fields(() => redraw([element])));
  }

  // --- Hyperparameters, one at a time and in pairs.

  const worded = (section, name) => data[section].words[name] ?? name;
  const spaced = (name) => name.replaceAll("_", " ");
  const isBetter = (section) => (data[section].higher ? (a, b) => a > b : (a, b) => a < b);

  // The result of a setting: its score and the fraction of diverged learners. Fewer diverged learners rank first.
  const reached = (method, row) => ({ score: row[method.names.length], diverged: row[method.names.length + 1] });
  const isAhead = (section) => (one, other) => one.diverged !== other.diverged
    ? one.diverged < other.diverged : one.score !== null && isBetter(section)(one.score, other.score);
  const howMany = ({ diverged }) => (diverged ? `${Math.round(100 * diverged)}% diverged` : "");

  // The best result for each value of a hyperparameter, or each pair of values of two hyperparameters.
  function bestBy(method, ahead, columns) {
    const found = new Map();
    for (const row of method.tried) {
      const key = columns.map((column) => short(row[column])).join("\u0000");
      if (!found.has(key) || ahead(reached(method, row), found.get(key))) found.set(key, reached(method, row));
    }
    return found;
  }
  function valuesOf(methods, name) {
    const all = new Set();
    for (const method of methods) {
      const column = method.names.indexOf(name);
      if (column >= 0) for (const row of method.tried) all.add(row[column]);
    }
    return [...all].sort((a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(b)));
  }
  const severalValues = (method) => method.names.filter((name) => valuesOf([method], name).length > 1);

  // All charts of a section share one scale, so that slopes are comparable.
  function scoreAxis(section) {
    const all = finite(data[section].methods.flatMap((method) => method.tried.map((row) => row[method.names.length])));
    const log = spansDecades(section, all);
    const ends = [Math.min(...all), Math.max(...all)].map((end) => (log ? Math.log10(end) : end));
    const room = 0.06 * (ends[1] - ends[0]) || 0.05;
    const range = all.length ? { range: [ends[0] - room, ends[1] + room] } : {};
    return metricAxis(section, log, `mean ${noun(section)}`, range);
  }

  function sensitivity(element) {
    const section = sectionOf(element);
    const { metric, methods } = data[section];
    const able = new Map(methods.map((method) => [method, severalValues(method)]));
    const names = [...new Set([...able.values()].flat())];
    element.replaceChildren(...names.map((name) => {
      const ticks = valuesOf(methods.filter((method) => able.get(method).includes(name)), name).map((value) => plain(short(value)));
      const box = create("div", {
        class: "chart", role: "img", "data-name": name,
        "aria-label": `Chart: best ${metric} against ${worded(section, name)}; the table of all settings contains the numbers.`,
      });
      const lines = (method) => {
        const column = method.names.indexOf(name);
        const best = bestBy(method, isAhead(section), [column]);
        const own = valuesOf([method], name).map(short);
        return [{
          x: method.tried.map((row) => plain(short(row[column]))), y: method.tried.map((row) => row[method.names.length]),
          mode: "markers", hoverinfo: "skip", marker: { color: faint(colour(method), 0.28), size: 5 },
        }, {
          name: plain(method.name), x: own.map(plain), y: own.map((value) => best.get(value).score), mode: "lines+markers",
          line: { color: colour(method), width: 2, dash: method.dash },
          marker: { color: colour(method), size: 7, symbol: own.map((value) => (best.get(value).diverged ? "x" : "circle")) },
          customdata: own.map((value) => (best.get(value).diverged ? `, ${howMany(best.get(value))}` : "")),
          hovertemplate: "%{y:.4g}%{customdata}",
        }];
      };
      const traces = () => shown(section).filter((method) => able.get(method).includes(name)).flatMap(lines);
      chart(box, () => draw(box, traces(), {
        xaxis: axis({
          type: "category", categoryorder: "array", categoryarray: ticks, showgrid: false,
          title: { text: plain(worded(section, name)), standoff: 8 }, automargin: ticks.join("").length > 18,
          range: [-0.35, ticks.length - 0.65],
        }),
        yaxis: scoreAxis(section),
      }));
      return box;
    }));
  }

  // The heat map is a table with coloured cells: sharp at any size, and accessible to screen readers.
  function pairs(element) {
    const section = sectionOf(element);
    const pairsOf = (method) => severalValues(method).flatMap((one, i, all) => all.slice(i + 1).map((other) => [one, other]));
    const able = data[section].methods.filter((method) => pairsOf(method).length);
    element.hidden = !able.length;
    if (!able.length) return;
    const choice = chosen.get(`${section} pairs`) ?? { method: able[0].name, pair: 0 };
    const method = able.find((one) => one.name === choice.method) ?? able[0];
    const all = pairsOf(method);
    const at = Math.min(choice.pair, all.length - 1);
    const again = (change) => {
      chosen.set(`${section} pairs`, { ...choice, ...change });
      pairs(element);
    };
    replaceFields(element.querySelector(".choices"), [
      select("method", able.map((one) => one.name), able.indexOf(method), (i) => again({ method: able[i].name, pair: 0 })),
      select("pair", all.map((pair) => pair.map((name) => worded(section, name)).join(" × ")), at, (i) => again({ pair: i })),
    ]);
    // The hyperparameter with more values goes down the rows, because phones have more vertical space.
    const [down, across] = [...all[at]].sort((a, b) => valuesOf([method], b).length - valuesOf([method], a).length);
    element.querySelector(".heat").replaceChildren(heatMap(section, method, down, across));
  }
  function heatMap(section, method, down, across) {
    const [rows, columns] = [down, across].map((name) => valuesOf([method], name).map(short));
    const best = bestBy(method, isAhead(section), [down, across].map((name) => method.names.indexOf(name)));
    const scores = finite([...best.values()].map(({ score }) => score));
    const [low, high] = [Math.min(...scores), Math.max(...scores)];
    const top = [...best.values()].reduce((one, other) => (isAhead(section)(other, one) ? other : one));
    const isTop = (one) => !isAhead(section)(top, one);
    const { format } = data[section]; // the Python format of all scores: ".4f" or ".3e"
    const written = (score) => (format.endsWith("f") ? score.toFixed(format.slice(1, -1)) : score.toExponential(format.slice(1, -1)));
    const cell = (one) => {
      if (one === undefined) return create("td");
      if (one.score === null) return create("td", { class: "diverged" }, "diverged");
      const made = create("td", isTop(one) ? { class: "top" } : {}, written(one.score));
      if (one.diverged) made.append(create("small", {}, howMany(one)));
      made.style.setProperty("--share", `${Math.round((100 * (one.score - low)) / (high - low || 1))}%`);
      return made;
    };
    return create("table", {},
      create("caption", {}, `${method.name}: ${worded(section, down)} (down) × ${worded(section, across)} (across)`),
      create("thead", {}, create("tr", {}, create("td"), ...columns.map((x) => create("th", { scope: "col" }, x)))),
      create("tbody", {}, ...rows.map((y) => create("tr", {},
        create("th", { scope: "row" }, y), ...columns.map((x) => cell(best.get(`${y}\u0000${x}`)))))));
  }

  // --- Diagnostics: scalars as lines; histograms, one method at a time, as stacked areas.

  function looks(element) {
    const section = sectionOf(element);
    const seen = data[section].methods.filter((method) => method.inside.step);
    const names = [...new Set(seen.flatMap((method) => Object.keys(method.inside)))].filter((name) => name !== "step");
    const usual = names.includes("sample_plasticity") ? "sample_plasticity" : names[0];
    const box = element.querySelector(".chart");
    const current = () => {
      const choice = chosen.get(`${section} looks`) ?? {};
      const name = names.includes(choice.name) ? choice.name : usual;
      const able = seen.filter((method) => name in method.inside);
      const method = able.find((one) => one.name === choice.method) ?? able[0];
      return { name, able, method, histogram: Array.isArray(method.inside[name][0]) };
    };
    const choose = (change) => {
      chosen.set(`${section} looks`, { ...chosen.get(`${section} looks`), ...change });
      fields();
      redraw([box]);
    };
    const fields = () => {
      const { name, able, method, histogram } = current();
      const figure = select("diagnostic", names.map(spaced), names.indexOf(name), (i) => choose({ name: names[i] }));
      const whose = () => select("method", able.map((one) => one.name), able.indexOf(method), (i) => choose({ method: able[i].name }));
      const smooth = () => smoothing(`${section} looks`, method.inside.step).fields(() => redraw([box]));
      replaceFields(element.querySelector(".choices"), [figure, ...(histogram ? [whose()] : smooth())]);
    };
    fields();
    chart(box, () => {
      const { name, able, method, histogram } = current();
      const { width, words } = smoothing(`${section} looks`, method.inside.step);
      const lines = histogram ? shares(method, name) : shown(section).filter((one) => able.includes(one)).map((one) => ({
        name: plain(one.name), x: one.inside.step, y: smoothed(one.inside[name], width), mode: "lines+markers", hovertemplate: "%{y:.4g}",
        line: { color: colour(one), width: 2.2, dash: one.dash }, marker: { color: colour(one), size: 5 }, cliponaxis: false,
      }));
      const yaxis = histogram
        ? { title: { text: "share of gates" }, range: [0, 1], tickformat: ".0%" }
        : { title: { text: plain(spaced(name)) + words } };
      // The areas of a histogram are stacked, so the legend is stacked in the same order if there is room beside the chart.
      const beside = histogram && !narrow.matches;
      draw(box, lines, {
        xaxis: stepAxis(section), yaxis: axis({ automargin: true, ...yaxis }), showlegend: true,
        legend: {
          font: { color: tones.ink }, ...(histogram && { title: { text: "gate ū" } }),
          ...(beside ? { traceorder: "reversed" } : { orientation: "h", y: 1.02, yanchor: "bottom" }),
        },
      });
    });
  }
  // From purple through pale tones to orange: the side of ½ is visible at a glance, including to colour-blind readers.
  const TINTS = ["#3b0f70", "#5a2f9b", "#7a5fb8", "#a08fd0", "#cbc3e8", "#fddcab", "#fdb863", "#e88e1f", "#c0620a", "#8c3f06"];
  function shares(method, name) {
    const looks = method.inside[name];
    const bins = looks[0].length;
    const occurring = [...Array(bins).keys()].filter((i) => looks.some((look) => look[i] > 0));
    return occurring.map((i) => ({
      name: `${short(i / bins)}–${short((i + 1) / bins)}`, x: method.inside.step, stackgroup: "gates",
      y: looks.map((look) => look[i]), mode: "lines", line: { width: 0.8, color: tones.paper },
      fillcolor: TINTS[Math.floor(((i + 0.5) / bins) * TINTS.length)], hovertemplate: "%{y:.1%}",
    }));
  }

  // --- Buttons that select the methods shown in the charts of a section.

  function switches(box) {
    const section = sectionOf(box);
    const searched = box.dataset.only === "searched"; // next to charts of searched methods only
    const methods = data[section].methods.filter((method) => !searched || severalValues(method).length);
    const buttons = methods.map((method) => {
      const swatch = create("span", { class: `swatch ${method.dash}`, "aria-hidden": "true" });
      swatch.style.cssText = `--light: ${method.light}; --dark: ${method.dark}`;
      const button = create("button", { type: "button", "data-method": method.name, title: method.setting }, swatch, method.name);
      button.addEventListener("click", () => {
        const names = off(section);
        names.has(method.name) ? names.delete(method.name) : names.add(method.name);
        showSwitches(section);
      });
      return button;
    });
    if (buttons.length > 2 && !searched) {
      const all = create("button", { type: "button" });
      all.addEventListener("click", () => {
        const names = off(section);
        if (names.size) names.clear();
        else methods.forEach((method) => names.add(method.name));
        showSwitches(section);
      });
      buttons.push(all);
    }
    box.replaceChildren(...buttons);
    showSwitches(section);
  }
  function showSwitches(section) {
    for (const button of document.querySelectorAll(`#${section} .switches button`)) {
      const { method } = button.dataset;
      if (method === undefined) button.textContent = off(section).size ? "Show all" : "Hide all";
      else button.setAttribute("aria-pressed", !off(section).has(method));
    }
    redraw([...charts.keys()].filter((element) => sectionOf(element) === section));
  }

  // --- The page as a whole: initialization, theme changes and printing.

  const KINDS = { switches, curves, sensitivity, pairs, looks };
  function setUp() {
    watcher.disconnect();
    for (const known of [charts, stale, near]) known.clear();
    data = JSON.parse(document.getElementById("data").textContent);
    readTones();
    for (const element of document.querySelectorAll("[data-chart]")) KINDS[element.dataset.chart](element);
    if (!charts.size) document.body.dataset.drawn = "yes";
  }
  function inAnotherLook() {
    readTones();
    redraw();
  }
  let unfolded = []; // elements that were opened for printing
  function toPaper() {
    if (printing) return;
    printing = true;
    document.documentElement.classList.add("paper");
    unfolded = [...document.querySelectorAll("details.on-paper:not([open])")];
    for (const details of unfolded) details.open = true;
    readTones();
    charts.forEach((_, element) => drawOne(element));
  }
  function fromPaper() {
    if (!printing) return;
    printing = false;
    document.documentElement.classList.remove("paper");
    for (const details of unfolded) details.open = false;
    inAnotherLook();
  }
  dark.addEventListener("change", inAnotherLook);
  narrow.addEventListener("change", inAnotherLook);
  addEventListener("beforeprint", toPaper);
  addEventListener("afterprint", fromPaper);
  matchMedia("print").addEventListener("change", ({ matches }) => (matches ? toPaper() : fromPaper()));
  addEventListener("upgd: fresh", setUp);
  setUp();
})();
