"use strict";

// What all pages share: they unpack their data and draw them. Plot and d3 are globals of the scripts
// before this one; the script of the page follows it.

const $ = (selector) => document.querySelector(selector);

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

async function unpacked(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

const seconds = (value) => (value >= 100 ? value.toFixed(1) : value.toPrecision(4));
const percent = (value, digits = 1) => `${(100 * value).toFixed(digits)} %`;
const distinct = (values) => [...new Set(values)];


/**
 * Predicted over measured steps, with a band of 10 %. A point has a name, and a line from its fastest to its slowest
 * step (low, high); points of several groups have the colors of these.
 */
function drawBeside(selector, points, then) {
  const ends = d3.extent(points.flatMap(({ low, high, predicted }) => [low, high, predicted]));
  const groups = distinct(points.map((point) => point.group ?? ""));
  draw(selector, "Predicted over measured steps", (width) => ({
    width: Math.min(width, 640), height: 420, marginLeft: 60, grid: true,
    x: { type: "log", label: "measured step, s →", tickFormat: (value) => d3.format("~g")(value) },
    y: { type: "log", label: "↑ predicted step, s", tickFormat: (value) => d3.format("~g")(value) },
    color: { domain: groups, legend: groups.length > 1 },
    marks: [
      Plot.areaY(ends, { x: (end) => end, y1: (end) => 0.9 * end, y2: (end) => 1.1 * end, fillOpacity: 0.15 }),
      Plot.line(ends, { x: (end) => end, y: (end) => end }),
      Plot.ruleY(points, { x1: "low", x2: "high", y: "predicted" }),
      Plot.dot(points, { x: "measured", y: "predicted", fill: (point) => point.group ?? "" }),
      Plot.tip(points, Plot.pointer({
        x: "measured", y: "predicted",
        title: (point) => `${point.name}\nmeasured ${seconds(point.measured)} s, predicted ${seconds(point.predicted)} s`,
      })),
    ],
  }), then);
}

function draw(selector, label, optionsOf, then) {
  const place = $(selector);
  const width = Math.max(place.clientWidth, 280);
  const plot = Plot.plot({ ...optionsOf(width), ariaLabel: label, style: { background: "none" } });
  // To a screen reader a figure is one picture; the table has its numbers.
  for (const picture of plot.matches("svg") ? [plot] : plot.querySelectorAll("svg[aria-label]")) {
    picture.setAttribute("role", "img");
    for (const mark of picture.querySelectorAll("[aria-label]")) {
      mark.dataset.mark = mark.getAttribute("aria-label");
      mark.removeAttribute("aria-label");
    }
  }
  then?.(plot);
  place.replaceChildren(plot);
}

/** Unpack the page's data and show them; say what went wrong if they cannot be shown. */
function start(show) {
  unpacked($("#data").textContent).then((data) => {
    show(data);
    window.readyAfter = performance.now();
    document.documentElement.dataset.ready = "true";
  }).catch((error) => {
    $("#failure").hidden = false;
    $("#failure").textContent = `This page cannot be drawn: ${error.message}. It needs a browser of 2023 or later.`;
    throw error;
  });
}
