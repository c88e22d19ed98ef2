/** Matrix multiplication on typed arrays: the kernel that works everywhere. wasm.js has a faster one. */

/** A kernel multiplies matrices: `load` prepares a K×N matrix that is used often, `matmul` takes it or a plain one. */
export class JavaScriptKernel {
  constructor() {
    this.name = "javascript";
  }

  load(matrix) {
    return matrix;
  }

  /** a (M×K) times b (K×N): M×N. Computes 4 rows at a time, so that each row of b is read M/4 times. */
  matmul(a, b, M, K, N) {
    const out = new Float32Array(M * N);
    const sums = new Float64Array(4 * N);
    for (let row = 0; row < M; row += 4) {
      const rows = Math.min(4, M - row);
      if (rows === 4) multiplyFourRows(a, b, sums, row, K, N);
      else multiplyRows(a, b, sums, row, rows, K, N);
      out.set(sums.subarray(0, rows * N), row * N);
    }
    return out;
  }
}

function multiplyFourRows(a, b, sums, row, K, N) {
  sums.fill(0);
  const a0 = row * K, a1 = a0 + K, a2 = a1 + K, a3 = a2 + K;
  for (let k = 0; k < K; k++) {
    const x0 = a[a0 + k], x1 = a[a1 + k], x2 = a[a2 + k], x3 = a[a3 + k];
    const start = k * N;
    for (let j = 0; j < N; j++) {
      const y = b[start + j];
      sums[j] += x0 * y;
      sums[N + j] += x1 * y;
      sums[2 * N + j] += x2 * y;
      sums[3 * N + j] += x3 * y;
    }
  }
}

function multiplyRows(a, b, sums, row, rows, K, N) {
  sums.fill(0);
  for (let i = 0; i < rows; i++) {
    for (let k = 0; k < K; k++) {
      const x = a[(row + i) * K + k];
      for (let j = 0; j < N; j++) sums[i * N + j] += x * b[k * N + j];
    }
  }
}

/** The transpose of a rows×columns matrix. */
export function transpose(matrix, rows, columns) {
  const out = new Float32Array(rows * columns);
  for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) out[j * rows + i] = matrix[i * columns + j];
  return out;
}
