// A timeline on a canvas: packets, bits and losses one above the other, the files below them, gaps,
// durable marks, and a range that is brushed. Times are numbers of nanoseconds from the left edge.

const LEFT = 62, RIGHT = 14, TOP = 20, FOOT = 52, SPACE = 26;
const ROWS = [
  { name: 'packets/s', color: '--packets', share: 0.46 },
  { name: 'bit/s on the wire', color: '--bits', share: 0.40 },
  { name: 'lost packets/s', color: '--lost', share: 0.14 },
];
const DAY = 86400e9;
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400];

/** `1.25 M`: a number with a decimal prefix. */
export function short(number) {
  for (const [factor, unit] of [[1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e3, 'k']]) {
    if (number >= factor) return `${+(number / factor).toFixed(2)} ${unit}`;
  }
  return `${number < 1 ? +number.toPrecision(2) : +number.toFixed(2)} `;
}

/** A time since 1970 (BigInt, ns) as `2026-11-21 13:45:01.123Z`. */
export function clock(ns, digits = 9) {
  const seconds = ns / 1000000000n;
  const date = new Date(Number(seconds) * 1000).toISOString().slice(0, 19).replace('T', ' ');
  const part = (ns % 1000000000n).toString().padStart(9, '0').slice(0, digits);
  return date + (digits ? `.${part}` : '') + 'Z';
}

/** The shortest round step of at least `rough` nanoseconds. */
function timeStep(rough) {
  if (rough <= 1e9) {
    for (let power = 1; power <= 1e9; power *= 10) {
      for (const n of [1, 2, 5]) if (n * power >= rough) return n * power;
    }
  }
  const step = STEPS.find((seconds) => seconds * 1e9 >= rough);
  return step ? step * 1e9 : Math.ceil(rough / DAY) * DAY;
}

/** A round step of values and the top of their scale. */
function scale(most, count) {
  if (!(most > 0)) return [1, 1];
  const rough = most / Math.max(1, count);
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= rough) ?? rough;
  return [step, Math.ceil(most / step) * step];
}

