// All jobs of the lighthouse.

import { html } from "/web/vendor/lit-html/lit-html.js";
import { count, duration, number } from "/web/words.js";

/** The way back from anywhere. */
export const home = html`<nav aria-label="Where this is"><a href="/"><img src="/web/icon.svg" alt="" width="22" height="22"> Planaria: all jobs</a></nav>`;

export function stateOf(job) {
  if (job.complete) return { word: "complete", tone: "done" };
  if (job.stopped) return { word: "stopped", tone: "bad" };
  if (!job.members) return { word: "not begun", tone: "wait" };
  if (job.members < job.desired) return { word: "short of groups", tone: "warn" };
  return { word: "at work", tone: "ok" };
}

export function jobsPage({ jobs }) {
  if (!jobs.length) {
    return html`<h1>Jobs</h1>
      <section class="card"><p>The lighthouse knows no job yet. One appears here when <code>planaria run</code> has found it.</p></section>`;
  }
  return html`<h1>${count(jobs.length, "job")}</h1>
    <ul class="jobs">
      ${jobs.map((job) => {
        const { word, tone } = stateOf(job);
        return html`<li>
          <a class="card job" href="/jobs/${encodeURIComponent(job.job)}">
            <span class="name">${job.job}</span>
            <span class="state"><span class="dot ${tone}" aria-hidden="true"></span>${word}</span>
            <span>step <b>${job.step.toLocaleString("en")}</b>${job.steps ? ` of ${job.steps.toLocaleString("en")}` : ""}</span>
            <span>loss <b>${number(job.loss)}</b></span>
            <span>${job.complete ? count(job.desired, "group") : html`<b>${job.members}</b> of ${count(job.desired, "group")} at work`}</span>
            <span>${count(job.losses, "loss", "losses")}</span>
            <span class="quiet">${job.complete ? "all steps are committed" : `last commit heard of ${duration(job.since_commit)} ago`}</span>
          </a>
        </li>`;
      })}
    </ul>`;
}
