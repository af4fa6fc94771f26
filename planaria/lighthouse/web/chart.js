// What all charts share: colours of the page, size of their place, and the keyboard.

import uPlot from "/web/vendor/uplot/dist/uPlot.esm.js";

export { uPlot };

const dark = matchMedia("(prefers-color-scheme: dark)");

/** A colour of style.css. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function axis(more = {}) {
  return {
    stroke: colour("quiet"),
    grid: { stroke: colour("line"), width: 1 },
    ticks: { stroke: colour("line"), width: 1 },
    font: "12px system-ui, sans-serif",
    ...more,
  };
}

const HOUR = { hour: "2-digit", minute: "2-digit", hour12: false };

/** Labels of an axis of time: as fine as the axis is, with the date where a day begins. */
export function times(_, splits, __, ___, step) {
  const more = step < 60 ? { second: "2-digit" } : {};
  const fine = step < 1 ? { fractionalSecondDigits: step < 0.01 ? 3 : step < 0.1 ? 2 : 1 } : {};
  let day = "";
  return splits.map((at) => {
    const date = new Date(at * 1000);
    const today = date.toLocaleDateString("en-CA");
    const time = step < 86400 ? date.toLocaleTimeString("en-GB", { ...HOUR, ...more, ...fine }) : "";
    const shown = today === day ? time : `${time}\n${today}`.trim();
    day = today;
    return shown;
  });
}

/**
 * A chart in an element of its own, made when there is data and again when the colours of the page change.
 * Subclasses give `options(width, height)` (of uPlot) and `data()`.
 */
export class Chart {
  /** @param {string} label what it shows, for those who do not see it */
  constructor(label, height) {
    this.height = height;
    this.plot = null;
    this.element = document.createElement("div");
    this.element.className = "chart";
    this.element.setAttribute("role", "img");
    this.element.setAttribute("aria-label", label);
    new ResizeObserver(() => this.fit()).observe(this.element);
    dark.addEventListener("change", () => this.remake());
  }

  draw() {
    const data = this.data();
    if (this.plot) {
      this.show(data);
    } else if (this.element.clientWidth > 0) {
      this.plot = new uPlot(this.options(this.element.clientWidth, this.height), data, this.element);
      this.show(data);
    }
  }

  /** New data, old view. */
  show(data) {
    this.plot.setData(data);
  }

  remake() {
    this.plot?.destroy();
    this.plot = null;
    this.draw();
  }

  fit() {
    const width = this.element.clientWidth;
    if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
    if (!this.plot) this.draw();
  }
}

/** Part of a chart's x axis: drag, wheel, buttons and keys choose it. */
export class Span {
  /** @param {Chart} chart @param {() => [number, number]} whole @param {number} least the smallest width */
  constructor(chart, whole, least) {
    this.chart = chart;
    this.whole = whole;
    this.least = least;
    this.range = null; // null: all of it
    this.following = 0; // a width: the newest so much
    this.changed = () => {};
    const { element } = chart;
    element.tabIndex = 0;
    element.addEventListener("keydown", (event) => this.key(event));
    element.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
  }

  get() {
    const [from, to] = this.whole();
    if (this.following) return [Math.max(from, to - this.following), to];
    return this.range ?? [from, to];
  }

  set(from, to) {
    const [first, last] = this.whole();
    const width = Math.max(to - from, this.least);
    const middle = (from + to) / 2;
    this.following = 0;
    this.range = width >= last - first ? null : [middle - width / 2, middle + width / 2];
    this.redraw();
  }

  follow(width) {
    this.range = null;
    this.following = width;
    this.redraw();
  }

  zoom(factor, at = null) {
    const [from, to] = this.get();
    const fixed = at ?? (from + to) / 2;
    this.set(fixed - (fixed - from) * factor, fixed + (to - fixed) * factor);
  }

  move(share) {
    const [from, to] = this.get();
    const by = (to - from) * share;
    this.set(from + by, to + by);
  }

  redraw() {
    this.chart.draw();
    this.changed();
  }

  wheel(event) {
    if (!event.ctrlKey && !event.shiftKey && document.activeElement !== this.chart.element) return; // the page scrolls
    event.preventDefault();
    const { plot } = this.chart;
    const at = plot ? plot.posToVal(event.clientX - plot.over.getBoundingClientRect().left, "x") : null;
    this.zoom(event.deltaY > 0 ? 1.25 : 0.8, at);
  }

  key(event) {
    const does = {
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      ArrowLeft: () => this.move(-0.2),
      ArrowRight: () => this.move(0.2),
      0: () => this.follow(0),
      Home: () => this.follow(0),
    }[event.key];
    if (!does || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    does();
  }

  /** For the hooks of uPlot: a drag across the chart chooses what was dragged over. */
  selected(plot) {
    const { left, width } = plot.select;
    if (width < 3) return;
    const from = plot.posToVal(left, "x");
    const to = plot.posToVal(left + width, "x");
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.set(from, to);
  }
}
