// Draws a run over its time: its timeline, and the sampled use of its nodes.

const SPANS = { attempt: "#2a9d55", save: "#2f7ed8", evaluation: "#e8710a", failure: "#c62828", node: "#b5479d" };
const UNITS = {
  share: (value) => `${Math.round(100 * value)}%`,
  bytes,
  "bytes/s": byteRate,
  watts: (value) => `${Math.round(value)} W`,
};

// Returns the times of labels in a range of seconds: multiples of a round number, at most as often as fits.
function timeTicks(seconds, most) {
  const step = SECONDS.find((each) => seconds / each <= most) ?? 86400 * Math.ceil(seconds / 86400 / most);
  return [...Array(Math.floor(seconds / step) + 1).keys()].map((number) => number * step);
}

// Returns the bar of a run's spans with a time axis below, which begins with the first span.
function lifeBar(spans, width) {
  const first = Math.min(...spans.map((span) => span.start));
  const last = Math.max(...spans.map((span) => span.end), first + 1e-3);
  const place = (seconds) => `${100 * seconds / (last - first)}%`;
  const bar = element("div", { class: "life" }, ...spans.map((span) => element("div", {
    title: `${clock(span.start - first)} ${span.text}`, class: span.kind,
    style: {
      left: place(span.start - first), width: place(span.end - span.start), background: SPANS[span.kind],
      top: span.kind === "attempt" ? "6px" : "34px", height: "22px",
    },
  })));
  const ticks = timeTicks(last - first, Math.max(2, width / 100));
  return [bar, element("div", { class: "times faint" }, ...ticks.map((seconds) => element("span", {
    style: { left: place(seconds) }, class: seconds > 0.93 * (last - first) ? "end" : seconds ? "" : "start",
  }, clock(seconds))))];
}

// Draws the charts of what nodes sampled, and returns them; their cursors move together. A line may have
// the index of a node at each point, which is shown with the value.
function systemCharts(holder, charts, nodes) {
  const boxes = charts.map((chart) => element("div", { class: "chart", "data-system": chart.title }, element("h3", {}, chart.title)));
  holder.append(...boxes); // append all first, because the width of each depends on the others
  return charts.map(({ unit, lines }, index) => {
    const text = UNITS[unit];
    return new uPlot({
      width: boxes[index].clientWidth, height: 180,
      scales: { x: { time: false }, y: { range: (u, low, high) => [0, unit === "share" ? 1 : 1.05 * high || 1] } },
      axes: axes(clock, text, 76),
      cursor: { sync: { key: "system" }, drag: { x: true, y: false } },
      series: [
        { label: "time", value: (u, value) => (value === null ? "--" : clock(value)) },
        ...lines.map((line, number) => ({
          label: line.label, stroke: COLORS[number % COLORS.length], width: 1.2, points: { show: line.x.length < 3 },
          value: (u, value, series, at) => (value === null || value === undefined ? "--"
            : line.nodes ? `${text(value)} ${nodes[line.nodes[at]]}` : text(value)),
        })),
      ],
    }, uPlot.join(lines.map((line) => [line.x, line.y])), boxes[index]);
  });
}
