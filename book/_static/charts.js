// Charts are drawn as the page's theme and width have them, the first in view before any other, and follow both.
(function () {
  "use strict";
  const NARROW_PX = 520;

  // The library, which the page's head has begun to load.
  function plotly() {
    return window.Plotly
      ? Promise.resolve(window.Plotly)
      : new Promise(function (resolve) {
          document.getElementById("kv-plotly").addEventListener("load", () => resolve(window.Plotly));
        });
  }

  function theme() {
    const dark = document.documentElement.dataset.theme === "dark";
    return dark
      ? { text: "#ced6dd", grid: "rgba(206,214,221,0.16)", line: "#8b949e", hover: "#22272e" }
      : { text: "#323a45", grid: "rgba(50,58,69,0.14)", line: "#6b7480", hover: "#ffffff" };
  }

  // What the theme and the width ask of a layout, by Plotly's dotted names.
  function settings(layout, width, look) {
    const size = width < NARROW_PX ? 11 : 13;
    const update = {
      "font.color": look.text,
      "font.size": size,
      "hoverlabel.bgcolor": look.hover,
      "hoverlabel.font.color": look.text,
      "hoverlabel.font.size": size,
    };
    for (const key of Object.keys(layout)) {
      if (!/^[xy]axis\d*$/.test(key)) continue;
      update[key + ".gridcolor"] = look.grid;
      update[key + ".zerolinecolor"] = look.grid;
      update[key + ".linecolor"] = look.line;
    }
    return update;
  }

  function dress(layout, width) {
    for (const [name, value] of Object.entries(settings(layout, width, theme()))) {
      const parts = name.split(".");
      const last = parts.pop();
      parts.reduce((inner, part) => (inner[part] = inner[part] || {}), layout)[last] = value;
    }
    return layout;
  }

  function paint(chart) {
    if (chart._fullLayout) window.Plotly.relayout(chart, settings(chart._fullLayout, chart.clientWidth, theme()));
  }

  const drawn = () => Array.from(document.querySelectorAll(".js-plotly-plot"));

  function draw(place, library) {
    const figure = JSON.parse(place.closest(".kv-chart").querySelector(".kv-figure").textContent);
    // another script may take a part of the figure over before it is drawn
    place.dispatchEvent(new CustomEvent("kv-figure", { bubbles: true, detail: figure }));
    library.newPlot(place, figure.data, dress(figure.layout, place.clientWidth), figure.config);
  }

  function inView(place) {
    const box = place.getBoundingClientRect();
    return box.bottom > 0 && box.top < innerHeight;
  }

  async function drawAll() {
    const places = Array.from(document.querySelectorAll(".plotly-graph-div"));
    if (!places.length) return;
    const library = await plotly();
    (function next() {
      if (!places.length) return;
      const [place] = places.splice(Math.max(0, places.findIndex(inView)), 1); // none in view: in the page's order
      draw(place, library);
      setTimeout(next, 0); // the browser shows what there is before it draws more
    })();
  }

  function follow() {
    new MutationObserver(() => drawn().forEach(paint)).observe(document.documentElement, {
      attributes: true,
      attributeFilter: ["data-theme"],
    });
    const widths = new WeakMap(), changed = new Set();
    let wait = null; // the sidebar opens and closes without a window resize
    const observer = new ResizeObserver(function (entries) {
      for (const { target } of entries) {
        if (widths.has(target) && widths.get(target) !== target.clientWidth) changed.add(target);
        widths.set(target, target.clientWidth);
      }
      if (!changed.size) return;
      clearTimeout(wait);
      wait = setTimeout(function () {
        for (const box of changed) {
          const chart = box.querySelector(".js-plotly-plot");
          if (!chart || !chart._fullLayout || !chart.clientWidth) continue;
          window.Plotly.Plots.resize(chart);
          paint(chart);
        }
        changed.clear();
      }, 150);
    });
    for (const box of document.querySelectorAll(".kv-chart")) observer.observe(box);
    document.addEventListener("kv-content", function (event) { // a chart that another script has drawn
      if (event.target._fullLayout) observer.observe(event.target.closest(".kv-chart"));
    });
  }

  window.kvlib = { plotly, dress };
  document.addEventListener("DOMContentLoaded", function () {
    follow();
    drawAll();
  });
})();
