// How long recoveries took: as many as fell between one bound and the next.

import { axis, Chart, colour, uPlot } from "/web/chart.js";
import { count, duration } from "/web/words.js";

export class Histogram extends Chart {
  constructor() {
    super("Recovery times", 240);
    this.bounds = [];
    this.counts = [];
  }

  /** @param {number[]} bounds seconds @param {number[]} counts one more: those beyond the last bound */
  take(bounds, counts) {
    this.bounds = bounds;
    this.counts = counts;
    this.element.setAttribute("aria-label", this.words());
    this.draw();
  }

  name(index) {
    return index < this.bounds.length ? `up to ${duration(this.bounds[index])}` : `over ${duration(this.bounds.at(-1))}`;
  }

  words() {
    const told = this.counts.flatMap((number, index) => (number ? [`${number} ${this.name(index)}`] : []));
    return `Recovery times: ${told.join(", ") || "there was none"}`;
  }

  data() {
    return [this.counts.map((_, index) => index), this.counts];
  }

  options(width, height) {
    const short = (index) => (index < this.bounds.length ? `${this.bounds[index]}` : "more");
    return {
      width,
      height,
      scales: {
        x: { time: false, range: () => [-0.6, this.counts.length - 0.4] },
        y: { range: (_, least, most) => [0, Math.max(most ?? 0, 1) * 1.1] },
      },
      axes: [
        axis({
          splits: () => this.counts.map((_, index) => index).filter((index) => width > 520 || index % 3 === 0),
          values: (_, splits) => splits.map(short),
          grid: { show: false },
          label: "seconds, up to",
          labelFont: "12px system-ui, sans-serif",
          labelSize: 20,
        }),
        axis({ values: (_, splits) => splits.map((each) => (Number.isInteger(each) ? each : "")), size: 44 }),
      ],
      series: [
        { label: "Time", value: (_, index) => (index === null ? "–" : this.name(index)) },
        {
          label: "Recoveries",
          paths: uPlot.paths.bars({ size: [0.8, 60] }),
          width: 0,
          fill: colour("warn"),
          stroke: colour("warn"),
          points: { show: false },
          value: (_, each) => (each === null ? "–" : count(each, "recovery", "recoveries")),
        },
      ],
      cursor: { y: false, drag: { x: false, y: false } },
      legend: { live: true },
    };
  }
}
