// The loss over the steps, with the losses of groups marked on it.

import { axis, Chart, colour, Span, uPlot } from "/web/chart.js";
import { number } from "/web/words.js";

function padded(least, most) {
  if (least === null) return [0, 1];
  const room = 0.08 * Math.max(most - least, Math.abs(most) / 50, 1e-9);
  return [least - room, most + room];
}

export class LossCurve extends Chart {
  constructor() {
    super("Loss over steps, with failures marked", 260);
    this.rows = [];
    this.failures = [];
    this.span = new Span(this, () => this.whole(), 2);
  }

  /** @param {Array} rows [step, mean, least, most] @param {Array} failures marks with a step */
  take(rows, failures) {
    this.rows = rows;
    this.failures = failures;
    this.element.setAttribute("aria-label", this.words());
    this.draw();
  }

  words() {
    const [first, last] = [this.rows[0], this.rows.at(-1)];
    if (!first) return "Loss over steps: none was reported yet";
    const hits = `${this.failures.length} failures are marked`;
    return `Loss over steps: ${number(first[1])} at step ${first[0]}, ${number(last[1])} at step ${last[0]}; ${hits}`;
  }

  whole() {
    if (!this.rows.length) return [0, 1];
    const [first, last] = [this.rows[0][0], this.rows.at(-1)[0]];
    return [first, Math.max(last, first + 1)];
  }

  /** Failures lie on the curve, at the last value known by then. */
  data() {
    const steps = this.rows.map((row) => row[0]);
    const curve = [steps, this.rows.map((row) => row[1]), this.rows.map((row) => row[2]), this.rows.map((row) => row[3])];
    const hit = new Map();
    for (const { step } of this.failures) {
      const row = this.rows.findLast((each) => each[0] <= step) ?? this.rows[0];
      if (row) hit.set(Math.max(step, row[0]), row[1]);
    }
    const places = [...hit.keys()].sort((a, b) => a - b);
    if (!places.length) return [...curve, steps.map(() => undefined)];
    return uPlot.join([curve, [places, places.map((step) => hit.get(step))]]);
  }

  options(width, height) {
    const value = (_, raw) => number(raw);
    return {
      width,
      height,
      scales: {
        x: { time: false, range: () => this.span.get() },
        // Values that are all the same still have room around them.
        y: { range: (_, least, most) => padded(least, most) },
      },
      axes: [axis({ values: (_, splits) => splits.map((step) => (Number.isInteger(step) ? step.toLocaleString("en") : "")) }), axis({ size: 60 })],
      series: [
        { label: "Step", value: (_, step) => (step === null ? "–" : step.toLocaleString("en")) },
        { label: "Loss", stroke: colour("accent"), width: 2, value, points: { show: () => this.rows.length < 3, size: 7 }, spanGaps: true },
        { label: "Least", stroke: colour("accent-weak"), width: 1, value, points: { show: false }, spanGaps: true },
        { label: "Most", stroke: colour("accent-weak"), width: 1, value, points: { show: false }, spanGaps: true },
        {
          label: "Failure at",
          stroke: colour("bad"),
          paths: () => null,
          points: { show: true, size: 11, fill: colour("bad"), stroke: colour("card"), width: 2 },
          value,
        },
      ],
      bands: [{ series: [3, 2], fill: colour("accent-fill") }],
      cursor: { drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => (this.span.follow(0), null) } },
      hooks: { setSelect: [(plot) => this.span.selected(plot)] },
      legend: { live: true },
    };
  }
}
