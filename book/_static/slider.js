// A chart's slider becomes the page's own, which the keyboard and screen readers can move.
(function () {
  "use strict";
  const SLIDER_PX = 104; // of a chart's height, which Plotly's own slider takes

  function replace(chart, layout) {
    const slider = layout.sliders[0];
    const input = Object.assign(document.createElement("input"), {
      type: "range", min: 0, max: slider.steps.length - 1, step: 1, value: slider.active,
    });
    const output = document.createElement("output");
    const label = document.createElement("label");
    label.className = "kv-slider";
    label.append(output, input);
    const move = function () {
      const step = slider.steps[input.value];
      const words = slider.currentvalue.prefix + step.label + slider.currentvalue.suffix;
      output.textContent = words;
      input.setAttribute("aria-valuetext", words);
      return step;
    };
    input.addEventListener("input", function () {
      const step = move();
      window.Plotly[step.method](chart, ...structuredClone(step.args));
    });
    move();
    chart.closest(".kv-chart").after(label);
    chart.style.height = layout.height - SLIDER_PX + "px";
    delete layout.sliders;
    delete layout.height; // as its box is now
  }

  document.addEventListener("kv-figure", function (event) { // a chart that is about to be drawn
    const layout = event.detail.layout;
    if (layout.sliders && layout.sliders.length) replace(event.target, layout);
  });
})();
