// What was heard of one job, put together. Bounded, for a page may stay open for weeks.

const EVENTS = 1000;
const MARKS = 4096;
const COMMITS = 8192;
const SPEED_SECONDS = 30; // steps a second are those of the last half minute, as in planaria top
const LEAST_SECONDS = 1; // below it a rate says more of the heartbeats than of the steps

export class Model {
  constructor() {
    this.forget();
  }

  forget() {
    this.events = []; // {at, kind, group, text}, oldest first
    this.marks = []; // {lane, at, until, group, step, text}
    this.commits = []; // [at, step]: the newest, one by one
    this.loss = []; // [step, mean, least, most]
    this.progress = []; // [seconds since the lighthouse began, step, …]
  }

  /** Take what the lighthouse says that is new. */
  take(news) {
    if (news.anew) this.forget();
    for (const [at, kind, group, text] of news.events) this.events.push({ at, kind, group, text });
    for (const [lane, at, until, group, step, text] of news.marks) {
      this.marks.push({ lane, at, until, group, step, text });
    }
    this.commits.push(...news.commits);
    this.events.splice(0, this.events.length - EVENTS);
    this.marks.splice(0, this.marks.length - MARKS);
    this.commits.splice(0, this.commits.length - COMMITS);
    this.loss.splice(news.loss.from, Infinity, ...news.loss.rows);
    this.progress.splice(news.progress.from, Infinity, ...news.progress.rows);
  }

  /** Steps a second of late, or null if too little was seen. */
  speed() {
    const last = this.commits.at(-1);
    if (!last) return null;
    let first = this.commits.length - 1;
    while (first > 0 && last[0] - this.commits[first - 1][0] <= SPEED_SECONDS) {
      if (this.commits[first - 1][1] > this.commits[first][1]) break; // the job went back to a checkpoint
      first -= 1;
    }
    const [at, step] = this.commits[first];
    return last[0] - at >= LEAST_SECONDS ? (last[1] - step) / (last[0] - at) : null;
  }

  /** Every commit that is known: those of long ago in steps of seconds or more, the newest one by one. */
  everyCommit(began) {
    const first = this.commits.length ? this.commits[0][0] : Infinity;
    const old = this.progress.map(([seconds, , , most]) => [began + seconds, most]).filter(([at]) => at < first);
    return [...old, ...this.commits];
  }
}

/** A group's line in a picture. */
export function groupOf([number, life, condition, phase, step, stepSeconds, loss, shards, node, note]) {
  return { number, life, condition, phase, step, stepSeconds, loss, shards, node, note };
}
