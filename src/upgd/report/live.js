"use strict";
// While a sweep runs: asks this machine's server for news, and shows them. What was unfolded stays so, and the keyboard
// stays where it was.
(() => {
  let version = document.getElementById("page").dataset.news; // what the page was made from
  const say = (text) => { document.getElementById("news").textContent = text; };
  async function text(address) {
    const answer = await fetch(address, { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    return answer.text();
  }

  // Which part of the page it is, whatever comes before it and however much it counts.
  const place = (element) => [
    element.closest("section")?.id, element.closest("[data-only]")?.dataset.only, element.tagName, (element.closest("label")?.firstChild ?? element).textContent.replace(/\d[\d,]*/g, "#"),
  ].join(" ");
  const parts = () => [...document.querySelectorAll("#page :is(summary, button, select, a)")];

  function show(fresh) {
    const open = new Set([...document.querySelectorAll("details[open] > summary")].map(place));
    const focused = parts().includes(document.activeElement) && place(document.activeElement);
    const at = scrollY;
    document.querySelectorAll(".js-plotly-plot").forEach((chart) => Plotly.purge(chart));
    document.getElementById("page").innerHTML = fresh;
    document.querySelectorAll("summary").forEach((summary) => { summary.parentElement.open = open.has(place(summary)); });
    dispatchEvent(new Event("upgd: fresh"));
    if (focused) parts().find((element) => place(element) === focused)?.focus({ preventScroll: true });
    scrollTo({ top: at, behavior: "instant" });
  }
  // How far the sweep is. One that was killed leaves its last words; how old they are says so.
  const LATE_S = 120;
  function showProgress(progress) {
    const bar = document.getElementById("sweep");
    bar.hidden = progress === null;
    if (progress === null) return;
    const { share, text, age } = progress;
    const late = age > LATE_S ? ` No sign of the sweep for ${Math.round(age / 60)} min: it may have been stopped.` : "";
    bar.firstElementChild.value = share;
    bar.lastElementChild.textContent = `${Math.floor(100 * share)} %, ${text}.${late}`;
  }
  let last = "Live: this page follows the sweep; no news since it was opened.";
  async function look() {
    try {
      showProgress(JSON.parse(await text("progress")));
      const latest = await text("news");
      if (latest !== version) {
        show(await text("content"));
        last = `Live: this page follows the sweep; the last news came at ${new Date().toLocaleTimeString()}.`;
      }
      version = latest;
      say(last);
    } catch (error) {
      // A TypeError is what fetch says when nobody answers; anything else is the server's own sentence.
      say(error instanceof TypeError ? "The server has stopped; this is the last that it showed." : error.message);
    }
    setTimeout(look, 2000);
  }
  look();
})();
