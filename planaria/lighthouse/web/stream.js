// The stream of server-sent events: open while somebody looks, and opened again whenever it breaks.

const AGAIN_MS = 2000; // a lighthouse that was killed is back within about a second

/**
 * Hear of one job, or of all jobs if `job` is null.
 *
 * @param {string | null} job
 * @param {{picture: (data: object) => void, news: (data: object) => void,
 *   silent: (since: number | null, full: boolean) => void}} on
 *   `silent` gets the time (ms) at which something was heard last while nobody answers, or the lighthouse has too many
 *   listeners (`full`); and null once it tells something.
 */
export function listen(job, on) {
  let source = null;
  let again = 0;
  let heard = Date.now();

  function open() {
    clearTimeout(again);
    source?.close();
    source = new EventSource(`/live/${encodeURIComponent(job ?? "")}`);
    source.addEventListener("picture", (event) => {
      heard = Date.now();
      on.silent(null, false);
      on.picture(JSON.parse(event.data));
    });
    source.addEventListener("news", (event) => on.news(JSON.parse(event.data)));
    source.addEventListener("error", () => {
      // A browser gives up by itself only if it was answered, and not with a stream: see `full` in streams.py.
      const full = source.readyState === EventSource.CLOSED;
      source.close();
      on.silent(heard, full);
      again = setTimeout(open, AGAIN_MS);
    });
  }

  // A browser has six connections for a site: a page that nobody sees must not keep one.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      clearTimeout(again);
      source?.close();
    } else {
      open();
    }
  });
  if (!document.hidden) open();
}
