// Draws runs as lines over parallel axes: the settings in which they differ, and the metric.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 260, TOP = 34, LEFT = 76, LETTER = 7; // pixels; labels of an axis are on its left

function drawn(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Returns the chart: a line for each run of the list, and a text that describes the line under the pointer.
function parallelCoordinates({ axes, quality }, labels, shown, width) {
  const names = axes.map((axis) => (axis.name.length > 30 ? `…${axis.name.slice(-29)}` : axis.name));
  const widths = names.map((name) => LETTER * name.length + 12);
  const left = Math.max(LEFT, widths[0] / 2), right = widths[names.length - 1] / 2;
  const apart = Math.max(...widths, 110, (width - left - right) / (axes.length - 1));
  const x = (index) => left + index * apart;
  const y = (position) => TOP + (1 - position) * (HEIGHT - TOP - 12);
  const caption = element("p", { class: "faint caption" }, "Point at a line for its run.");
  const lines = shown.map((run) => {
    const points = axes.map((axis, index) => (axis.positions[run] === null ? null : [x(index), y(axis.positions[run])])).filter(Boolean);
    const path = `M${points.map((point) => point.map((each) => each.toFixed(1)).join(",")).join("L")}`;
    const text = `${labels[run]}: ${axes.map((axis) => `${axis.name} ${axis.texts[run] || "unknown"}`).join(", ")}`;
    const worth = quality[run];
    const stroke = worth === null ? "var(--faint)" : `color-mix(in oklab, ${COLORS[0]} ${Math.round(100 * worth)}%, ${COLORS[1]})`;
    const line = drawn("g", { class: worth === 1 ? "run best" : worth === null ? "run unknown" : "run", "data-run": labels[run] },
      drawn("path", { d: path, class: "wide" }), drawn("path", { d: path, style: `stroke: ${stroke}` }), drawn("title", {}, text));
    line.addEventListener("mouseenter", () => { caption.textContent = text; });
    return line;
  });
  const rulers = axes.map((axis, index) => {
    const made = drawn("g", { class: "axis" },
      drawn("line", { x1: x(index), x2: x(index), y1: y(1), y2: y(0) }),
      drawn("text", { x: x(index), y: 14, class: "name" }, names[index]));
    const placed = [];
    for (const [position, text] of axis.ticks) {
      if (placed.some((other) => Math.abs(other - y(position)) < 13)) continue;
      placed.push(y(position));
      made.append(drawn("text", { x: x(index) - 6, y: y(position) + 4, class: "tick" }, text.length > 11 ? `${text.slice(0, 10)}…` : text, drawn("title", {}, text)));
    }
    return made;
  });
  const size = { width: x(axes.length - 1) + right, height: HEIGHT };
  return [element("div", { class: "scroll" }, drawn("svg", { ...size, class: "coordinates" }, ...lines, ...rulers)), caption];
}
