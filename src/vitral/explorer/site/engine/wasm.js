/** Matrix multiplication in WebAssembly with SIMD: the fast kernel. The module is assembled here, from the instructions
 * in `multiply`, so that the source is what runs.
 *
 * Both matrices are packed so that the inner loop reads memory in order: a in blocks of 4 rows (K×4 each), b in panels of
 * 8 columns (K×8 each). The inner loop keeps a 4×8 tile of the result in eight registers of four floats. */

const ROWS = 4, COLUMNS = 8, FLOAT = 4; // tile of the result; bytes of a float
const PAGE = 65536;

// ── assembler: only the instructions that `multiply` uses ─────────────────────────────────────────────────────

const I32 = 0x7f, V128 = 0x7b, SIMD = 0xfd, VOID = 0x40;

/** LEB128 of a non-negative integer. */
function unsigned(value) {
  return value < 128 ? [value] : [(value & 127) | 128, ...unsigned(value >>> 7)];
}

/** LEB128 of a small signed integer. */
function signed(value) {
  return value >= -64 && value < 64 ? [value & 127] : [(value & 127) | 128, ...signed(value >> 7)];
}

const get = (local) => [0x20, local];
const set = (local, ...value) => [...value.flat(), 0x21, local];
const constant = (value) => [0x41, ...signed(value)];
const add = (a, b) => [...a, ...b, 0x6a];
const subtract = (a, b) => [...a, ...b, 0x6b];
const times = (a, b) => [...a, ...b, 0x6c];
const load = (address, offset) => [...address, SIMD, 0x00, 2, ...unsigned(offset)]; // four floats
const splat = (address, offset) => [...address, SIMD, 0x09, 2, ...unsigned(offset)]; // one float, four times
const store = (address, offset, value) => [...address, ...value, SIMD, 0x0b, 2, ...unsigned(offset)];
const zero = [SIMD, 0x0c, ...Array(16).fill(0)];
const addFloats = (a, b) => [...a, ...b, SIMD, 0xe4, 0x01];
const timesFloats = (a, b) => [...a, ...b, SIMD, 0xe6, 0x01];
/** do { body } while (counter -= step) */
const countDown = (counter, step, ...body) => [
  0x03, VOID, ...body.flat(), ...subtract(get(counter), constant(step)), 0x22, counter, 0x0d, 0, 0x0b,
];

// ── the kernel: c (M×N) = a (M×K)·b (K×N), M a multiple of 4 and N of 8 ──────────────────────────────────────

function multiply() {
  const [a, b, c, M, K, N] = [0, 1, 2, 3, 4, 5]; // parameters: three addresses, three sizes
  const [columns, rows, k, pa, pb, pc] = [6, 7, 8, 9, 10, 11]; // counters and addresses
  const tile = (row, half) => 12 + 2 * row + half, [b0, b1, x] = [20, 21, 22]; // registers of four floats
  const everyRow = [0, 1, 2, 3], rowBytes = times(get(N), constant(FLOAT));
  const inner = [
    set(b0, load(get(pb), 0)),
    set(b1, load(get(pb), 16)),
    everyRow.map((row) => [
      ...set(x, splat(get(pa), row * FLOAT)),
      ...set(tile(row, 0), addFloats(get(tile(row, 0)), timesFloats(get(x), get(b0)))),
      ...set(tile(row, 1), addFloats(get(tile(row, 1)), timesFloats(get(x), get(b1)))),
    ]).flat(),
    set(pa, add(get(pa), constant(ROWS * FLOAT))),
    set(pb, add(get(pb), constant(COLUMNS * FLOAT))),
  ];
  const rowBlock = [
    everyRow.map((row) => [...set(tile(row, 0), zero), ...set(tile(row, 1), zero)]).flat(),
    set(pb, get(b)),
    set(k, get(K)),
    countDown(k, 1, ...inner),
    everyRow.map((row) => [
      ...store(get(pc), 0, get(tile(row, 0))),
      ...store(get(pc), 16, get(tile(row, 1))),
      ...set(pc, add(get(pc), rowBytes)),
    ]).flat(),
  ];
  const panel = [
    set(pa, get(a)),
    set(pc, get(c)),
    set(rows, get(M)),
    countDown(rows, ROWS, ...rowBlock),
    set(b, add(get(b), times(get(K), constant(COLUMNS * FLOAT)))),
    set(c, add(get(c), constant(COLUMNS * FLOAT))),
  ];
  return [...set(columns, get(N)), ...countDown(columns, COLUMNS, ...panel)];
}

