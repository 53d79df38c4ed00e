// Several runs on the same axes: one chart for each metric, one line for each run.
import { Drawer, flatRange, layoutOf, number, plain, seriesColor, seriesDash, smoothed, timeUnit } from "./charts.js";

const figures = [...document.querySelectorAll("figure[data-metric]")];
const axis = document.getElementById("axis");
const smoothing = document.getElementById("smoothing");
const runs = [...document.querySelectorAll("#compared tr")].map((row, index) => ({
  id: row.dataset.run, name: row.dataset.name, index, series: new Map(), startedAt: 0,
  row, box: row.querySelector("[data-show]"), going: row.dataset.going === "yes",
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
  await Promise.all(runs.map((run) => fetchSeries(run, wanted)));
};

const fetchSeries = async (run, names) => {
  const query = new URLSearchParams(names.map((name) => ["name", name]));
  const answer = await fetch(`/runs/${encodeURIComponent(run.id)}/series?${query}`);
  if (!answer.ok) throw new Error(`${answer.status}`);
  const found = await answer.json();
  run.startedAt = found.started_at;
  for (const [name, one] of Object.entries(found.series)) run.series.set(name, one);
  run.going = found.going;
  const state = run.row.querySelector("[data-state]");
  state.textContent = found.word;
  state.className = `badge ${found.tone}`;
  const reward = found.series.reward_mean?.values.findLast((value) => value !== null);
  if (reward !== undefined) run.row.querySelector("[data-reward]").textContent = number(reward);
};

// Runs that go on are read again; one that has ended was read once more when that was learnt.
const AGAIN = 3000;
const shown = new Set();
const follow = async () => {
  const going = runs.filter((run) => run.going);
  if (!going.length) return;
  if (!document.hidden && shown.size) {
    const said = document.getElementById("connection");
    try {
      await Promise.all(going.map((run) => fetchSeries(run, [...shown])));
      said.textContent = "";
      drawer.mark();
    } catch {
      said.textContent = "no connection; trying again";
    }
  }
  setTimeout(follow, AGAIN);
};
setTimeout(follow, AGAIN);

const show = async (some) => {
  try {
    await load(some.map((figure) => figure.dataset.metric));
    document.getElementById("connection").textContent = "";
    for (const figure of some) {
      drawer.add(figure);
      shown.add(figure.dataset.metric);
    }
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
