// The book as one page for the printer: small tables are unfolded, large ones give way to where they are to be found.
(function () {
  "use strict";
  const MOST_ROWS = 24;
  const MOST_COLUMNS = 10;

  document.addEventListener("DOMContentLoaded", function () {
    for (const details of document.querySelectorAll("details.kv-details")) {
      const rows = details.querySelectorAll("tbody tr").length;
      const columns = details.querySelectorAll("thead th").length;
      if (rows <= MOST_ROWS && columns <= MOST_COLUMNS) {
        details.open = true;
        continue;
      }
      const note = document.createElement("p");
      const source = details.querySelector("summary span");
      note.className = "kv-left-out";
      note.textContent = "The numbers: " + rows + " rows of " + columns + ", in the book's pages " + (source ? source.textContent : "");
      details.replaceWith(note);
    }
  });

  window.addEventListener("load", function () {
    const charts = Array.from(document.querySelectorAll(".plotly-graph-div"));
    const said = document.createElement("p");
    said.className = "kv-left-out";
    document.querySelector(".bd-article").append(said);
    (function look() {
      const drawn = charts.filter((chart) => chart.querySelector(".main-svg")).length;
      said.textContent = drawn + " of " + charts.length + " charts are drawn in this file.";
      if (drawn < charts.length) setTimeout(look, 100);
    })();
  });
})();
