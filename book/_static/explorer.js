// The prompt explorer: one final prompt's text, each path's probability of every forced token, and where paths part.
(function () {
  "use strict";

  function make(tag, properties, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  }

  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const shown = (token) => token.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ /, "␣") || "∅";
  const fixed = (value, digits) => value.toFixed(digits).replace("-", "−");

  function table(head, rows, label) {
    const cell = function (value) {
      if (typeof value !== "object" || value === null) return make("td", { textContent: value ?? "–" });
      const made = make("td", { className: "kv-number", textContent: value.text });
      made.dataset.value = value.value;
      return made;
    };
    const top = make("tr", {}, ...head.map((name) => make("th", { scope: "col", textContent: name })));
    const body = rows.map((row) => make("tr", {}, ...row.map(cell)));
    const made = make("table", { className: "kv-numbers" }, make("thead", {}, top), make("tbody", {}, ...body));
    made.setAttribute("aria-label", label);
    return make("div", { className: "kv-scroll" }, made);
  }

  const numeric = (value, digits) => ({ value, text: fixed(value, digits) });

  // The first step, counted from one, at which the path's most likely token is not native's; 0 where there is none.
  const parting = (path) => path.said.findIndex((token) => token !== null) + 1;

  class Explorer {
    constructor(place) {
      this.data = JSON.parse(place.querySelector("script").textContent);
      this.handed = this.data.paths.filter((path) => path.id !== "native");
      this.prompt = this.select("Prompt", this.data.prompts.map((p, i) => [i, this.title(p)]));
      this.forcing = this.select("Forcing", this.data.forcings);
      this.forcing.parentElement.hidden = this.data.forcings.length < 2;
      const turn = (text, by) => make("button", { type: "button", textContent: text, onclick: () => this.turn(by) });
      const controls = make("div", { className: "kv-controls" });
      controls.append(this.prompt.parentElement, turn("‹ previous", -1), turn("next ›", 1), this.forcing.parentElement);
      this.said = make("p", { className: "kv-said" });
      this.said.setAttribute("aria-live", "polite");
      this.text = make("div", { className: "kv-prompt", tabIndex: 0 });
      this.text.setAttribute("role", "region");
      this.text.setAttribute("aria-label", "the prompt's text and the forced tokens");
      this.above = make("button", { type: "button", className: "kv-above", onclick: () => this.text.scrollTo(0, 0) });
      this.text.addEventListener("scroll", () => this.cue(), { passive: true });
      this.text.addEventListener("keydown", (event) => this.step(event));
      for (const kind of ["focusin", "mouseover"]) {
        this.text.addEventListener(kind, (event) => event.target.title && this.tell(event.target));
      }
      this.token = make("p", { className: "kv-token-said" });
      this.token.setAttribute("aria-live", "polite");
      this.broken = make("p", { className: "kv-caption" });
      this.broken.textContent =
        "� stands for a token that is a part of a character: some characters are written with several tokens, and no single one of them can be shown.";
      this.chart = make("div", { className: "kv-drawing" });
      const box = make("div", { className: "kv-chart" }, this.chart);
      box.setAttribute("role", "img");
      box.setAttribute("aria-label", "KL by step and probability of the forced token by path; the table below has the numbers");
      this.tables = make("div", {});
      place.replaceChildren(controls, this.said, this.above, this.text, this.broken, this.token, box, this.tables);
      this.fromAddress();
      addEventListener("hashchange", () => this.fromAddress());
    }

    title(prompt) {
      return prompt.prompt + " · " + prompt.article; // short enough for a phone; the figures stand below
    }

    select(label, options) {
      const made = make("select", { onchange: () => this.show(true) });
      made.append(...options.map(([value, text]) => make("option", { value, textContent: text })));
      make("label", {}, label + " ", made);
      return made;
    }

    turn(by) {
      const count = this.data.prompts.length;
      this.prompt.selectedIndex = (this.prompt.selectedIndex + by + count) % count;
      this.show(true);
    }

    fromAddress() {
      const asked = /^#prompt-(\d+)(?:-(\w+))?$/.exec(location.hash);
      const index = asked ? this.data.prompts.findIndex((p) => p.prompt === Number(asked[1])) : -1;
      if (index >= 0) this.prompt.selectedIndex = index;
      if (asked && this.data.forcings.some(([name]) => name === asked[2])) this.forcing.value = asked[2];
      this.show(false);
    }

    show(remember) {
      const prompt = this.data.prompts[this.prompt.selectedIndex];
      const forcing = prompt.forcing[this.forcing.value];
      if (remember) {
        history.replaceState(null, "", "#prompt-" + prompt.prompt + "-" + this.forcing.value);
      }
      const partings = this.handed.map((path) => path.label + ": " + (parting(forcing.paths[path.id]) || "nowhere"));
      this.said.textContent =
        "Prompt " + prompt.prompt + ", from “" + prompt.article + "”. First step at which a path parts from native: " +
        partings.join("; ") + ".";
      this.write(prompt, forcing);
      this.draw(forcing);
      this.list(forcing);
      this.tables.dispatchEvent(new CustomEvent("kv-content", { bubbles: true }));
    }

    // The prefix, then the forced tokens: underlined where a path would have said another, flagged where it first does.
    write(prompt, forcing) {
      const tokens = forcing.forced.map((token, step) => {
        const other = this.handed.filter((path) => forcing.paths[path.id].said[step] !== null);
        const chances = this.data.paths.map((path) => path.label + " " + fixed(forcing.paths[path.id].p[step], 3));
        const made = make("span", { className: "kv-token", textContent: token });
        made.tabIndex = step ? -1 : 0; // one stop for the tab key; arrows go from token to token
        made.title = "step " + (step + 1) + ", probability: " + chances.join(", ");
        const flags = other
          .filter((path) => parting(forcing.paths[path.id]) === step + 1)
          .map((path) => {
            const flag = make("small", { className: "kv-parting" });
            flag.textContent = path.glyph + " " + path.id + ": “" + shown(forcing.paths[path.id].said[step]) + "”";
            flag.style.setProperty("--path", path.colour);
            return flag;
          });
        if (other.length) made.classList.add("kv-differs");
        return [made, ...flags];
      });
      const prefix = make("span", { className: "kv-prefix", textContent: prompt.prefix });
      this.text.replaceChildren(prefix, make("span", { className: "kv-forced" }, ...tokens.flat()));
      this.text.scrollTop = this.text.scrollHeight;
      this.token.textContent = "Point at a token, or go to one with the tab key and on with the arrow keys, for every path's probability of it.";
      const cells = Object.values(forcing.paths).flatMap((path) => path.said);
      this.broken.hidden = ![...forcing.forced, ...forcing.native, ...cells].some((token) => token && token.includes("\ufffd"));
      this.cue();
    }

    // The box opens at its end, where the forced tokens are: say so as long as text is hidden above.
    cue() {
      const hidden = this.text.scrollTop > 1;
      this.above.disabled = !hidden;
      this.above.textContent = hidden ? "↑ the prompt begins above: to its beginning" : "the prompt from its beginning, then the forced tokens";
    }

    tell(token) {
      this.token.textContent = "“" + shown(token.textContent) + "”, " + token.title + ".";
    }

    step(event) {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by || !event.target.classList.contains("kv-token")) return;
      const tokens = Array.from(this.text.querySelectorAll(".kv-token"));
      const next = tokens[tokens.indexOf(event.target) + by];
      if (!next) return;
      event.preventDefault();
      event.target.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    }

    draw(forcing) {
      const figure = structuredClone(this.data.figure);
      const steps = forcing.forced.map((_, step) => step + 1);
      for (const trace of figure.data) {
        const [id, what] = trace.meta;
        const path = forcing.paths[id];
        trace.x = steps;
        trace.y = what === "kl" ? path.kl : path.p;
        trace.customdata = steps.map((_, i) => [forcing.forced[i], path.said[i] ?? forcing.native[i]].map(shown).map(escape));
      }
      const settings = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] };
      const layout = window.kvlib.dress(figure.layout, this.chart.clientWidth);
      window.kvlib.plotly().then((library) => {
        library.react(this.chart, figure.data, layout, settings);
        this.chart.dispatchEvent(new CustomEvent("kv-content", { bubbles: true }));
      });
    }

    list(forcing) {
      const paths = this.handed.map((path) => {
        const found = forcing.paths[path.id];
        const step = parting(found);
        const same = found.said.filter((token) => token === null).length;
        return [
          path.glyph + " " + path.label,
          numeric(mean(found.kl), 4),
          { value: same, text: same + " of " + found.said.length },
          step ? numeric(step, 0) : null,
          step ? shown(forcing.native[step - 1]) : null,
          step ? shown(found.said[step - 1]) : null,
        ];
      });
      const head = ["path", "mean KL (nats)", "native's token on", "parts at step", "native says", "the path says"];
      const columns = this.data.paths.flatMap((path) =>
        path.id === "native" ? ["p " + path.id] : ["p " + path.id, "KL " + path.id, path.id + " says"],
      );
      const steps = forcing.forced.map((token, i) => {
        const cells = this.data.paths.flatMap((path) => {
          const found = forcing.paths[path.id];
          const chance = numeric(found.p[i], 4);
          if (path.id === "native") return [chance];
          return [chance, numeric(found.kl[i], 4), found.said[i] === null ? null : shown(found.said[i])];
        });
        return [numeric(i + 1, 0), shown(token), shown(forcing.native[i]), ...cells];
      });
      const open = this.tables.querySelector("details")?.open ?? false;
      const summary = make("summary", { textContent: "Every step, every path" });
      const all = table(["step", "forced", "native says", ...columns], steps, "every step");
      const details = make("details", { className: "kv-details", open }, summary, all);
      this.tables.replaceChildren(table(head, paths, "where each path parts"), details);
    }
  }

  function escape(text) {
    return text.replace(/&/g, "&amp;").replace(/</g, "&lt;");
  }

  addEventListener("load", function () { // after the scripts that answer kv-content have begun
    for (const place of document.querySelectorAll(".kv-explorer")) new Explorer(place);
  });
})();
