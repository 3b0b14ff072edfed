"use strict";
// Draws the charts from the data in the page, in the colours of the reader's theme, and switches methods on and off.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 620px)");
  const hidden = new Map(); // section → names of the methods that are switched off
  const chosen = new Map(); // chart → what its reader has chosen
  let data = {};
  let printing = false;

  const colour = (method) => (dark.matches && !printing ? method.dark : method.light);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // Plotly reads text as a kind of HTML; names are text.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const off = (section) => hidden.get(section) ?? hidden.set(section, new Set()).get(section);
  const shown = (section) => data[section].methods.filter((method) => !off(section).has(method.name));
  const short = (value) => (typeof value === "number" ? String(Number(value.toPrecision(4))) : String(value));
  const faint = (hex, share) => hex + Math.round(share * 255).toString(16).padStart(2, "0");
  const create = (tag, attributes = {}, text = "") => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    return element;
  };

  const layout = (extra) => ({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, autosize: true,
    font: { family: "system-ui, sans-serif", size: narrow.matches ? 11 : 13, color: css("--soft") },
    margin: { l: 52, r: 14, t: 10, b: 44 },
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") }, namelength: -1 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--accent") },
    ...extra,
  });
  const axis = (extra) => ({
    gridcolor: css("--grid"), linecolor: css("--line"), zerolinecolor: css("--grid"), automargin: true, ...extra,
  });
  const options = {
    responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
    displayModeBar: "hover",
  };
  const draw = (element, traces, extra) => Plotly.react(element, traces, layout(extra), options);

  function spansDecades(section) {
    const all = data[section].methods.flatMap((method) => method.y).filter((value) => value !== null);
    return data[section].metric === "loss" && Math.min(...all) > 0 && Math.max(...all) > 30 * Math.min(...all);
  }

  function curves(element) {
    const section = element.dataset.of;
    const traces = shown(section).flatMap((method) => {
      const tint = colour(method);
      const line = {
        name: plain(method.name), x: method.x, y: method.y, mode: method.x.length > 1 ? "lines" : "markers",
        line: { color: tint, width: 2.4, dash: method.dash }, marker: { color: tint, size: 8 },
        hovertemplate: "%{y:.4g}",
      };
      if (method.seeds < 3) return [line]; // two seeds say next to nothing about the spread
      const band = {
        x: [...method.x, ...[...method.x].reverse()], y: [...method.high, ...[...method.low].reverse()],
        fill: "toself", fillcolor: faint(tint, 0.16), line: { width: 0 }, mode: "lines", hoverinfo: "skip",
      };
      return [band, line];
    });
    draw(element, traces, {
      hovermode: "x unified",
      xaxis: axis({ title: { text: "step" }, range: [0, data[section].steps], showgrid: false, hoverformat: ",d" }),
      yaxis: axis({ type: spansDecades(section) ? "log" : "linear" }),
    });
  }

  // The best score for each value of a hyperparameter, or each pair of values of two.
  function bestBy(method, metric, columns) {
    const better = metric === "accuracy" ? (a, b) => a > b : (a, b) => a < b;
    const found = new Map();
    for (const row of method.tried) {
      const key = columns.map((column) => short(row[column])).join("\u0000");
      const score = row[method.names.length];
      const before = found.get(key);
      if (before === undefined || before === null || (score !== null && better(score, before))) found.set(key, score);
    }
    return found;
  }
  function values(methods, name) {
    const all = new Set();
    for (const method of methods) {
      const column = method.names.indexOf(name);
      if (column >= 0) for (const row of method.tried) all.add(row[column]);
    }
    return [...all].sort((a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(b)));
  }
  const severalValues = (method) => method.names.filter((name) => values([method], name).length > 1);

  const WORDS = {
    lr: "learning rate", beta_utility: "β, memory of utility", sigma: "σ, perturbation", weight_decay: "weight decay",
    betas: "AdamW's β₁/β₂", eps: "AdamW's ε",
  };
  const worded = (name) => WORDS[name] ?? name;

  function sensitivity(element) {
    const section = element.dataset.of;
    const { metric, methods } = data[section];
    const names = [...new Set(methods.flatMap(severalValues))];
    element.replaceChildren(...names.map((name) => create("div", {
      class: "chart", role: "img", "data-name": name,
      "aria-label": `Chart: best ${metric} against ${worded(name)}; the table of all settings has the numbers.`,
    })));
    for (const chart of element.children) {
      const name = chart.dataset.name;
      const ticks = values(methods, name).map((value) => plain(short(value)));
      const traces = shown(section).filter((method) => severalValues(method).includes(name)).flatMap((method) => {
        const column = method.names.indexOf(name);
        const best = bestBy(method, metric, [column]);
        const own = values([method], name).map(short);
        const all = method.tried.map((row) => [plain(short(row[column])), row[method.names.length]]);
        return [{
          x: all.map(([x]) => x), y: all.map(([, y]) => y), mode: "markers", hoverinfo: "skip",
          marker: { color: faint(colour(method), 0.28), size: 5 },
        }, {
          name: plain(method.name), x: own.map(plain), y: own.map((value) => best.get(value)), mode: "lines+markers",
          line: { color: colour(method), width: 2, dash: method.dash }, marker: { color: colour(method), size: 7 },
          hovertemplate: "%{y:.4g}",
        }];
      });
      draw(chart, traces, {
        hovermode: "x unified", margin: { l: 48, r: 8, t: 8, b: 44 },
        xaxis: axis({ type: "category", categoryorder: "array", categoryarray: ticks, title: { text: plain(worded(name)) }, showgrid: false }),
        yaxis: axis({ type: spansDecades(section) ? "log" : "linear" }),
      });
    }
  }

  const pairsOf = (method) => {
    const names = severalValues(method);
    return names.flatMap((one, i) => names.slice(i + 1).map((other) => [one, other]));
  };
  function select(label, entries, current, onChange) {
    const field = create("select");
    entries.forEach((entry, i) => field.append(create("option", { value: i }, entry)));
    field.value = current;
    field.addEventListener("change", () => onChange(Number(field.value)));
    const whole = create("label", {}, label);
    whole.append(field);
    return whole;
  }
  function pairs(element) {
    const section = element.dataset.of;
    const able = data[section].methods.filter((method) => pairsOf(method).length);
    element.hidden = !able.length;
    if (!able.length) return;
    const choice = chosen.get(section) ?? { method: 0, pair: 0 };
    const method = able[choice.method] ?? able[0];
    const all = pairsOf(method);
    const [across, up] = all[choice.pair] ?? all[0];
    const again = (change) => {
      chosen.set(section, { ...choice, ...change });
      pairs(element);
    };
    const box = element.querySelector(".choices");
    const focused = [...box.querySelectorAll("select")].indexOf(document.activeElement);
    box.replaceChildren(
      select("method", able.map((one) => one.name), able.indexOf(method), (i) => again({ method: i, pair: 0 })),
      select("pair", all.map((pair) => pair.map(worded).join(" × ")), Math.max(0, all.findIndex(([a, b]) => a === across && b === up)), (i) => again({ pair: i })),
    );
    if (focused >= 0) box.querySelectorAll("select")[focused].focus();
    const [xs, ys] = [across, up].map((name) => values([method], name).map(short));
    const best = bestBy(method, data[section].metric, [method.names.indexOf(across), method.names.indexOf(up)]);
    const z = ys.map((y) => xs.map((x) => best.get(`${x}\u0000${y}`) ?? null));
    const text = ys.map((y) => xs.map((x) => {
      const score = best.get(`${x}\u0000${y}`);
      return score === undefined ? "" : score === null ? "diverged" : score.toPrecision(3);
    }));
    draw(element.querySelector(".chart"), [{
      type: "heatmap", x: xs.map(plain), y: ys.map(plain), z, text, texttemplate: "%{text}", xgap: 3, ygap: 3,
      colorscale: [[0, css("--cold")], [1, css("--warm")]], textfont: { color: css("--ink") }, reversescale: data[section].metric === "loss", showscale: false,
      hovertemplate: `${plain(worded(across))} %{x}<br>${plain(worded(up))} %{y}<br>%{text}<extra></extra>`,
    }], {
      xaxis: axis({ type: "category", title: { text: plain(worded(across)) }, showgrid: false }),
      yaxis: axis({ type: "category", title: { text: plain(worded(up)) }, showgrid: false }),
    });
  }

  // Figures from inside the learners: numbers as lines; histograms, one method at a time, as heat maps.
  function looks(element) {
    const section = element.dataset.of;
    const seen = data[section].methods.filter((method) => method.inside.step);
    const names = [...new Set(seen.flatMap((method) => Object.keys(method.inside)))].filter((name) => name !== "step");
    const choice = chosen.get(`${section} looks`) ?? { name: Math.max(0, names.indexOf("sample_plasticity")), method: 0 };
    const again = (change) => {
      chosen.set(`${section} looks`, { ...choice, ...change });
      looks(element);
    };
    const name = names[choice.name] ?? names[0];
    const able = seen.filter((method) => name in method.inside);
    const method = able[choice.method] ?? able[0];
    const histogram = Array.isArray(method.inside[name][0]);
    const box = element.querySelector(".choices");
    const focused = [...box.querySelectorAll("select")].indexOf(document.activeElement);
    const fields = [select("figure", names, names.indexOf(name), (i) => again({ name: i }))];
    if (histogram) fields.push(select("method", able.map((one) => one.name), able.indexOf(method), (i) => again({ method: i })));
    box.replaceChildren(...fields);
    if (focused >= 0) box.querySelectorAll("select")[Math.min(focused, fields.length - 1)].focus();
    const xaxis = axis({ title: { text: "step" }, range: [0, data[section].steps], showgrid: false, hoverformat: ",d" });
    const chart = element.querySelector(".chart");
    if (!histogram) {
      const lines = shown(section).filter((one) => able.includes(one)).map((one) => ({
        name: plain(one.name), x: one.inside.step, y: one.inside[name], mode: "lines+markers", hovertemplate: "%{y:.4g}",
        line: { color: colour(one), width: 2.2, dash: one.dash }, marker: { color: colour(one), size: 5 },
      }));
      draw(chart, lines, { hovermode: "x unified", xaxis, yaxis: axis({}) });
      return;
    }
    const bins = method.inside[name][0].length;
    draw(chart, [{
      type: "heatmap", x: method.inside.step, y: [...Array(bins).keys()].map((i) => (i + 0.5) / bins),
      z: [...Array(bins).keys()].map((i) => method.inside[name].map((shares) => shares[i])), showscale: false,
      colorscale: [[0, css("--cold")], [1, css("--warm")]],
      hovertemplate: "step %{x:,d}<br>gate %{y:.2f}<br>share %{z:.3f}<extra></extra>",
    }], { xaxis, yaxis: axis({ title: { text: "gate ū" }, range: [0, 1] }) });
  }

  const DASHES = { solid: "", dash: "5 3", longdash: "9 3", dot: "2 2", dashdot: "6 2 2 2" };
  function switches(box) {
    const section = box.dataset.of;
    const buttons = data[section].methods.map((method) => {
      const button = create("button", { type: "button", "aria-pressed": !off(section).has(method.name), title: method.setting });
      button.innerHTML = `<svg width="26" height="8" aria-hidden="true"><line x1="1" y1="4" x2="25" y2="4" stroke="${colour(method)}" stroke-width="3" stroke-dasharray="${DASHES[method.dash] ?? ""}"/></svg>`;
      button.append(method.name);
      button.addEventListener("click", () => {
        const names = off(section);
        names.has(method.name) ? names.delete(method.name) : names.add(method.name);
        button.setAttribute("aria-pressed", !names.has(method.name));
        drawSection(section);
      });
      return button;
    });
    if (buttons.length > 2) {
      const all = create("button", { type: "button" }, off(section).size ? "Show all" : "Hide all");
      all.addEventListener("click", () => {
        const names = off(section);
        names.size ? names.clear() : data[section].methods.forEach((method) => names.add(method.name));
        switches(box);
        box.lastElementChild.focus();
        drawSection(section);
      });
      buttons.push(all);
    }
    box.replaceChildren(...buttons);
  }

  const KINDS = { curves, sensitivity, pairs, looks };
  function drawSection(section) {
    for (const element of document.querySelectorAll(`[data-chart][data-of="${section}"]`)) KINDS[element.dataset.chart](element);
  }
  // One section at a time: the page answers while it draws.
  let turn = 0;
  function drawAll(now = false) {
    const mine = ++turn;
    const left = Object.keys(data);
    for (const box of document.querySelectorAll(".switches")) switches(box);
    const next = () => {
      const section = left.shift();
      if (mine !== turn) return;
      if (section === undefined) {
        document.body.dataset.drawn = "yes";
        return;
      }
      drawSection(section);
      now ? next() : setTimeout(next);
    };
    next();
  }
  function load() {
    data = JSON.parse(document.getElementById("data").textContent);
    drawAll();
  }

  dark.addEventListener("change", () => drawAll());
  narrow.addEventListener("change", () => drawAll());
  addEventListener("beforeprint", () => {
    printing = true;
    document.querySelectorAll("details").forEach((details) => { details.open = true; });
    drawAll(true);
  });
  addEventListener("afterprint", () => {
    printing = false;
    drawAll();
  });
  load();

  if (document.body.dataset.live === "yes") {
    let version = null;
    const news = (text) => { document.getElementById("news").textContent = text; };
    const look = async () => {
      try {
        const answer = await fetch("news", { cache: "no-store" });
        const latest = await answer.text();
        if (version !== null && latest !== version) {
          const fresh = await (await fetch("content", { cache: "no-store" })).text();
          const open = [...document.querySelectorAll("details")].map((details) => details.open);
          const at = scrollY;
          document.querySelectorAll(".js-plotly-plot").forEach((chart) => Plotly.purge(chart));
          document.getElementById("page").innerHTML = fresh;
          document.querySelectorAll("details").forEach((details, i) => { details.open = open[i] ?? false; });
          scrollTo({ top: at, behavior: "instant" });
          load();
        }
        version = latest;
        news("Live: this page follows the sweep.");
      } catch {
        news("The server has stopped; this is the last that it showed.");
      }
      setTimeout(look, 2000);
    };
    look();
  }
})();
