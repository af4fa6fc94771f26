// One job.

import { html, nothing } from "/web/vendor/lit-html/lit-html.js";
import { jobActions, learnVerbs } from "/web/actions.js";
import { LossCurve } from "/web/curve.js";
import { eventList, told } from "/web/events.js";
import { goodput, goodputTable } from "/web/goodput.js";
import { lookTable, Strip } from "/web/groups.js";
import { Histogram } from "/web/histogram.js";
import { home, stateOf } from "/web/jobspage.js";
import { groupOf, Model, placeName } from "/web/model.js";
import { LANES, Timeline } from "/web/timeline.js";
import { clock, count, duration, number, percent } from "/web/words.js";

const SPANS = [
  [10, "10 s"],
  [60, "1 min"],
  [600, "10 min"],
  [3600, "1 h"],
  [86400, "1 d"],
  [0, "all"],
];
const LISTED = 12; // marks below the timeline
const quorumOf = ({ id, reason }) => `quorum ${id}${reason ? ` (${reason})` : ""}`;
const toneOf = ({ lane }) => LANES.find(({ name }) => name === lane)?.tone ?? "quiet";

export class JobPage {
  /** @param {() => void} redraw */
  constructor(redraw) {
    this.redraw = redraw;
    this.model = new Model();
    this.strip = new Strip(redraw);
    this.curve = new LossCurve();
    this.timeline = new Timeline();
    this.histogram = new Histogram();
    this.onlyImportant = false;
    this.timeline.span.follow(600);
    this.timeline.span.changed = redraw;
    learnVerbs(redraw);
  }

  news(news) {
    this.model.take(news);
  }

  view({ job }) {
    const { model } = this;
    const groups = job.groups.map(groupOf);
    this.curve.take(model.loss, model.failures());
    this.timeline.take(model.marks, model.everyCommit(job.began), job.began, job.now);
    this.histogram.take(job.recovery_bounds, job.recoveries);
    return html`
      ${home}
      <h1>${job.job}</h1>
      ${this.sentence(job)} ${jobActions(job)} ${this.figures(job)}
      <section class="card" aria-labelledby="groups"><h2 id="groups">Groups</h2>${this.strip.view(job.job, groups)}${lookTable(groups, (number) => this.strip.choose(number))}</section>
      <section class="card" aria-labelledby="loss"><h2 id="loss">Loss</h2>
        ${model.loss.length ? nothing : html`<p class="quiet">The script has recorded no loss yet (<code>step.record(loss=…)</code>).</p>`}
        ${this.curve.element}
        ${model.loss.length ? html`<p class="quiet">Of all groups, with a dot where one was lost. Drag to look closer, double-click for all; keys as below.</p>` : nothing}
      </section>
      <section class="card" aria-labelledby="timeline"><h2 id="timeline">Timeline</h2>${this.times()}</section>
      <div class="pair">
        <section class="card" aria-labelledby="recoveries"><h2 id="recoveries">Recovery times</h2>
          <p class="quiet">${this.recoveries(job)}</p>${this.histogram.element}
        </section>
        <section class="card" aria-labelledby="goodput"><h2 id="goodput">Goodput: ${percent(goodput(job.group_seconds))}</h2>
          <p class="quiet">Since ${clock(job.began)}, when this lighthouse began with the job: what was before, it does not know.${model.lostNothing(job.policy) ? " No step and no sample was lost; time was." : ""}</p>
          ${goodputTable(job.group_seconds)}
        </section>
      </div>
      <section class="card" aria-labelledby="events"><h2 id="events">Events</h2>
        <label class="check"><input type="checkbox" .checked=${this.onlyImportant} @change=${(event) => this.only(event.target.checked)}> only what came of losses</label>
        ${eventList(told(model.events, model.marks), this.onlyImportant)}
      </section>
    `;
  }

  only(important) {
    this.onlyImportant = important;
    this.redraw();
  }

  sentence(job) {
    const { word, tone } = stateOf(job);
    const parts = [];
    if (job.stopped) parts.push(job.stopped);
    else if (job.complete) parts.push("all steps are committed");
    else if (!job.quorum) parts.push("no quorum yet: groups start");
    else parts.push(quorumOf(job.quorum));
    if (job.planned) parts.push(`planned: ${quorumOf(job.planned)}`);
    if (job.drained.length) parts.push(`drained: ${job.drained.map(placeName).join(", ")}`);
    return html`<p class="sentence" role="status"><span class="dot ${tone}" aria-hidden="true"></span><b>${word}</b>: ${parts.join("; ")}</p>`;
  }

  figures(job) {
    const speed = job.complete ? null : this.model.speed(job.now);
    const figures = [
      ["step", job.step.toLocaleString("en"), job.steps ? `of ${job.steps.toLocaleString("en")}` : ""],
      ["speed", speed === null ? "–" : number(speed, 3), "steps/s"],
      ["loss", number(job.loss), "mean of groups"],
      ["at work", `${job.members}`, `of ${count(job.desired, "group")}, ${count(job.agents, "node")}`],
      ["losses", `${job.losses}`, "of groups at work"],
      ["goodput", percent(goodput(job.group_seconds)), "of the groups' time"],
    ];
    return html`<dl class="figures">
      ${figures.map(([name, value, more]) => html`<div><dt>${name}</dt><dd>${value}</dd><dd class="quiet">${more}</dd></div>`)}
    </dl>`;
  }

  recoveries(job) {
    const all = job.recoveries.reduce((sum, each) => sum + each, 0);
    if (!all) return "None yet. One runs from the first sign of a loss until all members of the next quorum work under it.";
    return `${count(all, "recovery", "recoveries")}, ${duration(job.recovery_seconds / all)} on average, from the first sign of a loss until all members of the next quorum work under it.`;
  }

  times() {
    const { span } = this.timeline;
    const [from, to] = span.get();
    const shown = this.timeline.inView();
    const chosen = (width) => (width ? span.following === width : !span.following && !span.range);
    return html`
      <div class="buttons" role="group" aria-label="What of the time is shown">
        ${SPANS.map(([width, name]) => html`<button type="button" aria-pressed=${chosen(width) ? "true" : "false"} @click=${() => span.follow(width)}>${name}</button>`)}
        <button type="button" aria-label="closer" @click=${() => span.zoom(0.5)}>+</button>
        <button type="button" aria-label="farther" @click=${() => span.zoom(2)}>−</button>
        <button type="button" aria-label="earlier" @click=${() => span.move(-0.5)}>←</button>
        <button type="button" aria-label="later" @click=${() => span.move(0.5)}>→</button>
        <span class="quiet">${duration(to - from)}, to ${clock(to, to - from < 60 ? 3 : 0)}</span>
      </div>
      ${this.timeline.element}
      <p class="quiet">Drag to look closer; keys + − ← → 0 when the chart has the focus. Commits are drawn when heartbeats tell of them, up to a second late.</p>
      ${shown.length
        ? html`<ol class="events marks">
            ${shown.slice(0, LISTED).map(
              (mark) => html`<li><time>${clock(mark.at, 3)}</time><button type="button" class="kind ${toneOf(mark)}" @click=${() => this.closer(mark)} aria-label="look closer at ${mark.text}">${mark.lane}</button><span class="text">${mark.text}</span></li>`,
            )}
          </ol>`
        : html`<p class="quiet">Nothing but commits in this time.</p>`}
    `;
  }

  /** A mark with some time around it. */
  closer(mark) {
    const width = Math.max((mark.until ?? mark.at) - mark.at, 0.1);
    this.timeline.span.set(mark.at - width, (mark.until ?? mark.at) + width);
  }
}