export class Chart {
  /** `brushed(from, to)` and `hovered(bin or null)` are called with offsets from the left edge. */
  constructor(canvas, { brushed, hovered }) {
    this.canvas = canvas;
    this.brushed = brushed;
    this.hovered = hovered;
    this.data = null;
    this.brush = null;
    this.cursor = null;
    canvas.addEventListener('pointerdown', (event) => this.#down(event));
    canvas.addEventListener('pointermove', (event) => this.#move(event));
    canvas.addEventListener('pointerup', (event) => this.#up(event));
    canvas.addEventListener('pointercancel', () => this.cancel());
    canvas.addEventListener('pointerleave', () => { this.cursor = null; this.hovered(null); this.draw(); });
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.draw());
  }

  /** Shows a timeline: `{origin, span, bin, rates: [[…], […], […]], gaps, parts, marks}`. */
  show(data) {
    this.data = data;
    this.draw();
  }

  /** Forgets a range that is being brushed; true if there was one. */
  cancel() {
    const was = this.brush !== null;
    this.brush = null;
    this.draw();
    return was;
  }

  get #plotWidth() { return Math.max(1, this.canvas.clientWidth - LEFT - RIGHT); }
  #x(ns) { return LEFT + Math.min(1, Math.max(0, ns / this.data.span)) * this.#plotWidth; }
  #ns(x) { return Math.min(1, Math.max(0, (x - LEFT) / this.#plotWidth)) * this.data.span; }

  #down(event) {
    if (event.button !== 0 || !this.data) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.brush = [event.offsetX, event.offsetX];
  }

  #move(event) {
    if (!this.data) return;
    if (this.brush) this.brush[1] = event.offsetX;
    this.cursor = event.offsetX;
    const bin = Math.floor(this.#ns(event.offsetX) / this.data.bin);
    this.hovered(Math.min(bin, this.data.rates[0].length - 1));
    this.draw();
  }

  #up(event) {
    const brush = this.brush;
    this.cancel();
    if (!brush || !this.data) return;
    const [a, b] = [brush[0], event.offsetX].sort((one, other) => one - other);
    if (b - a >= 4) this.brushed(this.#ns(a), this.#ns(b));
  }

  draw() {
    const { canvas, data } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    const ratio = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const pen = canvas.getContext('2d');
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = '12px system-ui, sans-serif';
    if (!data) return;
    const room = height - TOP - FOOT - SPACE * (ROWS.length - 1);
    let top = TOP;
    ROWS.forEach((row, number) => {
      this.#row(pen, color, row, data.rates[number], top, room * row.share);
      top += room * row.share + SPACE;
    });
    const bottom = top - SPACE;
    this.#gaps(pen, color('--gap'), bottom);
    data.parts.forEach(([from, to], number) => {
      pen.fillStyle = color('--segment');
      const x = this.#x(from);
      pen.fillRect(x, bottom + 4 + (number % 2) * 6, Math.max(1, this.#x(to) - x), 4);
    });
    this.#times(pen, color, bottom + 16);
    for (const [ns, name] of data.marks) this.#mark(pen, color('--mark'), ns, name, bottom);
    if (this.cursor !== null && this.cursor >= LEFT && this.cursor <= width - RIGHT) {
      pen.fillStyle = color('--quiet');
      pen.fillRect(this.cursor, TOP, 1, bottom - TOP);
    }
    if (this.brush) {
      const [a, b] = [...this.brush].sort((one, other) => one - other);
      pen.fillStyle = color('--brush');
      pen.fillRect(a, TOP, b - a, bottom - TOP);
    }
  }

  #row(pen, color, row, rates, top, height) {
    const { data } = this;
    const bottom = top + height, right = LEFT + this.#plotWidth;
    const most = rates.reduce((a, b) => Math.max(a, b), 0);
    const [step, limit] = scale(most, height / 36);
    pen.textAlign = 'right';
    for (let value = 0; value <= limit * 1.0001; value += step) {
      const y = Math.round(bottom - value / limit * height) + 0.5;
      pen.strokeStyle = color('--line');
      pen.beginPath();
      pen.moveTo(LEFT, y);
      pen.lineTo(right, y);
      pen.stroke();
      pen.fillStyle = color('--quiet');
      pen.fillText(short(value).trim(), LEFT - 6, y + 4);
    }
    pen.textAlign = 'left';
    pen.fillStyle = color('--text');
    pen.fillText(row.name, LEFT, top - 6);
    pen.fillStyle = color(row.color);
    rates.forEach((rate, bin) => {
      if (rate === 0) return;
      // Whole pixels: else neighbours would have seams.
      const x = Math.round(this.#x(bin * data.bin));
      const wide = Math.round(this.#x((bin + 1) * data.bin)) - x;
      const tall = Math.max(1, rate / limit * height);
      pen.fillRect(x, bottom - tall, Math.max(1, wide), tall);
    });
  }

  #gaps(pen, color, bottom) {
    pen.strokeStyle = color;
    pen.globalAlpha = 0.45;
    for (const [from, to] of this.data.gaps) {
      const [a, b] = [this.#x(from), this.#x(to)];
      pen.save();
      pen.beginPath();
      pen.rect(a, TOP, b - a, bottom - TOP);
      pen.clip();
      pen.beginPath();
      for (let x = a - (bottom - TOP); x < b; x += 9) {
        pen.moveTo(x, bottom);
        pen.lineTo(x + bottom - TOP, TOP);
      }
      pen.stroke();
      pen.restore();
    }
    pen.globalAlpha = 1;
  }

  #mark(pen, color, ns, name, bottom) {
    if (ns < 0 || ns > this.data.span) return;
    const x = Math.round(this.#x(ns)) + 0.5;
    pen.strokeStyle = pen.fillStyle = color;
    pen.setLineDash([5, 3]);
    pen.beginPath();
    pen.moveTo(x, TOP - 4);
    pen.lineTo(x, bottom);
    pen.stroke();
    pen.setLineDash([]);
    const onLeft = x > LEFT + this.#plotWidth / 2;
    pen.textAlign = onLeft ? 'right' : 'left';
    // Beside the name of the first row.
    const words = onLeft ? x - 4 : Math.max(x + 4, LEFT + 66);
    pen.fillText(`${name}: durable up to here`, words, TOP - 6);
  }

  #times(pen, color, y) {
    const { data } = this;
    const step = timeStep(data.span / Math.max(1, this.#plotWidth / 110));
    const digits = Math.max(0, 9 - Math.floor(Math.log10(step) + 1e-9));
    const wide = BigInt(step);
    let at = (data.origin + wide - 1n) / wide * wide;
    let day = '';
    for (; at - data.origin < BigInt(Math.ceil(data.span)); at += wide) {
      const x = this.#x(Number(at - data.origin));
      pen.fillStyle = color('--line');
      pen.fillRect(x, y - 4, 1, 6);
      pen.fillStyle = color('--quiet');
      const text = clock(at, digits);
      // Half of the words would be outside.
      pen.textAlign = x < LEFT + 30 ? 'left' : x > LEFT + this.#plotWidth - 30 ? 'right' : 'center';
      pen.fillText(step >= DAY ? text.slice(0, 10) : text.slice(11, -1), x, y + 14);
      if (step < DAY && text.slice(0, 10) !== day) pen.fillText(text.slice(0, 10), x, y + 29);
      day = text.slice(0, 10);
    }
  }
}
