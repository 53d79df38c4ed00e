// Charts of series, drawn by Plotly in the page's own colours.
//
// A series is {steps, values, times}: parallel arrays, ascending, null where there is no number. A chart is
// drawn when it comes into view, and again when its data, the theme or an option has changed. Plotly sees that
// data has changed by its arrays being other ones: what it is handed are copies.

export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const seriesColor = (index) => css(`--series-${(index % 8) + 1}`);
export const seriesDash = (index) => ["solid", "dash", "dot", "dashdot"][Math.floor(index / 8) % 4];

/** Exponential moving average without the pull of its first value (as in Adam); gaps stay gaps. */
export function smoothed(values, weight) {
  if (!weight) return [...values];
  let sum = 0;
  let seen = 0;
  return values.map((value) => {
    if (value === null) return null;
    seen += 1;
    sum = weight * sum + (1 - weight) * value;
    return sum / (1 - weight ** seen);
  });
}

/** Put a value into a series where its step belongs; a step that is there is replaced. */
export function insert(series, step, value, time) {
  let at = series.steps.length;
  while (at > 0 && series.steps[at - 1] >= step) at -= 1;
  const replaced = series.steps[at] === step ? 1 : 0;
  series.steps.splice(at, replaced, step);
  series.values.splice(at, replaced, value);
  series.times.splice(at, replaced, time);
}

/** The range of an axis whose values are all the same, which Plotly would make 2 high whatever the value. */
export function flatRange(columns) {
  const values = columns.flat().filter((v) => v !== null);
  const value = values[0];
  if (value === undefined || values.some((v) => v !== value)) return undefined;
  if (value === 0) return [-0.02, 1];
  return [value - Math.abs(value) * 0.5, value + Math.abs(value) * 0.5];
}

/** A number for people, as the pages' templates write it. */
export const number = (value) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 1000) return Math.round(value).toLocaleString("en-US").replace("-", "−");
  if (size < 1e-3) return value.toExponential(2).replace("-", "−");
  return value.toFixed(Math.max(0, 3 - Math.max(0, Math.floor(Math.log10(size)) + 1))).replace("-", "−");
};

/** Seconds as what an axis of that length is best read in. */
export function timeUnit(seconds) {
  if (seconds < 300) return { unit: "s", size: 1 };
  return seconds < 7200 ? { unit: "min", size: 60 } : { unit: "h", size: 3600 };
}

// A learning rate of 0.000014 is read as 1.4e-5.
const TINY = [{ dtickrange: [null, 2e-5], value: "~e" }, { dtickrange: [2e-5, null], value: "~g" }];

export function layoutOf({ bars = false, legend = false, xTitle = "", yTitle = "", unified = true } = {}) {
  const axis = {
    gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line"),
    automargin: true, title: { font: { size: 11 }, standoff: 4 },
  };
  return {
    margin: { l: 46, r: 10, t: legend ? 26 : 8, b: 30 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 11, color: css("--muted") },
    hoverlabel: { bgcolor: css("--surface"), bordercolor: css("--line-strong"), font: { color: css("--text") } },
    hovermode: unified ? "x unified" : "closest",
    barmode: bars ? "stack" : undefined,
    bargap: 0.15,
    showlegend: legend,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: css("--text") } },
    xaxis: { ...axis, title: { ...axis.title, text: xTitle }, showgrid: false, zeroline: false },
    yaxis: { ...axis, title: { ...axis.title, text: yTitle }, tickformat: "~g", tickformatstops: TINY, zeroline: false },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    uirevision: "kept",
  };
}

export const CONFIG = {
  responsive: true, displaylogo: false, doubleClick: "reset",
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d", "pan2d"],
};

const COLORS = { good: "--good", warn: "--warn", bad: "--bad", "": "--muted" };

/** Marks of what happened: a faint line each, and a sign at the bottom that says what it was. */
export function eventMarks(marks) {
  const color = (mark) => css(COLORS[mark.tone] ?? "--muted");
  return {
    shapes: marks.filter((mark) => mark.tone).map((mark) => ({
      type: "line", xref: "x", yref: "paper", x0: mark.x, x1: mark.x, y0: 0, y1: 1,
      line: { color: color(mark), width: 1, dash: "dot" }, opacity: 0.8, layer: "below",
    })),
    trace: {
      type: "scatter", mode: "markers", yaxis: "y2", showlegend: false, name: "event", cliponaxis: false,
      x: marks.map((m) => m.x), y: marks.map(() => 0),
      marker: { symbol: "triangle-up", size: 8, color: marks.map(color) },
      hovertext: marks.map((m) => wrapped(`${m.kind}: ${m.message}`)), hoverinfo: "text",
    },
  };
}

// Plotly reads a few tags in its texts: what was recorded is escaped before it gets there.
export const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const wrapped = (text) => plain(text.slice(0, 240)).replace(/(.{1,60})(\s+|$)/g, "$1<br>").replace(/<br>$/, "");

/** Draws charts when they are in view. `draw(element)` returns {traces, layout, after}. */
export class Drawer {
  constructor(draw) {
    this.draw = draw;
    this.dirty = new Set();
    this.seen = new Set();
    this.asked = false;
    this.watch = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) this.seen.add(entry.target); else this.seen.delete(entry.target);
      }
      this.ask();
    }, { rootMargin: "200px" });
    document.addEventListener("themechange", () => this.mark());
  }

  add(element) {
    this.watch.observe(element);
    this.mark([element]);
    (this.all ??= new Set()).add(element);
  }

  mark(elements) {
    for (const element of elements ?? this.all ?? []) this.dirty.add(element);
    this.ask();
  }

  ask() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => {
      this.asked = false;
      let budget = 3; // of a frame, so that the page stays quick
      for (const element of [...this.dirty]) {
        if (!this.seen.has(element)) continue;
        if (budget === 0) { this.ask(); break; }
        const drawn = this.draw(element);
        this.dirty.delete(element);
        if (!drawn) continue;
        budget -= 1;
        const plot = element.querySelector(".plot");
        plot.querySelector("svg.still")?.remove();
        globalThis.Plotly.react(plot, drawn.traces, drawn.layout, CONFIG);
        drawn.after?.(plot);
      }
    });
  }
}
