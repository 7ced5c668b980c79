// Charts follow the page's theme and width, and tables can be sorted and downloaded.
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
  }

  function value(cell) {
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  }

  function compare(a, b) {
    const absent = (v) => v === "–" || v === "" || Number.isNaN(v);
    if (absent(a) || absent(b)) return absent(a) - absent(b);
    return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  }

  function sortable(table) {
    const heads = table.tHead.rows[0].cells;
    Array.from(heads).forEach(function (head, column) {
      const sort = function () {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = Array.from(table.tBodies[0].rows);
        rows.sort((a, b) => compare(value(a.cells[column]), value(b.cells[column])) * (down ? -1 : 1));
        table.tBodies[0].append(...rows);
      };
      head.tabIndex = 0;
      head.title = "sort by this column";
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          sort();
        }
      });
    });
  }

  function csv(table) {
    const quote = (text) => (/[",\n]/.test(text) ? '"' + text.replace(/"/g, '""') + '"' : text);
    return Array.from(table.rows)
      .map((row) => Array.from(row.cells).map((c) => quote(String(c.dataset.value ?? c.textContent))).join(","))
      .join("\n");
  }

  function downloadable(details, number) {
    const table = details.querySelector("table");
    const button = document.createElement("button");
    button.type = "button";
    button.className = "kv-download";
    button.textContent = "Download as CSV";
    button.addEventListener("click", function () {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([csv(table) + "\n"], { type: "text/csv" }));
      link.download = document.title.split("—")[0].trim().replace(/\W+/g, "-").toLowerCase() + "-" + (number + 1) + ".csv";
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
    details.append(button);
  }

  document.addEventListener("DOMContentLoaded", function () {
    document.querySelectorAll("table.kv-numbers").forEach(sortable);
    document.querySelectorAll("details.kv-details").forEach(downloadable);
    if (document.querySelector(".kv-chart")) {
      paint();
      follow();
    }
  });
})();
