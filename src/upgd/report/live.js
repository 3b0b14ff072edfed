"use strict";
// While a sweep runs: asks this machine's server for news, and shows them. What was unfolded stays so.
(() => {
  let version = document.getElementById("page").dataset.news; // what the page was made from
  const say = (text) => { document.getElementById("news").textContent = text; };
  async function text(address) {
    const answer = await fetch(address, { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    return answer.text();
  }

  function show(fresh) {
    const open = [...document.querySelectorAll("details")].map((details) => details.open);
    const at = scrollY;
    document.querySelectorAll(".js-plotly-plot").forEach((chart) => Plotly.purge(chart));
    document.getElementById("page").innerHTML = fresh;
    document.querySelectorAll("details").forEach((details, i) => { details.open = open[i] ?? false; });
    dispatchEvent(new Event("upgd: fresh"));
    scrollTo({ top: at, behavior: "instant" });
  }
  async function look() {
    try {
      const latest = await text("news");
      if (latest !== version) show(await text("content"));
      version = latest;
      say("Live: this page follows the sweep.");
    } catch (error) {
      // A TypeError is what fetch says when nobody answers; anything else is the server's own sentence.
      say(error instanceof TypeError ? "The server has stopped; this is the last that it showed." : error.message);
    }
    setTimeout(look, 2000);
  }
  look();
})();