/** The bytes of a module that imports a memory ("m" "m") and exports the kernel ("f"). */
function assemble() {
  const section = (id, ...content) => [id, ...unsigned(content.length), ...content];
  const body = [2, 6, I32, 11, V128, ...multiply(), 0x0b]; // locals, instructions, end
  const name = (text) => [text.length, ...new TextEncoder().encode(text)];
  return new Uint8Array([
    ...new TextEncoder().encode("\0asm"), 1, 0, 0, 0,
    ...section(1, 1, 0x60, 6, I32, I32, I32, I32, I32, I32, 0), // type: six integers, no result
    ...section(2, 1, ...name("m"), ...name("m"), 2, 0, 1), // import: a memory of at least one page
    ...section(3, 1, 0), // one function of that type
    ...section(7, 1, ...name("f"), 0, 0), // export
    ...section(10, 1, ...unsigned(body.length), ...body),
  ]);
}

const roundUp = (value, multiple) => Math.ceil(value / multiple) * multiple;

/** Same interface as JavaScriptKernel. Loaded matrices stay in WebAssembly's memory; the rest of it is scratch. */
export class WasmKernel {
  static isSupported() {
    return typeof WebAssembly === "object" && WebAssembly.validate(assemble());
  }

  constructor() {
    this.name = "wasm";
    this.memory = new WebAssembly.Memory({ initial: 16 });
    this.kernel = new WebAssembly.Instance(new WebAssembly.Module(assemble()), { m: { m: this.memory } }).exports.f;
    this.floats = new Float32Array(this.memory.buffer);
    this.used = 0; // floats of loaded matrices
  }

  /** Make room for `count` floats after the loaded matrices. */
  reserve(count) {
    const missing = (this.used + count - this.floats.length) * FLOAT;
    if (missing <= 0) return;
    this.memory.grow(Math.ceil(missing / PAGE));
    this.floats = new Float32Array(this.memory.buffer);
  }

  load(matrix, K, N) {
    const size = K * roundUp(N, COLUMNS);
    this.reserve(size);
    const start = this.used;
    this.packColumns(matrix, K, N, start);
    this.used += size;
    return { start };
  }

  /** b in panels of 8 columns, padded with zeros. */
  packColumns(b, K, N, start) {
    const { floats } = this;
    for (let panel = 0, out = start; panel < N; panel += COLUMNS) {
      const width = Math.min(COLUMNS, N - panel);
      for (let k = 0; k < K; k++, out += COLUMNS) {
        for (let j = 0; j < COLUMNS; j++) floats[out + j] = j < width ? b[k * N + panel + j] : 0;
      }
    }
  }

  /** a in blocks of 4 rows, padded with zeros. */
  packRows(a, M, K, start) {
    const { floats } = this;
    for (let block = 0; block < M; block += ROWS) {
      for (let i = 0; i < ROWS; i++) {
        const row = (block + i) * K, out = start + block * K + i;
        for (let k = 0; k < K; k++) floats[out + k * ROWS] = block + i < M ? a[row + k] : 0;
      }
    }
  }

  /** a (M×K) times b (K×N), a plain matrix or a loaded one: M×N. */
  matmul(a, b, M, K, N) {
    const isLoaded = !(b instanceof Float32Array);
    const paddedM = roundUp(M, ROWS), paddedN = roundUp(N, COLUMNS), sizeB = isLoaded ? 0 : K * paddedN;
    this.reserve(paddedM * K + sizeB + paddedM * paddedN);
    const startA = this.used, startB = isLoaded ? b.start : startA + paddedM * K, startC = startA + paddedM * K + sizeB;
    this.packRows(a, M, K, startA);
    if (!isLoaded) this.packColumns(b, K, N, startB);
    this.kernel(startA * FLOAT, startB * FLOAT, startC * FLOAT, paddedM, K, paddedN);
    if (N === paddedN) return this.floats.slice(startC, startC + M * N);
    const out = new Float32Array(M * N);
    for (let i = 0; i < M; i++) out.set(this.floats.subarray(startC + i * paddedN, startC + i * paddedN + N), i * N);
    return out;
  }
}
