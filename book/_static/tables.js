// Every table of numbers can be sorted by any column and downloaded as CSV.
(function () {
  "use strict";
  const UNITS = { ms: 0.001, s: 1, min: 60, h: 3600, B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30 };
  const MEASURE = /(\d[\d.,]*) ?(ms|min|s|h|B|KiB|MiB|GiB)\b/;
  const MEASURES = new RegExp("^[+-]?" + MEASURE.source + "( " + MEASURE.source + ")*$");

  // A number as readers see it (−1,234.5 ± 0.1, 82.5 %, 1.2e−05, 8 of 64, 3 min 20 s); NaN for anything else.
  function parse(text) {
    const plain = text.replace(/[\s\u00a0\u2009\u202f]+/g, " ").replace(/\u2212/g, "-").trim();
    if (/^[+-]?∞/.test(plain)) return plain.startsWith("-") ? -Infinity : Infinity;
    if (MEASURES.test(plain)) {
      const parts = Array.from(plain.matchAll(new RegExp(MEASURE, "g")));
      const sum = parts.reduce((all, [, size, unit]) => all + Number(size.replace(/,/g, "")) * UNITS[unit], 0);
      return plain.startsWith("-") ? -sum : sum;
    }
    const found = /^[+-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?(?![\w.:-])/i.exec(plain);
    return found ? Number(found[0].replace(/,/g, "")) : NaN;
  }

  function number(cell) {
    return cell.dataset.value === undefined ? parse(cell.textContent) : Number(cell.dataset.value);
  }

  function isAbsent(cell) {
    return /^[–-]?$/.test(cell.textContent.trim());
  }

  // How two cells of a column compare: as numbers where at least half of what is there are numbers.
  function order(cells) {
    const there = cells.filter((cell) => !isAbsent(cell));
    const numeric = there.filter((cell) => !Number.isNaN(number(cell))).length * 2 >= there.length;
    const last = (cell) => isAbsent(cell) || (numeric && Number.isNaN(number(cell)));
    return function (a, b, sign) {
      if (last(a) || last(b)) return last(a) - last(b); // in either direction
      if (!numeric) return a.textContent.localeCompare(b.textContent, "en", { numeric: true }) * sign;
      const [x, y] = [number(a), number(b)];
      return x === y ? 0 : (x < y ? -1 : 1) * sign;
    };
  }

  function sortable(table) {
    const heads = Array.from(table.tHead.rows[0].cells);
    const body = table.tBodies[0];
    const original = Array.from(body.rows);
    const next = { ascending: "descending", descending: "none", none: "ascending" };
    heads.forEach(function (head, column) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "kv-sort";
      button.title = "sort by this column";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", function () {
        const direction = next[head.getAttribute("aria-sort") || "none"];
        for (const other of heads) other.removeAttribute("aria-sort");
        if (direction === "none") return body.append(...original);
        head.setAttribute("aria-sort", direction);
        const compare = order(original.map((row) => row.cells[column]));
        const sign = direction === "ascending" ? 1 : -1;
        body.append(...original.slice().sort((a, b) => compare(a.cells[column], b.cells[column], sign)));
      });
    });
  }

  function csv(table) {
    const quote = (text) => (/[",\n\r]/.test(text) ? '"' + text.replace(/"/g, '""') + '"' : text);
    const written = (cell) => quote(String(cell.dataset.value ?? (isAbsent(cell) ? "" : cell.textContent.trim())));
    return Array.from(table.rows, (row) => Array.from(row.cells, written).join(",") + "\n").join("");
  }

  function downloadable(table) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "kv-download";
    button.textContent = "Download as CSV";
    button.addEventListener("click", function () {
      const page = location.pathname.split("/").pop().replace(/\.html$/, "") || "index";
      const place = Array.from(document.querySelectorAll("table.kv-numbers")).indexOf(table) + 1;
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([csv(table)], { type: "text/csv;charset=utf-8" }));
      link.download = page + "-" + place + ".csv";
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
    (table.closest(".kv-scroll") || table).after(button);
  }

  function reachable(scroll) {
    scroll.tabIndex = 0; // so that the keyboard can scroll a wide table
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", "table");
    const hint = Object.assign(document.createElement("p"), { className: "kv-more", textContent: "↔ scroll sideways for more columns" });
    scroll.before(hint);
    hint.setAttribute("aria-hidden", "true"); // a screen reader reads every column
    const look = function () { // which edges hide something
      const right = scroll.scrollWidth - scroll.clientWidth - scroll.scrollLeft;
      hint.hidden = scroll.scrollWidth - scroll.clientWidth < 2;
      scroll.dataset.more = (scroll.scrollLeft > 1 ? "left " : "") + (right > 1 ? "right" : "");
    };
    scroll.addEventListener("scroll", look, { passive: true });
    new ResizeObserver(look).observe(scroll); // and once at the beginning
  }

  function enhance(root) {
    for (const table of root.querySelectorAll("table.kv-numbers:not([data-ready])")) {
      table.dataset.ready = "";
      sortable(table);
      downloadable(table);
    }
    root.querySelectorAll(".kv-scroll:not([role])").forEach(reachable);
  }

  document.addEventListener("DOMContentLoaded", () => enhance(document));
  document.addEventListener("kv-content", (event) => enhance(event.target)); // what another script has added
})();
