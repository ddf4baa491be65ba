// Draws the figures of a report. What was drawn and what went wrong is written on the root element, where tests (and
// whoever saves the page) find it: data-figures, data-drawn, data-errors.
"use strict";
(() => {
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = () => window.innerWidth < 640;

  const OPTIONS = {
    responsive: true,
    displaylogo: false,
    showSendToCloud: false, // plotly.js would offer to upload the figure
    plotlyServerURL: "",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };

  function colors() {
    const style = getComputedStyle(root);
    const [ink, line, paper] = ["--ink", "--line", "--paper"].map((name) => style.getPropertyValue(name).trim());
    return { ink, line, paper };
  }

  // The page's colors as changes to a layout: plotly.js knows nothing of style sheets.
  function themed(layout) {
    const { ink, line, paper } = colors();
    const changes = { paper_bgcolor: paper, plot_bgcolor: paper, "font.color": ink, "hoverlabel.font.color": "#fff" };
    for (const key of Object.keys(layout)) {
      const axes = /^[xy]axis/.test(key) ? [key] : /^scene/.test(key) ? ["x", "y", "z"].map((a) => `${key}.${a}axis`) : [];
      for (const axis of axes) {
        Object.assign(changes, { [`${axis}.gridcolor`]: line, [`${axis}.zerolinecolor`]: line, [`${axis}.linecolor`]: line });
      }
    }
    return changes;
  }

  // Landscapes are compared from one point of view: who turns one turns all.
  function turnTogether(plot, scenes) {
    let turning = false;
    plot.on("plotly_relayout", (change) => {
      const turned = scenes.find((scene) => change[`${scene}.camera`]);
      if (turning || !turned) return;
      turning = true;
      const others = scenes.filter((scene) => scene !== turned).map((scene) => [`${scene}.camera`, change[`${turned}.camera`]]);
      Plotly.relayout(plot, Object.fromEntries(others)).finally(() => { turning = false; });
    });
  }

  async function draw(figure) {
    const plot = figure.querySelector(".plot");
    const { data, layout, narrow: changes } = JSON.parse(figure.querySelector("script").textContent);
    const scenes = Object.keys(layout).filter((key) => /^scene/.test(key));
    figure.classList.add("drawn"); // before it is drawn: what is hidden has no width
    try {
      const font = { family: getComputedStyle(document.body).fontFamily, size: 13 };
      const options = narrow() ? { ...OPTIONS, displayModeBar: false } : OPTIONS; // it would cover the legend
      await Plotly.newPlot(plot, data, { ...layout, autosize: true, font }, options);
      await Plotly.relayout(plot, { ...themed(layout), ...(narrow() ? changes : {}) });
      // Without WebGL plotly.js writes a sentence where the scene would be, and is content.
      if (plot.querySelectorAll(".gl-container canvas").length < scenes.length || plot.querySelector(".no-webgl")) {
        throw new Error(`${plot.id}: the browser draws no 3-D scenes (no WebGL)`);
      }
      turnTogether(plot, scenes);
      dark.addEventListener("change", () => Plotly.relayout(plot, themed(layout)));
      root.dataset.drawn = Number(root.dataset.drawn) + 1;
    } catch (error) {
      figure.classList.remove("drawn"); // the still picture comes back
      reportError(error);
    }
  }

  const figures = document.querySelectorAll("figure.interactive");
  root.dataset.figures = figures.length;
  root.dataset.drawn = 0;
  figures.forEach(draw);
})();
