// Charts follow the page's theme and width.
(function () {
  "use strict";

  function theme() {
    const dark = document.documentElement.dataset.theme === "dark";
    return dark
      ? { text: "#ced6dd", grid: "rgba(206,214,221,0.16)", line: "#8b949e", hover: "#22272e" }
      : { text: "#323a45", grid: "rgba(50,58,69,0.14)", line: "#6b7480", hover: "#ffffff" };
  }

  function settings(chart, look) {
    const narrow = chart.clientWidth < 520;
    const update = {
      "font.color": look.text,
      "font.size": narrow ? 11 : 13,
      "hoverlabel.bgcolor": look.hover,
      "hoverlabel.font.color": look.text,
      "hoverlabel.font.size": narrow ? 11 : 13,
    };
    for (const key of Object.keys(chart._fullLayout)) {
      if (!/^[xy]axis\d*$/.test(key)) continue;
      update[key + ".gridcolor"] = look.grid;
      update[key + ".zerolinecolor"] = look.grid;
      update[key + ".linecolor"] = look.line;
    }
    return update;
  }

  function paint() {
    const look = theme();
    for (const chart of document.querySelectorAll(".js-plotly-plot")) {
      if (chart._fullLayout) window.Plotly.relayout(chart, settings(chart, look));
    }
  }

  function follow() {
    new MutationObserver(paint).observe(document.documentElement, {
      attributes: true,
      attributeFilter: ["data-theme"],
    });
    let wait = null; // the sidebar opens and closes without a window resize
    const observer = new ResizeObserver(function () {
      clearTimeout(wait);
      wait = setTimeout(function () {
        for (const chart of document.querySelectorAll(".js-plotly-plot")) {
          if (chart._fullLayout && chart.clientWidth) window.Plotly.Plots.resize(chart);
        }
        paint();
      }, 150);
    });
    for (const box of document.querySelectorAll(".kv-chart")) observer.observe(box);
    document.addEventListener("kv-content", function (event) { // a chart that another script has drawn
      if (!event.target._fullLayout) return;
      observer.observe(event.target.closest(".kv-chart"));
      window.Plotly.relayout(event.target, settings(event.target, theme()));
    });
  }

  document.addEventListener("DOMContentLoaded", function () {
    follow();
    paint();
  });
})();
