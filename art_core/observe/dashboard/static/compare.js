// Several runs on the same axes: one chart for each metric, one line for each run.
import { Drawer, flatRange, layoutOf, plain, seriesColor, seriesDash, smoothed, timeUnit } from "./charts.js";

const figures = [...document.querySelectorAll("figure[data-metric]")];
const axis = document.getElementById("axis");
const smoothing = document.getElementById("smoothing");
const runs = [...document.querySelectorAll("#compared tr")].map((row, index) => ({
  id: row.dataset.run, name: row.dataset.name, index, series: new Map(), startedAt: 0,
  box: row.querySelector("[data-show]"),
}));

const drawer = new Drawer((figure) => {
  const name = figure.dataset.metric;
  const having = runs.filter((run) => run.box.checked && run.series.has(name));
  const weight = Number(smoothing.value);
  const byTime = axis.value === "time";
  const longest = Math.max(1, ...having.map((run) => (run.series.get(name).times.at(-1) ?? 0) - run.startedAt));
  const { unit, size } = timeUnit(longest);
  const traces = having.map((run) => {
    const one = run.series.get(name);
    const label = plain(run.name);
    return {
      type: "scatter", mode: one.steps.length < 2 ? "markers" : "lines", name: label,
      x: byTime ? one.times.map((t) => (t - run.startedAt) / size) : [...one.steps],
      y: smoothed(one.values, weight),
      line: { color: seriesColor(run.index), width: 2, dash: seriesDash(run.index) },
      hovertemplate: "%{y:.4~g}<extra>" + label + "</extra>",
    };
  });
  // By time no two runs have a value at the same place: the nearest line speaks.
  const layout = layoutOf({ xTitle: byTime ? unit : "step", unified: !byTime });
  layout.yaxis.range = flatRange(having.map((run) => run.series.get(name).values));
  return { traces, layout };
});

const load = async (names) => {
  const wanted = names.filter((name) => !runs.every((run) => run.series.has(name)));
  if (!wanted.length) return;
  const query = new URLSearchParams(wanted.map((name) => ["name", name]));
  await Promise.all(runs.map(async (run) => {
    const answer = await fetch(`/runs/${encodeURIComponent(run.id)}/series?${query}`);
    if (!answer.ok) throw new Error(`${answer.status}`);
    const found = await answer.json();
    run.startedAt = found.started_at;
    for (const [name, one] of Object.entries(found.series)) run.series.set(name, one);
  }));
};

const show = async (some) => {
  try {
    await load(some.map((figure) => figure.dataset.metric));
    document.getElementById("connection").textContent = "";
    for (const figure of some) drawer.add(figure);
  } catch {
    document.getElementById("connection").textContent = "no connection; trying again";
    setTimeout(() => show(some), 2000);
  }
};
show(figures.filter((figure) => !figure.closest("details")));
for (const folded of document.querySelectorAll("details.more")) {
  folded.addEventListener("toggle", () => folded.open && show([...folded.querySelectorAll("figure")]), { once: true });
}
axis.addEventListener("change", () => drawer.mark());
smoothing.addEventListener("input", () => drawer.mark());
for (const run of runs) run.box.addEventListener("change", () => drawer.mark());
