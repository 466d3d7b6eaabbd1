// Turns the samples of the last minutes into columns for the charts. Rates at a point are over the 10 s before it,
// quantiles over the 60 s before it.

const MOST_POINTS = 300;
const RATE_SECONDS = 10;
const QUANTILE_SECONDS = 60;
const OUTCOMES = ["finished", "cancelled", "rejected", "failed"];
const DISTRIBUTIONS = ["time_to_first_token", "inter_token", "duration"];
const QUANTILES = [0.5, 0.95, 0.99];

// Returns a quantile as Prometheus computes it: linear within a bucket, and the last boundary for values above it.
// Returns null if there are no values.
export function quantile(counts, boundaries, q) {
  const ordered = [...counts].sort((a, b) => a[0] - b[0]);
  const total = ordered.reduce((sum, [, count]) => sum + count, 0);
  if (total === 0) return null;
  let rank = q * total;
  for (const [bucket, count] of ordered) {
    if (rank <= count) {
      if (bucket >= boundaries.length) return boundaries.at(-1);
      const low = bucket === 0 ? 0 : boundaries[bucket - 1];
      return low + (boundaries[bucket] - low) * (rank / count);
    }
    rank -= count;
  }
  return null;
}

export class Window {
  constructor(boundaries) {
    this.boundaries = boundaries;
    this.samples = [];
    this.points = [];
  }

  // Adds the samples that are new, and returns whether there were any.
  add(samples) {
    const last = this.samples.at(-1)?.number ?? 0;
    const fresh = samples.filter((sample) => sample.number > last);
    for (const sample of fresh) {
      this.samples.push(sample);
      this.points.push(this.#point());
    }
    this.samples = this.samples.slice(-MOST_POINTS);
    this.points = this.points.slice(-MOST_POINTS);
    return fresh.length > 0;
  }

  column(name) {
    return this.points.map((point) => point[name]);
  }

  get latest() {
    return this.points.at(-1);
  }

  // Returns the samples of the last seconds, including the newest.
  #last(seconds) {
    let from = this.samples.length;
    for (let covered = 0; from > 0 && covered < seconds - 0.5; from--) covered += this.samples[from - 1].seconds;
    return this.samples.slice(from);
  }

  #point() {
    const now = this.samples.at(-1);
    const recent = this.#last(RATE_SECONDS);
    const seconds = recent.reduce((sum, sample) => sum + sample.seconds, 0);
    const rate = (read) => recent.reduce((sum, sample) => sum + read(sample), 0) / seconds;
    const point = {
      time: now.at_unix_ms / 1000,
      running: now.running,
      waiting: now.waiting + now.tokenizing,
      kv_usage: now.kv_usage,
      kv_cached: now.kv_cached,
      generated: rate((sample) => sample.generation_tokens),
      computed: rate((sample) => sample.computed_tokens),
      requests: rate((sample) => Object.values(sample.requests).reduce((sum, count) => sum + count, 0)),
    };
    for (const outcome of OUTCOMES) point[outcome] = rate((sample) => sample.requests[outcome] ?? 0);
    const minute = this.#last(QUANTILE_SECONDS);
    for (const name of DISTRIBUTIONS) {
      const counts = new Map();
      for (const sample of minute) {
        for (const [bucket, count] of sample[name]) counts.set(bucket, (counts.get(bucket) ?? 0) + count);
      }
      for (const q of QUANTILES) point[`${name}_${q * 100}`] = quantile(counts, this.boundaries[name], q);
    }
    return point;
  }
}
