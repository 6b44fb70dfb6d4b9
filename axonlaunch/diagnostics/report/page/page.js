// Builds the page from its data, with charts by uPlot. Texts of runs are inserted as text and never as
// markup, because a run's name may contain anything.
(() => {
  let data = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  const ACTIONS = { F: "#2f7ed8", B: "#e8710a", I: "#8a6d00", W: "#2a9d55" };
  const view = { axis: "step", log: false, smooth: 0.9, raw: true, open: new Set(), hidden: new Set(), nodes: new Map() };
  let charts = [];
  let into = page; // element that receives sections
  let range = null; // zoomed range of the horizontal axis in all charts; null shows everything

  function section(title, ...children) {
    const made = element("section", {}, element("h2", {}, title), ...children);
    into.append(made);
    return made;
  }

  // Returns the horizontal position of steps: the steps, or the total targets or seconds up to them,
  // interpolated linearly between the points in the page's data.
  function along(run, steps) {
    if (view.axis === "step") return steps;
    const [known, targets, seconds] = run.progress;
    const values = view.axis === "tokens" ? targets : seconds;
    let at = 0;
    return steps.map((step) => {
      while (at < known.length - 2 && known[at + 1] < step) at++;
      const width = known[at + 1] - known[at];
      const share = width > 0 ? (step - known[at]) / width : 0;
      return known.length < 2 ? values[0] : values[at] + share * (values[at + 1] - values[at]);
    });
  }

  // Exponential moving average over steps with bias correction, as in TensorBoard.
  function smoothed(steps, values) {
    let mean = 0;
    let weight = 0;
    return values.map((value, index) => {
      if (value === null) return null;
      const keep = Math.pow(view.smooth, index ? Math.max(1, (steps[index] - steps[index - 1])) : 1);
      mean = keep * mean + (1 - keep) * value;
      weight = keep * weight + (1 - keep);
      return weight > 0 ? mean / weight : value;
    });
  }

  function lines(key) {
    const found = [];
    data.runs.forEach((run, index) => {
      if (view.hidden.has(run.label)) return;
      const several = data.runs.length > 1;
      const named = (curve) => (several ? `${run.label} ${curve}` : curve);
      const stroke = COLORS[index % COLORS.length];
      const curve = run.series[key];
      if (curve) {
        const x = along(run, curve[0]);
        const smooth = key === "loss" && view.smooth > 0 && curve[0].length > 2;
        if (!smooth || view.raw) {
          found.push({ label: several ? run.label : data.curves[key], stroke: smooth ? `${stroke}70` : stroke, x, y: curve[1], width: 1 });
        }
        if (smooth) {
          found.push({ label: named("smoothed"), stroke, x, y: smoothed(curve[0], curve[1]), width: 1.6 });
        }
      }
      const evaluated = key === "loss" ? run.series.eval_loss : undefined;
      if (evaluated) {
        found.push({
          label: named("evaluation"), stroke, x: along(run, evaluated[0]), y: evaluated[1],
          width: 1, dash: [5, 4], points: true,
        });
      }
    });
    return found;
  }

  function zoom(min, max) {
    range = min === null ? null : [min, max];
    for (const chart of charts) {
      const [low, high] = range ?? chart.whole;
      if (chart.scales.x.min !== low || chart.scales.x.max !== high) chart.setScale("x", { min: low, max: high });
    }
  }

  function chart(box, key, title) {
    const drawn = lines(key);
    const joined = uPlot.join(drawn.map((line) => [line.x, line.y]));
    const memory = key === "peak_memory_bytes";
    const log = view.log && drawn.every((line) => line.y.every((value) => value === null || value > 0));
    const options = {
      width: box.clientWidth, height: 240,
      scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
      axes: axes(view.axis === "seconds" ? clock : ticks, memory ? bytes : ticks),
      cursor: { sync: { key: "axonlaunch" }, drag: { x: true, y: false } },
      series: [
        { label: view.axis, value: (u, value) => (value === null ? "--" : view.axis === "seconds" ? clock(value) : short(value)) },
        ...drawn.map((line) => ({
          label: line.label, stroke: line.stroke, width: line.width, dash: line.dash, spanGaps: true,
          points: { show: line.points || line.x.length === 1 ? true : undefined, size: 5 },
          value: (u, value) => (memory && value !== null && value !== undefined ? bytes(value) : short(value)),
        })),
      ],
      hooks: {
        setSelect: [(u) => {
          if (u.select.width > 4) zoom(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"));
        }],
      },
    };
    box.append(element("h3", {}, title));
    const plot = new uPlot(options, joined, box);
    plot.whole = [joined[0][0], joined[0][joined[0].length - 1]];
    plot.over.addEventListener("dblclick", () => zoom(null, null));
    return plot;
  }

  function drawCharts(holder) {
    charts.forEach((one) => one.destroy());
    holder.replaceChildren();
    charts = [];
    const shown = Object.entries(data.curves).filter(([key]) => data.runs.some((run) => run.series[key] && !view.hidden.has(run.label)));
    const boxes = shown.map(([key]) => element("div", { class: "chart", "data-curve": key }));
    holder.append(...boxes); // append all first, because the width of each depends on the others
    charts = shown.map(([key, title], index) => chart(boxes[index], key, title));
    const wholes = charts.map((one) => one.whole);
    if (!charts.length) return;
    const all = [Math.min(...wholes.map((one) => one[0])), Math.max(...wholes.map((one) => one[1]))];
    charts.forEach((one) => { one.whole = all; });
    if (range) zoom(...range);
  }

  function curves() {
    if (!data.runs.some((run) => Object.keys(run.series).length)) return;
    const holder = element("div", { class: "charts" });
    const redraw = () => drawCharts(holder);
    const axis = element("select", { id: "axis", onchange: (event) => { view.axis = event.target.value; range = null; redraw(); } },
      ...[["step", "step"], ["tokens", data.counted], ["seconds", "time in steps"]].map(([value, text]) => element("option", { value }, text)));
    axis.value = view.axis;
    const log = element("input", { type: "checkbox", id: "log", onchange: (event) => { view.log = event.target.checked; redraw(); } });
    log.checked = view.log;
    const raw = element("input", { type: "checkbox", id: "raw", onchange: (event) => { view.raw = event.target.checked; redraw(); } });
    raw.checked = view.raw;
    const smooth = element("input", {
      type: "range", id: "smooth", min: "0", max: "0.99", step: "0.01", value: String(view.smooth),
      onchange: (event) => { view.smooth = Number(event.target.value); redraw(); },
    });
    const tools = element("div", { class: "tools" },
      element("label", {}, "by", axis),
      element("label", {}, log, "logarithmic"),
      element("label", {}, "smoothing", smooth),
      element("label", {}, raw, "raw"),
      element("button", { type: "button", id: "reset", onclick: () => zoom(null, null) }, "whole range"),
      element("span", { class: "faint" }, "drag to zoom, double-click for the whole range"));
    section("Curves", tools, holder);
    redraw();
  }

  // Runs as lines over the settings in which they differ; those that are switched off have no line.
  function coordinates(holder) {
    const labels = data.runs.map((run) => run.label);
    const shown = [...labels.keys()].filter((run) => !view.hidden.has(labels[run]));
    holder.replaceChildren(...parallelCoordinates(data.coordinates, labels, shown, holder.clientWidth));
  }

  function settings() {
    if (!data.coordinates) return;
    const { left_out: number, axes } = data.coordinates;
    const holder = element("div", { id: "coordinates" });
    section(`Settings and ${axes[axes.length - 1].name}`, holder, number
      ? element("p", { class: "faint" }, `${number} more settings differ; the table above has them.`) : "");
    coordinates(holder);
  }

  // The table of several runs: the best first, with a box for each run's curves and its line.
  function overview() {
    const redraw = () => {
      const [charts, lines] = [document.querySelector(".charts"), document.getElementById("coordinates")];
      if (charts) drawCharts(charts);
      if (lines) coordinates(lines);
    };
    const rows = data.table.rows.map((row) => {
      const { label } = data.runs[row.run];
      const box = element("input", {
        type: "checkbox", "aria-label": `curves of ${label}`,
        onchange: (event) => {
          if (event.target.checked) view.hidden.delete(label); else view.hidden.add(label);
          redraw();
        },
      });
      box.checked = !view.hidden.has(label);
      box.style.accentColor = COLORS[row.run % COLORS.length];
      const cells = row.cells.map((text, index) => (index === 0 && row.is_best ? `${text} (best)` : text));
      return element("tr", row.is_best ? { class: "best" } : {}, element("td", {}, box), ...cells.map((text, index) => element("td", index === 1 ? { class: text } : {}, text)));
    });
    section("Runs", element("div", { class: "scroll" }, element("table", { id: "runs" },
      element("thead", {}, element("tr", {}, element("th", {}, ""), ...data.table.head.map((text) => element("th", {}, text)))),
      element("tbody", {}, ...rows))));
  }

  // A folded section that stays open when a live page is redrawn.
  function folded(name, title, content) {
    const made = element("details", {}, element("summary", {}, title), content);
    made.open = view.open.has(name);
    made.addEventListener("toggle", () => (made.open ? view.open.add(name) : view.open.delete(name)));
    return made;
  }

  function headOf(run) {
    const [[, status], ...facts] = run.facts;
    into.append(element("section", {},
      data.runs.length > 1 ? null : element("h1", {}, run.label),
      element("p", {}, element("span", { class: `status ${run.status}` }, status)),
      element("dl", { class: "facts" }, ...facts.map(([name, value]) =>
        element("div", {}, element("dt", {}, name), element("dd", {}, value))))));
  }

  function memory(run) {
    if (!run.memory) return;
    const names = [...new Set(run.memory.ranks.flatMap((rank) => Object.keys(rank.parts)))];
    const most = Math.max(run.memory.measured ?? 0, ...run.memory.ranks.map((rank) => rank.peak ?? 0), 1);
    const estimated = run.memory.ranks.map((rank) => ({ title: `${rank.name}: ${bytes(rank.peak ?? 0)} estimated`, parts: rank.parts, text: bytes }));
    const bars = parts(estimated, names, most);
    if (run.memory.measured !== null) {
      bars.push(element("div", {}, `highest rank: ${bytes(run.memory.measured)} measured`),
        element("div", { class: "bar" }, element("span", { style: { width: `${100 * run.memory.measured / most}%`, background: color("--faint") } })));
    }
    section("Peak memory of tensors", key(names), ...bars);
  }

  function parts(bars, names, most) {
    return bars.map((bar) => element("div", {},
      element("div", {}, bar.title),
      element("div", { class: "bar" }, ...names.map((name, index) => element("span", {
        title: `${name} ${bar.text(bar.parts[name] ?? 0)}`,
        style: { width: `${100 * (bar.parts[name] ?? 0) / most}%`, background: COLORS[index % COLORS.length] },
      })))));
  }

  function key(names) {
    return element("div", { class: "key" }, ...names.map((name, index) => element("span", {},
      element("i", { style: { background: COLORS[index % COLORS.length] } }), name)));
  }

  function steps(run) {
    if (!run.steps) return;
    const { bars, measured, reason, pipelines } = run.steps;
    const names = [...new Set(bars.flatMap((bar) => Object.keys(bar.parts)))];
    const text = (seconds) => `${short(Number((1000 * seconds).toPrecision(4)))} ms`;
    const most = Math.max(measured ?? 0, ...bars.map((bar) => bar.step_s), 1e-9);
    const drawn = parts(bars.map((bar) => ({ title: `${bar.name}: ${text(bar.step_s)} a step`, parts: bar.parts, text })), names, most);
    if (measured !== null) {
      drawn.push(element("div", {}, `measured, median of the logged steps: ${text(measured)}`),
        element("div", { class: "bar" }, element("span", { style: { width: `${100 * measured / most}%`, background: color("--faint") } })));
    }
    section("Step time", ...(names.length ? [key(names)] : []), ...drawn,
      reason ? element("p", { class: "faint" }, `No prediction: ${reason}`) : "",
      ...pipelines.flatMap((one) => pipeline(one, text)));
  }

  // One row per rank, one bar per action of the pipeline: 2F0 is stage 2, forward, micro-batch 0.
  function pipeline({ name, actions }, text) {
    const span = Math.max(...actions.map((action) => action[2]), 1e-9);
    const rows = [...new Set(actions.map((action) => action[0]))].sort((a, b) => a - b);
    const kinds = { F: "forward", B: "backward", I: "input gradients", W: "weight gradients" };
    const used = Object.keys(kinds).filter((kind) => actions.some((action) => action[3].includes(kind)));
    return [
      element("h3", {}, `pipeline, ${name}: ${text(span)}`),
      element("div", { class: "key" }, ...used.map((kind) => element("span", {},
        element("i", { style: { background: ACTIONS[kind] } }), kinds[kind]))),
      ...rows.map((rank) => element("div", { class: "lane" }, element("span", { class: "faint" }, `rank ${rank}`),
        element("div", {}, ...actions.filter((action) => action[0] === rank).map(([, start, stop, action]) => element("i", {
          title: `${action}: ${text(stop - start)}`,
          style: { left: `${100 * start / span}%`, width: `${100 * (stop - start) / span}%`, background: ACTIONS[action.match(/[FBIW]/)?.[0]] ?? color("--faint") },
        }))))),
    ];
  }

  // A map with a row for each rank or block: uPlot draws axes, cursor and legend; a hook draws the cells.
  function map(box, { steps, columns, names, fill, text, most }) {
    const number = names.length;
    const mean = columns.map((column) => column.reduce((sum, value) => sum + value, 0) / number);
    const largest = columns.map((column) => column.indexOf(Math.max(...column)));
    const cells = (u) => {
      const height = u.bbox.height / number;
      for (let at = 0; at < steps.length; at++) {
        const begin = at ? u.valToPos((steps[at - 1] + steps[at]) / 2, "x", true) : u.bbox.left;
        const end = at < steps.length - 1 ? u.valToPos((steps[at] + steps[at + 1]) / 2, "x", true) : u.bbox.left + u.bbox.width;
        for (let row = 0; row < number; row++) {
          u.ctx.fillStyle = fill(columns[at][row]);
          u.ctx.fillRect(begin, u.bbox.top + row * height, Math.max(1, end - begin), height + 0.5);
        }
      }
    };
    new uPlot({
      width: box.clientWidth, height: Math.min(420, 90 + 14 * number),
      scales: { x: { time: false }, y: { range: () => [-0.5, number - 0.5], dir: -1 } },
      axes: [axes(ticks, ticks)[0], {
        stroke: color("--faint"), size: 64, grid: { show: false },
        splits: () => [...Array(number).keys()].filter((row) => number <= 16 || row % Math.ceil(number / 16) === 0),
        values: (u, values) => values.map((row) => names[row]),
      }],
      series: [
        { label: "step", value: (u, value) => short(value) },
        { label: "mean", stroke: "transparent", points: { show: false }, value: (u, value) => (value === null ? "--" : text(value)) },
        { label: "most", stroke: "transparent", points: { show: false },
          value: (u, value, series, index) => (index === null ? "--" : `${most(largest[index])}: ${text(columns[index][largest[index]])}`) },
      ],
      hooks: { drawClear: [cells] },
    }, [steps, mean, mean], box);
  }

  function ranks(run) {
    if (!run.ranks) return;
    const { steps, worked, hosts } = run.ranks;
    const box = element("div", { class: "chart", "data-curve": "ranks" });
    section("Ranks", element("p", { class: "faint" },
      "Fraction of time that each rank computed or waited for data, in the steps before each point. " +
      "A row that stays darker than the others is a rank that the others wait for."), box);
    map(box, {
      steps, columns: worked, names: worked[0].map((_, rank) => `rank ${rank}`),
      fill: (share) => `hsl(214 70% ${94 - 0.62 * share}%)`, text: (share) => `${Math.round(share)}%`,
      most: (rank) => `rank ${rank}${hosts[rank] ? ` on ${hosts[rank]}` : ""}`,
    });
  }

  function experts(run) {
    if (!run.experts) return;
    const { steps, loads, blocks } = run.experts;
    const box = element("div", { class: "chart", "data-curve": "experts" });
    section("Experts", element("p", { class: "faint" },
      "Tokens of the fullest expert of each block, divided by the mean over its experts. 1 is balanced; " +
      "a row that becomes dark is a router that sends most tokens to few experts."), box);
    const highest = Math.max(2, ...loads.flat());
    map(box, {
      steps, columns: loads, names: blocks.map((block) => `block ${block}`),
      fill: (load) => `hsl(26 85% ${94 - 60 * Math.min(1, Math.max(0, (load - 1) / (highest - 1)))}%)`,
      text: (load) => load.toFixed(2), most: (row) => `block ${blocks[row]}`,
    });
  }

  function life(run) {
    if (!run.life.length) return;
    const first = Math.min(...run.life.map((span) => span.start));
    const kinds = [...new Set(run.life.map((span) => span.kind))];
    const rows = run.life.map((span) => [clock(span.start - first), span.kind, span.text]);
    section("Timeline",
      element("div", { class: "key" }, ...kinds.map((kind) => element("span", {}, element("i", { style: { background: SPANS[kind] } }), kind))),
      ...lifeBar(run.life, page.clientWidth), folded(`events of ${run.label}`, `${rows.length} events`, table(["after", "", ""], rows)));
  }

  // The use of the nodes; with several views, a choice of which is drawn.
  function system(run) {
    if (!run.system) return;
    const { nodes, views, absent } = run.system;
    const holder = element("div", { class: "charts" });
    let drawn = [];
    const draw = (name) => {
      view.nodes.set(run.label, name);
      drawn.forEach((one) => one.destroy());
      holder.replaceChildren();
      drawn = systemCharts(holder, (views.find((each) => each.name === name) ?? views[0]).charts, nodes);
    };
    const chosen = view.nodes.get(run.label) ?? views[0].name;
    section(nodes.length > 1 ? `${nodes.length} nodes` : `Node ${nodes[0]}`, element("p", { class: "faint" },
      `All programs on ${nodes.length > 1 ? "each" : "the"} node, by the time since the first launch.`,
      nodes.length > views.length ? " The lowest, median and highest of all nodes; hover to see which node it is." : "",
      absent ? ` Samples of ${absent} more ${absent > 1 ? "nodes are in their" : "node are in its"} own run folder, because the nodes do not share one.` : ""),
      views.length > 1 ? element("p", {}, element("label", {}, "show ", element("select", { "data-nodes": "", onchange: (event) => draw(event.target.value) },
        ...views.map(({ name }) => element("option", { value: name, ...(name === chosen && { selected: "" }) }, name))))) : "",
      holder);
    draw(chosen);
  }

  function crash(run) {
    if (!run.crash) return;
    const found = run.crash;
    section("Failure", element("div", { class: "card" },
      element("p", {}, element("strong", {}, `rank ${found.rank} of ${found.world_size}: ${found.reason}`)),
      element("p", { class: "faint" }, found.place),
      found.hint ? element("p", {}, `hint: ${found.hint}`) : null,
      found.traceback ? element("pre", {}, found.traceback) : null,
      ...found.followers.map((text) => element("p", { class: "faint" }, text))));
  }

  function notes(run) {
    if (run.notes.length) section("Notes", ...run.notes.map((text) => element("p", {}, text)));
  }

  function configuration(run) {
    if (!run.config.length) return;
    section("Configuration", folded(`settings of ${run.label}`, `${run.config.length} settings`,
      table(["key", "value", "set by"], run.config)));
  }

  function detail(run) {
    for (const show of [memory, steps, ranks, experts, life, system, notes, configuration]) show(run);
  }

  // The parts of one of several runs, folded; they are drawn when they are opened, as charts need a width.
  function part(run) {
    const content = element("div", {});
    const made = folded(`run ${run.label}`, `${run.label}: ${run.status}`, content);
    made.addEventListener("toggle", () => {
      if (!made.open || content.childElementCount) return;
      into = content;
      headOf(run);
      crash(run);
      detail(run);
      into = page;
    });
    return made;
  }

  function several() {
    page.append(element("h1", {}, `${data.runs.length} runs`));
    overview();
    settings();
    curves();
    const names = data.runs.map((run) => run.label);
    const shown = (value) => (typeof value === "number" ? short(value) : value ?? "--");
    section("Results", table(["run", ...data.results.map(([name]) => name)],
      names.map((name, run) => [name, ...data.results.map(([, values]) => shown(values[run]))])));
    section("Different settings", data.configurations.length
      ? table(["key", ...names], data.configurations.map(([key, values]) => [key, ...values]))
      : element("p", {}, "none"));
    section("Each run", ...data.table.rows.map((row) => part(data.runs[row.run])));
  }

  function render() {
    const top = window.scrollY;
    charts.forEach((one) => one.destroy());
    charts = [];
    page.replaceChildren();
    if (data.runs.length > 1) several();
    else {
      headOf(data.runs[0]);
      crash(data.runs[0]);
      curves();
      detail(data.runs[0]);
    }
    window.scrollTo(0, top);
  }

  render();
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) { width = window.innerWidth; render(); }
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
  if (data.live) {
    // Browsers reconnect automatically, so a page catches up after its computer was suspended.
    const source = new EventSource("events");
    source.addEventListener("message", (event) => { data = JSON.parse(event.data); render(); });
  }
})();
