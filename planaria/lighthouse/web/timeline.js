// When what happened: commits, quorums, losses, trouble, recoveries, healing; from 10 ms to days.

import { axis, Chart, colour, Span, times, uPlot } from "/web/chart.js";
import { clock, count, duration } from "/web/words.js";

/** From top to bottom. `span`: what takes time is a bar, else it is a point. */
export const LANES = [
  { name: "interrupt", label: "Losses", short: "losses", tone: "bad" },
  { name: "trouble", label: "Trouble, late groups", short: "trouble", tone: "warn" },
  { name: "recovery", label: "Recoveries", short: "recoveries", tone: "warn", span: true },
  { name: "quorum", label: "Quorums", short: "quorums", tone: "accent" },
  { name: "plan", label: "Planned quorums", short: "planned", tone: "accent" },
  { name: "away", label: "Groups away, healed", short: "healed", tone: "heal", span: true },
  { name: "checkpoint", label: "Checkpoints", short: "checkpoints", tone: "quiet" },
  { name: "resume", label: "Back to a checkpoint", short: "resumed", tone: "bad" },
  { name: "commit", label: "Commits", short: "commits", tone: "ok" },
];
const LEAST = 0.01; // seconds
const ROW = 30;

/** Bars that overlap are drawn as one: [[from, to], …], ascending. */
export function merged(spans) {
  const found = [];
  for (const [from, to] of spans.toSorted((a, b) => a[0] - b[0])) {
    const last = found.at(-1);
    if (last && from <= last[1]) last[1] = Math.max(last[1], to);
    else found.push([from, to]);
  }
  return found;
}

export class Timeline extends Chart {
  constructor() {
    super("Timeline", LANES.length * ROW + 50);
    this.marks = [];
    this.commits = [];
    this.began = 0;
    this.now = 1;
    this.span = new Span(this, () => this.whole(), LEAST);
  }

  take(marks, commits, began, now) {
    Object.assign(this, { marks, commits, now });
    this.began = Math.min(began, marks[0]?.at ?? began);
    this.element.setAttribute("aria-label", this.words());
    this.draw();
  }

  /** With some room, so that what is at the very beginning can be told from the axis. */
  whole() {
    const room = Math.max(0.015 * (this.now - this.began), 0.05);
    return [this.began - room, this.now + room];
  }

  words() {
    const [from, to] = this.span.get();
    const shown = this.inView();
    return `Timeline of ${duration(to - from)}, from ${clock(from, 3)} to ${clock(to, 3)}: ${count(shown.length, "event")}, listed below`;
  }

  /** The marks that are seen, the newest first. */
  inView() {
    const [from, to] = this.span.get();
    return this.marks.filter((mark) => (mark.until ?? mark.at) >= from && mark.at <= to).sort((a, b) => b.at - a.at);
  }

  data() {
    return uPlot.join(LANES.map((lane, row) => this.lane(lane, LANES.length - 1 - row)));
  }

  lane({ name, span }, y) {
    if (name === "commit") {
      const times = [...new Set(this.commits.map(([at]) => at))].sort((a, b) => a - b);
      return [times, times.map(() => y)];
    }
    const marks = this.marks.filter((mark) => mark.lane === name);
    if (!span) {
      const times = [...new Set(marks.map((mark) => mark.at))].sort((a, b) => a - b);
      return [times, times.map(() => y)];
    }
    // Only those in view, and a gap around each: the chart joins what it finds beyond its edges.
    const [first, last] = this.span.get();
    const bars = merged(marks.map((mark) => [mark.at, Math.max(mark.until, mark.at + 1e-3)]))
      .filter(([from, to]) => to >= first && from <= last)
      .map(([from, to]) => [Math.max(from, first), Math.min(to, last)]);
    return [bars.flatMap(([from, to]) => [from - 1e-5, from, to, to + 1e-5]), bars.flatMap(() => [null, y, y, null])];
  }

  options(width, height) {
    const narrow = width < 520;
    return {
      width,
      height,
      scales: { x: { time: true, range: () => this.span.get() }, y: { range: () => [-0.6, LANES.length - 0.4] } },
      axes: [
        axis({ values: times, space: narrow ? 70 : 90 }),
        axis({
          size: narrow ? 78 : 150,
          splits: () => LANES.map((_, row) => row),
          values: (_, rows) => rows.map((row) => LANES[LANES.length - 1 - row][narrow ? "short" : "label"]),
          ticks: { show: false },
        }),
      ],
      series: [
        {},
        ...LANES.map(({ label, tone, span }) => ({
          label,
          stroke: colour(tone),
          width: span ? 10 : 0,
          cap: "butt",
          paths: span ? undefined : () => null,
          // A bar of some milliseconds would be thinner than a pixel.
          points: { show: true, size: span ? 6 : 8, fill: colour(tone), stroke: colour(tone), width: 0 },
        })),
      ],
      legend: { show: false },
      cursor: {
        y: false,
        points: { show: false },
        drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => (this.span.follow(0), null) },
      },
      hooks: { setSelect: [(plot) => this.span.selected(plot)] },
    };
  }
}
