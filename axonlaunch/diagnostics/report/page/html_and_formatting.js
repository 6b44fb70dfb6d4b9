"use strict";
// Creates HTML elements and axes of charts, and formats numbers. The other files follow in the same script.

const COLORS = ["#2f7ed8", "#e8710a", "#2a9d55", "#b5479d", "#8a6d00", "#c62828", "#00838f", "#6d5bd0"];

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(made.style, value);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200,
  ...[1, 2, 5, 10, 20, 50, 100].map((days) => 86400 * days)];
const POWERS = [...Array(60).keys()].map((power) => 2 ** power);

// Returns the axes of a chart by uPlot, with the texts of values and the width of those on the left.
// Labels of times and bytes are at multiples of round times and of powers of two.
function axes(horizontal, vertical, size = 64) {
  const drawn = { stroke: color("--faint"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), width: 1 } };
  return [
    { ...drawn, values: (u, values) => values.map(horizontal), space: 70, ...(horizontal === clock && { incrs: SECONDS }) },
    { ...drawn, size, ...([bytes, byteRate].includes(vertical) && { incrs: POWERS }), values: (u, values) => values.map((value) => (value === null ? "" : vertical(value))) },
  ];
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; Math.abs(value) >= 1024 && unit < units.length - 1; unit++) value /= 1024;
  return `${Number(value.toPrecision(4))} ${units[unit]}`;
}

function byteRate(value) {
  return `${bytes(value)}/s`;
}

function short(value) {
  if (value === null || value === undefined) return "--";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en-US");
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(5) : String(Number(value.toPrecision(7)));
}

function clock(seconds) {
  const whole = Math.round(seconds);
  const parts = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return parts.map((part) => String(part).padStart(2, "0")).join(":");
}

function ticks(value) {
  if (Math.abs(value) >= 1e15) return value.toExponential(1);
  const units = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  for (const [size, unit] of units) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(4))}${unit}`;
  }
  const rounded = Number(value.toPrecision(4));
  return rounded !== 0 && Math.abs(rounded) < 1e-4 ? rounded.toExponential() : String(rounded); // 0.000015 is too wide
}

function table(head, rows) {
  return element("div", { class: "scroll named" }, element("table", {},
    element("thead", {}, element("tr", {}, ...head.map((text) => element("th", {}, text)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((text) => element("td", {}, text)))))));
}
