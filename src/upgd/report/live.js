"use strict";
// Polls the local server for updates during a sweep and shows them. Open details and keyboard focus are preserved.
(() => {
  let version = document.getElementById("page").dataset.news; // version of the store that the page shows
  const say = (text) => { document.getElementById("news").textContent = text; };
  async function text(address) {
    const answer = await fetch(address, { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    return answer.text();
  }

  // Identifies an element of the page independently of its position and of numbers in its text.
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
  // Progress of the sweep. A killed sweep leaves its last status behind, so a stale status gets a warning.
  const LATE_S = 120;
  function showProgress(progress) {
    const bar = document.getElementById("sweep");
    bar.hidden = progress === null;
    if (progress === null) return;
    const { share, text, age } = progress;
    const late = age > LATE_S ? ` No update from the sweep for ${Math.round(age / 60)} min; it may have been stopped.` : "";
    bar.firstElementChild.value = share;
    bar.lastElementChild.textContent = `${Math.floor(100 * share)}%, ${text}.${late}`;
  }
  let last = "Live: this page follows the sweep. No updates since it was opened.";
  async function look() {
    try {
      showProgress(JSON.parse(await text("progress")));
      const latest = await text("news");
      if (latest !== version) {
        show(await text("content"));
        last = `Live: this page follows the sweep. Last update: ${new Date().toLocaleTimeString()}.`;
      }
      version = latest;
      say(last);
    } catch (error) {
      // fetch raises a TypeError if the server does not respond; other errors carry the server's message.
      say(error instanceof TypeError ? "The server has stopped; this page shows the last update." : error.message);
    }
    setTimeout(look, 2000);
  }
  look();
})();
