"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const config = {
    responsive: true,
    displayModeBar: "hover",
    displaylogo: false, // a link
    showSendToCloud: false, // nothing of a run leaves the page
    plotlyServerURL: "",
    modeBarButtonsToRemove: ["select2d", "lasso2d"],
  };

  // Colours come from the style sheet, so that plots follow the dark mode and print dark on white.
  function colors() {
    const style = getComputedStyle(document.documentElement);
    return Object.fromEntries(["ink", "soft", "line", "paper"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }

  function themed(layout) {
    const { ink, soft, line, paper } = colors();
    const found = {
      ...layout,
      autosize: true,
      margin: { l: 62, r: 20, t: 40, b: 50, ...layout.margin },
      font: { color: ink, size: 12, family: getComputedStyle(document.body).fontFamily },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: { bgcolor: paper, bordercolor: line, font: { color: ink }, namelength: -1 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: ink },
      legend: { orientation: "h", x: 0, xanchor: "left", ...layout.legend },
    };
    for (const name of Object.keys(found)) {
      if (/^[xy]axis\d*$/.test(name)) {
        found[name] = { automargin: true, ...found[name], gridcolor: line, linecolor: line, zerolinecolor: line };
      }
    }
    return found;
  }

  function addSwitches(id, figure, plot) {
    const place = document.getElementById(`switches-${id}`);
    figure.switches.forEach((entry, number) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = entry.label;
      button.setAttribute("aria-pressed", String(number === 0));
      button.addEventListener("click", () => {
        for (const other of place.children) other.setAttribute("aria-pressed", String(other === button));
        Plotly.update(plot, entry.visible ? { visible: entry.visible } : {}, entry.layout);
      });
      place.append(button);
    });
  }

  const plots = Object.entries(figures).map(([id, figure]) => {
    const plot = document.getElementById(`plot-${id}`);
    Plotly.newPlot(plot, figure.data, themed(figure.layout), config);
    addSwitches(id, figure, plot);
    return plot;
  });

  const recolor = () => plots.forEach((plot) => Plotly.relayout(plot, themed(plot.layout)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolor);
  for (const [event, printing] of [["beforeprint", true], ["afterprint", false]]) {
    addEventListener(event, () => {
      document.documentElement.classList.toggle("printing", printing);
      recolor();
    });
  }
})();
